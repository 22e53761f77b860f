"""Message encoding of libp2p's circuit relay v2 (specification: relay/circuit-v2). Pure.

A HOP message asks a relay for a reservation (RESERVE), or for a circuit to a peer that has one (CONNECT). A STOP
message announces the circuit to that peer. Both are protobuf and need only its integers and byte strings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from p2ptrain.net.address import split_varint, varint

HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
STOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/stop"
MAX_MESSAGE_BYTES = 4096
"""Limit of the specification."""

RESERVE, CONNECT, STATUS = 0, 1, 2  # HopMessage.type
_STOP_CONNECT, _STOP_STATUS = 0, 1  # StopMessage.type


class CircuitStatus(IntEnum):
    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    UNEXPECTED_MESSAGE = 401


@dataclass(frozen=True, slots=True)
class CircuitRequest:
    kind: int
    target: bytes = b""  # multihash of the peer to connect to; only for CONNECT


def reserve() -> bytes:
    """Encode a request for a reservation."""
    return _number(1, RESERVE)


def answer(status: CircuitStatus, expires_at: int = 0) -> bytes:
    """Encode a relay's response, without limits: p2pd uses a limited connection only for its own small services.

    ``expires_at`` is the end of the reservation in seconds since 1970; 0 if the response grants none.
    """
    place = field(3, _number(1, expires_at)) if expires_at else b""
    return _number(1, STATUS) + place + _number(5, status)


def lead(peer: bytes) -> bytes:
    """Encode the STOP message that announces a circuit from the peer with this multihash."""
    return _number(1, _STOP_CONNECT) + field(2, field(1, peer))


def question(message: bytes) -> CircuitRequest:
    """Decode a request to a relay. Raises ValueError if it is invalid."""
    found = fields(message)
    kind, peer = found.get(1), found.get(2, b"")
    if not isinstance(kind, int) or not isinstance(peer, bytes):
        raise ValueError("not a request to a relay")
    target = fields(peer).get(1, b"")
    return CircuitRequest(kind, target if isinstance(target, bytes) else b"")


def status(message: bytes) -> int:
    """Return the status of a relay's response. Raises ValueError if it is invalid."""
    return _code(message, STATUS, 5)


def is_limited(message: bytes) -> bool:
    """Return whether a relay's response limits its circuits. Raises ValueError if it is invalid."""
    return bool(fields(message).get(4))


def stop_status(message: bytes) -> int:
    """Return the status of a target's response to STOP. Raises ValueError if it is invalid."""
    return _code(message, _STOP_STATUS, 4)


def framed(message: bytes) -> bytes:
    return varint(len(message)) + message


def _code(message: bytes, kind: int, field: int) -> int:
    found = fields(message)
    code = found.get(field)
    if found.get(1) != kind or not isinstance(code, int):
        raise ValueError("not a response about a circuit")
    return code


def _number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def field(number: int, value: bytes) -> bytes:
    """Encode a protobuf field of bytes."""
    return varint(number << 3 | 2) + varint(len(value)) + value


def fields(message: bytes) -> dict[int, int | bytes]:
    """Return the last value of each field. Raises ValueError for field types that these messages never have."""
    return dict(pairs(message))


def pairs(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field, repeated ones too. Raises ValueError as ``fields`` does."""
    rest = message
    while rest:
        key, rest = split_varint(rest)
        number, rest = split_varint(rest)
        if key & 7 == 0:
            yield key >> 3, number
        elif key & 7 == 2 and number <= len(rest):
            yield key >> 3, rest[:number]
            rest = rest[number:]
        else:
            raise ValueError("a message is truncated or has an unknown field type")
