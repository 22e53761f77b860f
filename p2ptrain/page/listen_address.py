"""Address at which a page is served, and checks that it can be.

Importing this module needs no extra, so commands can check the address before they start anything.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Self

from p2ptrain.base.documents import install_extra
from p2ptrain.base.errors import UserError

LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = (LOOPBACK, "::1", "localhost")


@dataclass(frozen=True, slots=True)
class ListenAddress:
    host: str = LOOPBACK
    port: int = 0
    """Port; 0: any free one."""
    token: str = ""
    """Access token; empty: drawn if one is needed."""
    hosts: tuple[str, ...] = ()
    """Host names under which the page may be opened. Empty: the loopback's names on a loopback, any name elsewhere."""

    @classmethod
    def parse(cls, text: str, token: str = "", hosts: str = "") -> Self:
        """Parse ``8080``, ``0.0.0.0:8080`` or ``[::]:8080``, and comma-separated ``hosts``. Raises UserError."""
        host, _, port = text.rpartition(":")
        if not (port.isascii() and port.isdigit() and len(port) <= 5) or int(port) > 65535:
            raise UserError(
                f"{text!r} is not an address for the page.",
                "Give a port, or an address and a port: 8080, 0.0.0.0:8080.",
            )
        allowed = tuple(bare for name in hosts.split(",") if (bare := name.strip().strip("[]").lower()))
        return cls(host.strip("[]") or LOOPBACK, int(port), token, allowed)

    @property
    def is_loopback(self) -> bool:
        return self.host in LOOPBACK_NAMES


def check_installed() -> None:
    """Raise UserError if the extra ``page`` is missing."""
    try:
        import aiohttp
        import prometheus_client
    except ImportError as error:
        raise UserError(f"The page needs {error.name}, which is not installed.", install_extra("page")) from None
    del aiohttp, prometheus_client


def check_listen_address(place: ListenAddress) -> None:
    """Raise UserError if a page cannot listen there now, or if the extra ``page`` is missing."""
    check_installed()
    listener_at(place).close()


def listener_at(place: ListenAddress) -> socket.socket:
    """Return a listening socket. Raises UserError if it cannot listen there."""
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    listener: socket.socket | None = None
    try:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((place.host, place.port))
        listener.listen(128)
    except (OSError, UnicodeError) as error:
        if listener is not None:
            listener.close()
        host = f"[{place.host}]" if ":" in place.host else place.host
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(
            f"The page cannot be served at {host}:{place.port}: {why}.",
            "Choose another port, 0 for any free one, or an address of this computer: 127.0.0.1, [::1].",
        ) from error
    return listener
