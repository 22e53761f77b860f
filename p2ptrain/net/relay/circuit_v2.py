"""The messages of libp2p's circuit relay v2, as bytes (specification: relay/circuit-v2). Pure.

HOP is what a relay is asked: for a place (RESERVE), or to be led to somebody who has one (CONNECT). STOP is what the
relay asks that somebody. Both are protobuf, of which these messages need numbers and byte strings alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from p2ptrain.net.address import split_varint, varint

HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
STOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/stop"
MAX_MESSAGE_BYTES = 4096
"""The specification's bound."""

RESERVE, CONNECT, STATUS = 0, 1, 2  # HopMessage.type
_STOP_CONNECT, _STOP_STATUS = 0, 1  # StopMessage.type


class CircuitStatus(IntEnum):
    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


@dataclass(frozen=True, slots=True)
class CircuitRequest:
    """What a relay is asked."""

    kind: int
    target: bytes = b""
    """CONNECT: the multihash of the peer to be led to."""


def reserve() -> bytes:
    return _number(1, RESERVE)


def answer(status: CircuitStatus, expires_at: int = 0) -> bytes:
    """A relay's answer. ``expires_at``: of a place, in seconds since 1970; 0: no place is meant.

    It names no limit: p2pd would lend a limited connection to nothing but its own small services.
    """
    place = _bytes(3, _number(1, expires_at)) if expires_at else b""
    return _number(1, STATUS) + place + _number(5, status)


def lead(peer: bytes) -> bytes:
    """STOP: somebody, named by their multihash, wants to talk to you."""
    return _number(1, _STOP_CONNECT) + _bytes(2, _bytes(1, peer))


def question(message: bytes) -> CircuitRequest:
    """ValueError where it is none."""
    found = _fields(message)
    kind, peer = found.get(1), found.get(2, b"")
    if not isinstance(kind, int) or not isinstance(peer, bytes):
        raise ValueError("not a question to a relay")
    target = _fields(peer).get(1, b"")
    return CircuitRequest(kind, target if isinstance(target, bytes) else b"")


def status(message: bytes) -> int:
    """The status in a relay's answer. ValueError where it is none."""
    found = _fields(message)
    code = found.get(5)
    if found.get(1) != STATUS or not isinstance(code, int):
        raise ValueError("not a relay's answer")
    return code


def is_limited(message: bytes) -> bool:
    """Whether a relay's answer limits its circuits. ValueError where it is none."""
    return bool(_fields(message).get(4))


def stop_status(message: bytes) -> int:
    """The status in the answer of whoever is to be talked to. ValueError where it is none."""
    found = _fields(message)
    code = found.get(4)
    if found.get(1) != _STOP_STATUS or not isinstance(code, int):
        raise ValueError("not an answer to a relay")
    return code


def framed(message: bytes) -> bytes:
    return varint(len(message)) + message


def _number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(value)) + value


def _fields(message: bytes) -> dict[int, int | bytes]:
    """The last value of each field. ValueError for what these messages never hold."""
    found: dict[int, int | bytes] = {}
    rest = message
    while rest:
        key, rest = split_varint(rest)
        number, rest = split_varint(rest)
        if key & 7 == 0:
            found[key >> 3] = number
        elif key & 7 == 2 and number <= len(rest):
            found[key >> 3], rest = rest[:number], rest[number:]
        else:
            raise ValueError("a message is cut off, or of another kind")
    return found
