"""Multiaddresses: the supported forms, what they say, and p2pd's binary form.

    /ip4/203.0.113.7/tcp/31337                        dial TCP; also ip6, dns, dns4, dns6
    /ip4/203.0.113.7/tcp/31337/p2p/12D3Koo…           dial TCP, and expect this peer
    /ip4/…/tcp/…/p2p/12D3KooR…/p2p-circuit            dial through the relay 12D3KooR…

hivemind 1.1.12 writes ``/p2p/`` components in a form that p2pd rejects; ``packed`` writes the form that go-libp2p
reads.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal

import base58

from p2ptrain.base.errors import UserError
from p2ptrain.base.ids import PeerId, key_of, multihash

_HOST_CODES = {"ip4": 4, "ip6": 41, "dns": 53, "dns4": 54, "dns6": 55}
_TCP_CODE, _P2P_CODE, _CIRCUIT_CODE = 6, 421, 290  # github.com/multiformats/multiaddr, protocols.csv
_HOST_NAMES = {code: name for name, code in _HOST_CODES.items()}
_FIXED_BYTES = {"ip4": 4, "ip6": 16}
_MAX_PART_BYTES = 255  # longest host name (RFC 1035) or peer id; an Ed25519 peer id has 38 bytes
_HOSTNAME = re.compile(r"[0-9A-Za-z]([0-9A-Za-z.-]{0,251}[0-9A-Za-z])?")
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("::/96")  # RFC 6052, RFC 4291
_TRANSLATED_NEARBY = ipaddress.ip_network("64:ff9b:1::/48")  # RFC 8215
REMEMBERED = 1024  # addresses and peer ids whose other form is kept: a partner's come with every message


@lru_cache(REMEMBERED)
def packed(address: str) -> bytes:
    """Return the binary form that p2pd dials. Raises ValueError for an address in no supported form."""
    parts = address.split("/")
    if parts[0] != "" or len(parts) < 5:
        raise ValueError(f"expected a multiaddress such as /ip4/203.0.113.7/tcp/31337, got {address!r}")
    head = _packed_host(parts[1], parts[2]) + _packed_port(parts[3], parts[4])
    return head + _packed_route(address, parts[5:])


def unpacked(raw: bytes) -> str:
    """Return the address that ``packed`` encoded, or that p2pd reports. Raises ValueError for an unsupported form."""
    code, rest = split_varint(raw)
    protocol = _HOST_NAMES.get(code)
    if protocol is None:
        raise ValueError(f"expected an address of a known protocol, got protocol {code}")
    length, rest = (_FIXED_BYTES[protocol], rest) if protocol in _FIXED_BYTES else split_varint(rest)
    host, rest = rest[:length], rest[length:]
    port_code, rest = split_varint(rest)
    if port_code != _TCP_CODE or len(host) != length or len(rest) < 2:
        raise ValueError("expected a TCP address, got another protocol or an incomplete address")
    name = str(ipaddress.ip_address(host)) if protocol in _FIXED_BYTES else host.decode("ascii")
    text, rest = f"/{protocol}/{name}/tcp/{int.from_bytes(rest[:2], 'big')}", rest[2:]
    while rest:
        code, rest = split_varint(rest)
        if code == _CIRCUIT_CODE:
            text += "/p2p-circuit"
            continue
        length, rest = split_varint(rest)
        if code != _P2P_CODE or not 0 < length <= min(len(rest), _MAX_PART_BYTES):
            raise ValueError("expected a peer or a relay after the TCP port, got something else")
        text, rest = f"{text}/p2p/{base58.b58encode(rest[:length]).decode()}", rest[length:]
    packed(text)
    return text


def is_dialable(address: str) -> bool:
    """Return whether p2pd can dial the address."""
    try:
        return bool(packed(address))
    except ValueError:
        return False


@lru_cache(REMEMBERED)
def ip_of(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address's IP address (for IPv4-mapped IPv6, the IPv4 address); None for a name or any other text."""
    parts = address.split("/")
    if len(parts) < 3 or parts[1] not in _FIXED_BYTES:
        return None
    try:
        host = ipaddress.ip_address(parts[2])
    except ValueError:
        return None
    return getattr(host, "ipv4_mapped", None) or host


def family_of(address: str) -> Literal[4, 6] | None:
    """Return the version of IP by which the address's first hop is dialed; None for any other text, or either."""
    host = ip_of(address)
    if host is not None:
        return 4 if host.version == 4 else 6
    return {"dns4": 4, "dns6": 6}.get(address.split("/")[1] if "/" in address else "")  # type: ignore[return-value]


def is_loopback(address: str) -> bool:
    """Return whether only this machine can dial the address. Accepts any text."""
    host = ip_of(address)
    return host is not None and host.is_loopback


def is_public(address: str) -> bool:
    """Return whether the whole internet can dial the address; host names count as public. Accepts any text."""
    host = ip_of(address)
    return is_name(address) if host is None else is_on_internet(host)


def is_on_internet(host: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether an IP address is on the internet; of one that is translated to IPv4, the IPv4 address decides.

    Routers translate NAT64 and 6to4 addresses, so one of them may lead into a private network.
    """
    if isinstance(host, ipaddress.IPv4Address):
        return host.is_global
    inner = host.ipv4_mapped or host.sixtofour
    if any(host in each for each in _TRANSLATED):
        inner = ipaddress.IPv4Address(int(host) & 0xFFFFFFFF)
    return host not in _TRANSLATED_NEARBY and (host.is_global if inner is None else inner.is_global)


def is_name(address: str) -> bool:
    """Return whether the address begins with a host name. Accepts any text."""
    parts = address.split("/")
    return len(parts) > 2 and parts[1] in _HOST_CODES.keys() - _FIXED_BYTES.keys()


def relay_of(address: str) -> PeerId | None:
    """Return the relay that the address leads through; None for a direct address."""
    direct, circuit, _ = address.partition("/p2p-circuit")
    return split_peer(direct)[1] if circuit else None


def way_to(addresses: Iterable[str]) -> Literal["direct", "relayed", "dials out"]:
    """Classify a peer's announced addresses: direct, through relays only, or none (the peer only dials out)."""
    places = list(addresses)
    if not places:
        return "dials out"
    direct = [each for each in places if not relay_of(each)]
    # A private address beside a circuit works in the LAN only.
    is_relayed = len(direct) < len(places) and not any(map(is_public, direct))
    return "relayed" if is_relayed else "direct"


def through(relay: PeerId, place: str) -> str:
    """Return the circuit address of a peer with a reservation at the relay at ``place``, without that peer's id."""
    return f"{with_peer(place, relay)}/p2p-circuit"


def split_peer(address: str) -> tuple[str, PeerId | None]:
    """Split the address into its first part and the peer id at its end, if any."""
    head, _, peer = address.rpartition("/p2p/")
    return (head, PeerId(peer)) if head and "/" not in peer else (address, None)


def with_peer(address: str, peer: PeerId) -> str:
    """Return the address with this peer id at its end, as in a join link."""
    return f"{split_peer(address)[0]}/p2p/{peer}"


def host_port(address: str) -> str:
    """Format the address for people, such as ``203.0.113.7:31337``; unchanged if it has no such form."""
    parts = address.split("/")
    if len(parts) < 5:
        return address
    return f"[{parts[2]}]:{parts[4]}" if parts[1] == "ip6" else f"{parts[2]}:{parts[4]}"


def host_of(address: str) -> str:
    """Return the address's IP address or host name; empty if it has none."""
    parts = address.split("/")
    return parts[2] if len(parts) > 2 else ""


def port_of(addresses: Iterable[str]) -> int:
    """Return the port of the first address that has one; 0 if none has."""
    ports = (host_port(each).rpartition(":")[2] for each in addresses)
    return next((int(port) for port in ports if port.isdigit()), 0)


def multiaddress(host: str, port: int) -> str:
    """Build the TCP multiaddress of a host (IP address or name) and a port."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return f"/dns/{host}/tcp/{port}"
    return f"/ip{version}/{host}/tcp/{port}"


def listening(port: int, local: bool = False) -> tuple[str, ...]:
    """Return the default addresses to listen on: all interfaces by IPv4 and IPv6, or loopback if ``local``."""
    return tuple(multiaddress(host, port) for host in (("127.0.0.1",) if local else ("0.0.0.0", "::")))


def best_of_each_family(addresses: Sequence[str]) -> list[str]:
    """Return the first address of IPv4 and the first of IPv6, in the given order; names count as both.

    A private IPv6 address beside a private IPv4 address is left out, as both lead to the same network.
    """
    found: dict[int, str] = {}
    for each in addresses:
        for family in {family_of(each) or 4, family_of(each) or 6}:
            found.setdefault(family, each)
    best = [each for each in addresses if each in found.values()]
    return best if any(map(is_public, best)) else best[:1]


def _packed_host(protocol: str, host: str) -> bytes:
    code = _HOST_CODES.get(protocol)
    if code is None:
        raise ValueError(f"expected one of {', '.join(_HOST_CODES)}, got {protocol!r}")
    if protocol == "ip4":
        return varint(code) + ipaddress.IPv4Address(host).packed
    if protocol == "ip6":
        if "%" in host:  # Python accepts any text as a zone; a zone has a meaning on one machine only
            raise ValueError(f"expected an IPv6 address without a zone, got {host!r}")
        return varint(code) + ipaddress.IPv6Address(host).packed
    if not _HOSTNAME.fullmatch(host):
        raise ValueError(f"expected a host name, got {host!r}")
    return varint(code) + varint(len(host)) + host.encode()


def _packed_port(protocol: str, port: str) -> bytes:
    if protocol != "tcp" or not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise ValueError(f"expected a TCP port, got /{protocol}/{port}")
    return varint(_TCP_CODE) + int(port).to_bytes(2, "big")


def _packed_route(address: str, parts: list[str]) -> bytes:
    """Encode what follows the port: nothing, a peer, or a relay and optionally the peer behind it."""
    if len(parts) not in (0, 2, 3, 5) or parts[2:3] not in ([], ["p2p-circuit"]):
        raise ValueError(f"expected at most a peer or a relay after the TCP port, got {address!r}")
    peers = [_packed_peer(*parts[start : start + 2]) for start in (0, 3) if parts[start:]]
    return varint(_CIRCUIT_CODE).join(peers) + (varint(_CIRCUIT_CODE) if len(parts) == 3 else b"")


def _packed_peer(protocol: str, peer: str) -> bytes:
    raw = multihash(peer)
    if protocol != "p2p" or raw is None or key_of(peer) is None:
        raise ValueError(f"expected a peer ID, got /{protocol}/{peer}")
    return varint(_P2P_CODE) + varint(len(raw)) + raw


def split_varint(raw: bytes) -> tuple[int, bytes]:
    """Split off the number that ``varint`` wrote at the beginning. Raises ValueError if it is incomplete."""
    number = 0
    for index, byte in enumerate(raw[:10]):
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number, raw[index + 1 :]
    raise ValueError("expected a varint, got an incomplete one")


def varint(number: int) -> bytes:
    """Encode a number in seven bits per byte, low bits first (multiformats unsigned-varint)."""
    raw = b""
    while number >= 0x80:
        raw += bytes([number & 0x7F | 0x80])
        number >>= 7
    return raw + bytes([number])


def check(listen: Iterable[str], announce: Iterable[str], bootstraps: Iterable[str]) -> None:
    """Raise UserError unless an owner's addresses can be listened on, announced and dialed."""
    example = "Write it like /ip4/203.0.113.7/tcp/31337"
    for each in listen:
        if not is_dialable(each):
            raise UserError(f"{each!r} is not a usable address.", "Write it like /ip4/0.0.0.0/tcp/31337.")
    for each in announce:
        if not is_dialable(each):
            raise UserError(f"{each!r} is not a usable address.", f"{example}.")
        if split_peer(each)[1] is not None or host_port(each).endswith(":0"):
            raise UserError(
                f"{each!r} cannot be announced.", f"Name an address with a port and without a peer ID. {example}."
            )
    for each in bootstraps:
        if not is_dialable(each) or split_peer(each)[1] is None:
            raise UserError(f"{each!r} is not the address of a bootstrap.", f"{example}/p2p/12D3Koo….")
