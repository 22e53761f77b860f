"""Sizes on the wire, without building the messages, and the sums of what a peer sent and received.

Exact: a control message is its frame (``p2ptrain.framing``); a payload is its parts with chunk headers and digests.
Layers below our frames are left out: libp2p's multiplexer, Noise, TCP and IP, together a few per cent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from p2ptrain import wire
from p2ptrain.framing import DIGEST_BYTES, HEADER_BYTES, MAX_CHUNK_BYTES, PartEnd, encode_part_end
from p2ptrain.swarm.messages import Accept, Acknowledge, Decline, Message, Offer, Presence, WeightsReply

_PART_END_BYTES = HEADER_BYTES + len(encode_part_end(PartEnd(0, 0, bytes(DIGEST_BYTES))))

_measured: dict[tuple[object, ...], int] = {}
"""Bytes of a frame without its presence records, by all fields of the message that have a width."""


def message_bytes(message: Message) -> int:
    """Return the bytes of a control message's frame, measured once for each width of its fields."""
    known: tuple[Presence, ...] = ()
    shape: tuple[object, ...]
    match message:
        case Offer():
            known, terms = message.known, message.terms
            widths = _width(terms.step), _width(message.round), _width(terms.partners)
            shape = (Offer, message.run, message.protocol, message.fragments, terms.state, *widths)
        case Accept():
            known, terms = message.known, message.terms
            shape = (Accept, message.fragments, terms.state, _width(terms.step), _width(terms.partners))
        case Acknowledge():
            shape = (Acknowledge,)
        case Decline():
            known = message.known
            shape = (Decline, message.reason, message.state, _width(message.step))
        case WeightsReply():
            known = message.known
            shape = (WeightsReply, _width(message.step))
        case _:
            shape = (type(message), message.run, message.protocol)
    size = _measured.get(shape)
    if size is None:
        if isinstance(message, Offer | Accept | Decline | WeightsReply):
            message = replace(message, known=())
        size = _measured[shape] = HEADER_BYTES + len(wire.encode_message(message))
    for presence in known:
        size += presence_bytes(presence)
    return size


def presence_bytes(presence: Presence) -> int:
    """Return the bytes of a presence record, in the directory or passed on."""
    return _presence_bytes(
        len(presence.peer),
        presence.run,
        presence.addresses,
        presence.state,
        _width(presence.step),
        presence.nickname,
        len(presence.signature),
    )


def payload_bytes(parts: Sequence[int]) -> int:
    """Return the bytes of a payload whose parts have these sizes: chunks with headers, and each part's end."""
    return sum(size + HEADER_BYTES * -(-size // MAX_CHUNK_BYTES) + _PART_END_BYTES for size in parts)


@lru_cache(maxsize=4096)
def _presence_bytes(
    peer: int, run: str, addresses: tuple[str, ...], state: str, step: int, nickname: str, signature: int
) -> int:
    texts = (_text_bytes(peer), *map(_text, (run, *addresses, state, nickname)))
    floats = 3 * 9  # progress, issued_at, lifetime_s
    arrays = 1 + 1  # the record and its addresses: both have fewer than 16 entries
    flag = 1  # settled
    return sum(texts) + step + floats + flag + arrays + 2 + signature


def _text(text: str) -> int:
    return _text_bytes(len(text.encode()))


def _text_bytes(length: int) -> int:
    """Return the bytes of a msgpack string of ``length`` bytes."""
    return length + (1 if length < 32 else 2 if length < 256 else 3)


def _width(number: int) -> int:
    """Return the bytes of a msgpack integer >= 0."""
    if number < 128:
        return 1
    bits = number.bit_length()
    return 2 if bits <= 8 else 3 if bits <= 16 else 5 if bits <= 32 else 9


@dataclass(slots=True)
class SimulatedTraffic:
    """Bytes of one peer by kind (``report.Bytes``); broken transfers count as far as they came."""

    payload_up: float = 0.0
    payload_down: float = 0.0
    weights_up: float = 0.0
    weights_down: float = 0.0
    control_up: float = 0.0
    control_down: float = 0.0
    directory_up: float = 0.0
    directory_down: float = 0.0
