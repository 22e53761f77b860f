"""How many bytes things are on the wire, without building them.

Exact: a control message is its frame (``p2ptrain.framing``), a payload its parts with chunk headers and digests. Left
out is what lies below our frames: libp2p's multiplexer, Noise, TCP and IP, together a few per cent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from p2ptrain import wire
from p2ptrain.framing import DIGEST_BYTES, HEADER_BYTES, MAX_CHUNK_BYTES, PartEnd, encode_part_end
from p2ptrain.swarm.messages import Accept, Acknowledge, Decline, Message, Offer, Presence, WeightsReply

_PART_END_BYTES = HEADER_BYTES + len(encode_part_end(PartEnd(0, 0, bytes(DIGEST_BYTES))))

_measured: dict[tuple[object, ...], int] = {}
"""Bytes of a frame without its passed-on peers, by everything in the message that has a width."""


def message_bytes(message: Message) -> int:
    """A control message's frame. Measured once for each width that its fields can have."""
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
    """A presence record, in the directory or passed on."""
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
    """A payload whose parts have these sizes: chunks with their headers, and each part's end."""
    return sum(size + HEADER_BYTES * -(-size // MAX_CHUNK_BYTES) + _PART_END_BYTES for size in parts)


@lru_cache(maxsize=4096)
def _presence_bytes(
    peer: int, run: str, addresses: tuple[str, ...], state: str, step: int, nickname: str, signature: int
) -> int:
    texts = (_text_bytes(peer), *map(_text, (run, *addresses, state, nickname)))
    floats = 3 * 9  # progress, issued_at, lifetime_s
    arrays = 1 + 1  # the record, its addresses: both have fewer than 16 entries
    flag = 1  # settled
    return sum(texts) + step + floats + flag + arrays + 2 + signature


def _text(text: str) -> int:
    return _text_bytes(len(text.encode()))


def _text_bytes(length: int) -> int:
    """A msgpack string of so many bytes."""
    return length + (1 if length < 32 else 2 if length < 256 else 3)


def _width(number: int) -> int:
    """Bytes of a msgpack integer >= 0."""
    if number < 128:
        return 1
    bits = number.bit_length()
    return 2 if bits <= 8 else 3 if bits <= 16 else 5 if bits <= 32 else 9
