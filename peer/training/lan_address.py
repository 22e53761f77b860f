"""Private address of this computer on which a peer waits for its owner's other computers."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

import psutil

from p2ptrain.base.errors import DeviceError

DEFAULT_PORT = 7007
_TEXT = re.compile(r"(?P<host>[0-9.]{7,15})(?::(?P<port>[0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class LanAddress:
    """IPv4 address and TCP port of a team's leader."""

    host: str
    port: int = DEFAULT_PORT

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @staticmethod
    def parse(text: str) -> LanAddress:
        """Return the address that people wrote as HOST or HOST:PORT. Raises DeviceError unless it is a private one."""
        example = f"Name the leader's address on your own network, as 192.168.1.5 or 192.168.1.5:{DEFAULT_PORT}."
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            raise DeviceError(f"{text!r} is not an IPv4 address.", example)
        try:
            host = ipaddress.IPv4Address(found["host"])
        except ValueError:
            raise DeviceError(f"{found['host']!r} is not an IPv4 address.", example) from None
        port = int(found["port"] or DEFAULT_PORT)
        if not 0 < port < 65_536:
            raise DeviceError(f"{port} is not a TCP port.", "Choose one from 1024 to 65535.")
        if not is_private(host):
            raise DeviceError(
                f"{host} is not an address of a private network, and a team speaks to no other.",
                f"{example} Over the internet, use the private address of a WireGuard tunnel.",
            )
        return LanAddress(str(host), port)


def is_private(host: ipaddress.IPv4Address) -> bool:
    """Return whether an address is one of a private network, of a carrier's or a tunnel's, or loopback."""
    return not (host.is_global or host.is_unspecified or host.is_multicast or host.is_reserved)


def check_to_lead(at: str) -> None:
    """Raise DeviceError if this computer cannot wait for others there."""
    address = LanAddress.parse(at)
    interface_of(address.host)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            raise DeviceError(
                f"This peer cannot listen on {address}: {error.strerror}.",
                f"Another peer may use it. Choose another port: --at {address.host}:{min(address.port + 1, 65_535)}.",
            ) from error


def interface_of(host: str) -> str:
    """Return the name of this computer's interface with this address, on which gloo then listens.

    Raises DeviceError if there is none, or if gloo would listen on another address of that interface.
    """
    own: list[str] = []
    for name, addresses in psutil.net_if_addrs().items():
        there = [each.address for each in addresses if each.family == socket.AF_INET]
        own += there
        if host in there:
            if there[0] != host:
                raise DeviceError(
                    f"{host} is the second address of {name}, and torch listens on its first, {there[0]}.",
                    f"Use {there[0]}.",
                )
            return name
    listed = ", ".join(each for each in own if is_private(ipaddress.IPv4Address(each))) or "none"
    raise DeviceError(f"This computer has no address {host}.", f"Use one of its private addresses: {listed}.")
