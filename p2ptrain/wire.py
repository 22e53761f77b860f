"""Wire format of messages and presence records, and every check on received ones. Pure; no socket, no clock.

A message is the msgpack array ``[tag, [field, field, …]]``, with the fields in the order of their dataclass in
``p2ptrain.swarm.messages``; a nested record is also an array of its fields. There are no maps or extension types, and
no optional fields but a presence record's last one, which keepers' records must have and others must not. The decoder
accepts exactly that: a wrong count, type, range, order or length anywhere, or one byte too many, raises
``RemoteError``. Decoded messages are well-formed but unverified: ``net.identity`` checks signatures, the protocol core
plausibility.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple

import msgpack

from p2ptrain.base.errors import RemoteError
from p2ptrain.framing import MAX_IDENTIFIER_CHARS, MAX_MESSAGE_BYTES
from p2ptrain.statements import SIGNATURE_BYTES, packed
from p2ptrain.swarm.keeping import MAX_RANGES
from p2ptrain.swarm.messages import (
    Accept,
    Acknowledge,
    Decline,
    DeclineReason,
    Message,
    Offer,
    PeerState,
    Presence,
    Terms,
    WeightsReply,
    WeightsRequest,
)
from p2ptrain.swarm.peer_count import MAX_PEERS

# --- Limits. Guess: measure the largest messages of real runs.

MAX_PRESENCE_BYTES = 1000
"""Maximum size of a presence record: a DHT value stays under 1 KB."""
MAX_KNOWN = 16
MAX_ADDRESSES = 8
MAX_ADDRESS_CHARS = 256
MAX_NICKNAME_CHARS = 32
MAX_FRAGMENTS = 4096
MAX_FRAGMENT_INDEX = 2**16 - 1
MAX_PARTNERS = 1024
MAX_COUNT = 2**53
"""Largest integer up to which a float is exact."""
MAX_WEIGHT = 1e6
MAX_LIFETIME_S = 3600.0

# --- Shapes: how one field is packed, and the only way it may come back -----------------------------------------


class _Shape(NamedTuple):
    pack: Callable[[Any], object]
    parse: Callable[[object], Any]


def _plain(kind: Callable[[Any], object], accepts: Callable[[Any], object], what: str) -> _Shape:
    """Return the shape of a value of one built-in type that ``accepts`` holds for."""

    def parse(raw: object) -> object:
        if type(raw) is not kind or not accepts(raw):
            raise RemoteError(f"expected {what}, got {raw!r:.80}")
        return raw

    return _Shape(kind, parse)


def _integer(largest: int) -> _Shape:
    return _plain(int, lambda x: 0 <= x <= largest, f"an integer in 0..{largest}")


def _blob(largest: int) -> _Shape:
    return _plain(bytes, lambda x: len(x) <= largest, f"at most {largest} bytes")


def is_nickname(text: str) -> bool:
    return len(text) <= MAX_NICKNAME_CHARS and text.isprintable()


def _word(choices: type[StrEnum]) -> _Shape:
    def parse(raw: object) -> StrEnum:
        try:
            return choices(str(raw))
        except ValueError:
            raise RemoteError(f"expected a {choices.__name__}, got {raw!r:.40}") from None

    return _Shape(str, parse)


def _several(item: _Shape, most: int) -> _Shape:
    def pack(values: tuple[Any, ...]) -> list[object]:
        return [item.pack(value) for value in values]

    def parse(raw: object) -> tuple[Any, ...]:
        if type(raw) is not list or len(raw) > most:
            raise RemoteError(f"expected at most {most} entries, got {raw!r:.40}")
        return tuple(item.parse(entry) for entry in raw)

    return _Shape(pack, parse)


def _ascending(items: _Shape) -> _Shape:
    def parse(raw: object) -> tuple[int, ...]:
        values: tuple[int, ...] = items.parse(raw)
        if not values or any(later <= earlier for earlier, later in pairwise(values)):
            raise RemoteError(f"expected strictly ascending fragments, got {values!r:.40}")
        return values

    return _Shape(items.pack, parse)


def _record(kind: type[Any], **shapes: _Shape) -> _Shape:
    """Return the shape of a dataclass: an array of its fields, in order, all of which must be named."""
    names = tuple(field.name for field in dataclasses.fields(kind))
    if names != tuple(shapes):
        raise TypeError(f"the wire format of {kind.__name__} names {tuple(shapes)}, the dataclass has {names}")

    def pack(record: object) -> list[object]:
        return [shape.pack(getattr(record, name)) for name, shape in shapes.items()]

    def parse(raw: object) -> Any:
        if type(raw) is not list or len(raw) != len(shapes):
            raise RemoteError(f"expected the {len(shapes)} fields of {kind.__name__}, got {raw!r:.40}")
        return kind(*(shape.parse(entry) for shape, entry in zip(shapes.values(), raw, strict=True)))

    return _Shape(pack, parse)


# --- The records and messages -----------------------------------------------------------------------------------

_COUNT = _integer(MAX_COUNT)
_FLAG = _plain(bool, lambda _: True, "true or false")
_AMOUNT = _plain(float, lambda x: math.isfinite(x) and x >= 0, "a finite number >= 0")
_IDENTIFIER = _plain(str, re.compile(rf"[0-9A-Za-z_.-]{{1,{MAX_IDENTIFIER_CHARS}}}").fullmatch, "an identifier")
# Printable ASCII without comma: p2pd takes its addresses as a list with commas.
_ADDRESS = _plain(str, re.compile(rf"[!-+\--~]{{1,{MAX_ADDRESS_CHARS}}}").fullmatch, "an address")
_STATE = _word(PeerState)

_RANGE = _several(_integer(MAX_FRAGMENT_INDEX), 2)


def _parse_ranges(raw: object) -> tuple[tuple[int, int], ...]:
    if type(raw) is not list or not 1 <= len(raw) <= MAX_RANGES:
        raise RemoteError(f"expected 1 to {MAX_RANGES} ranges of fragments, got {raw!r:.40}")
    ranges = tuple(_RANGE.parse(entry) for entry in raw)
    ends = [end for each in ranges for end in each]
    is_apart = all(later[0] > earlier[1] + 1 for earlier, later in pairwise(ranges) if len(earlier) == len(later) == 2)
    if any(len(each) != 2 for each in ranges) or ends != sorted(ends) or not is_apart:
        raise RemoteError(f"expected ascending ranges of fragments with gaps, got {ranges!r:.60}")
    return ranges


_RANGES = _Shape(lambda ranges: [list(each) for each in ranges], _parse_ranges)


def _presence(shape: _Shape) -> _Shape:
    """Return the shape of a presence record, whose last field only keepers have."""

    def pack(presence: Any) -> object:
        fields = list(shape.pack(presence))  # type: ignore[call-overload]
        return fields if presence.keeps else fields[:-1]

    def parse(raw: object) -> Any:
        if type(raw) is list and len(raw) == PRESENCE_FIELDS:
            presence: Presence = shape.parse([*raw, None])
            if presence.state is PeerState.KEEPING:
                raise RemoteError("expected the fragments of a keeper")
            return presence
        presence = shape.parse(raw)
        if presence.state is not PeerState.KEEPING or not presence.keeps:
            raise RemoteError("expected fragments in a keeper's record only")
        return presence

    return _Shape(pack, parse)


PRESENCE_FIELDS = len(dataclasses.fields(Presence)) - 1
"""Fields of a presence record, except a keeper's."""

_WHOLE_PRESENCE = _record(
    Presence,
    peer=_IDENTIFIER,
    run=_IDENTIFIER,
    addresses=_several(_ADDRESS, MAX_ADDRESSES),
    state=_STATE,
    step=_COUNT,
    progress=_AMOUNT,
    settled=_FLAG,
    nickname=_plain(str, is_nickname, "a nickname"),
    issued_at=_AMOUNT,
    lifetime_s=_plain(float, lambda x: 0 < x <= MAX_LIFETIME_S, f"a lifetime in (0, {MAX_LIFETIME_S}] s"),
    signature=_blob(SIGNATURE_BYTES),
    since=_AMOUNT,
    keeps=_Shape(_RANGES.pack, lambda raw: () if raw is None else _RANGES.parse(raw)),
)
_PRESENCE = _presence(_WHOLE_PRESENCE)
_KNOWN = _several(_PRESENCE, MAX_KNOWN)
_TERMS = _record(
    Terms,
    step=_COUNT,
    progress=_AMOUNT,
    weight=_plain(float, lambda x: 0 < x <= MAX_WEIGHT, f"a weight in (0, {MAX_WEIGHT}]"),
    clip_radius=_plain(float, lambda x: x >= 0, "a clip radius >= 0"),
    settled=_FLAG,
    state=_STATE,
    partners=_integer(MAX_PARTNERS),
    seconds_per_byte=_AMOUNT,
    max_decrease=_plain(float, lambda x: x >= 0, "a largest decrease >= 0"),
    max_increase=_plain(float, lambda x: x >= 0, "a largest increase >= 0"),
    counted_at=_AMOUNT,
    peers=_plain(float, lambda x: 1 <= x <= MAX_PEERS, f"a number of peers from 1 to {MAX_PEERS:,.0f}"),
)
_FRAGMENTS = _ascending(_several(_integer(MAX_FRAGMENT_INDEX), MAX_FRAGMENTS))
_PROTOCOL = _integer(2**16 - 1)

_MESSAGES: dict[int, tuple[type[Any], _Shape]] = {
    1: (
        Offer,
        _record(
            Offer,
            run=_IDENTIFIER,
            protocol=_PROTOCOL,
            fragments=_FRAGMENTS,
            terms=_TERMS,
            round=_COUNT,
            known=_KNOWN,
        ),
    ),
    2: (Accept, _record(Accept, fragments=_FRAGMENTS, terms=_TERMS, known=_KNOWN)),
    3: (
        Decline,
        _record(Decline, reason=_word(DeclineReason), state=_STATE, step=_COUNT, progress=_AMOUNT, known=_KNOWN),
    ),
    4: (Acknowledge, _record(Acknowledge)),
    5: (
        WeightsRequest,
        _record(WeightsRequest, run=_IDENTIFIER, protocol=_PROTOCOL, progress=_AMOUNT, seconds_per_byte=_AMOUNT),
    ),
    6: (
        WeightsReply,
        _record(
            WeightsReply,
            step=_COUNT,
            progress=_AMOUNT,
            seconds_per_byte=_AMOUNT,
            counted_at=_AMOUNT,
            known=_KNOWN,
        ),
    ),
}
_TAGS = {kind: tag for tag, (kind, _) in _MESSAGES.items()}


def encode_message(message: Message) -> bytes:
    """Return the body of a MESSAGE frame. Raises ValueError (a bug) if it is too long."""
    tag = _TAGS[type(message)]
    fields = _MESSAGES[tag][1].pack(message)
    return _packed([tag, fields], MAX_MESSAGE_BYTES)


def decode_message(body: bytes) -> Message:
    """Parse the result of ``encode_message``. Raises RemoteError for anything else."""
    raw = _unpacked(body, MAX_MESSAGE_BYTES)
    if type(raw) is not list or len(raw) != 2 or type(raw[0]) is not int or raw[0] not in _MESSAGES:
        raise RemoteError(f"expected a message, got {raw!r:.40}")
    message: Message = _MESSAGES[raw[0]][1].parse(raw[1])
    return message


def presence_bytes(presence: Presence) -> bytes:
    """Return the bytes that a presence's signature covers: all other fields, behind a unique prefix."""
    unsigned = dataclasses.replace(presence, signature=b"")
    return b"p2ptrain presence 1\0" + packed(_PRESENCE.pack(unsigned))


def encode_presence(presence: Presence) -> bytes:
    """Return a directory record. Raises ValueError (a bug: see ``trimmed``) if it is too long."""
    return _packed(_PRESENCE.pack(presence), MAX_PRESENCE_BYTES)


def decode_presence(body: bytes) -> Presence:
    """Parse the result of ``encode_presence``. Raises RemoteError for anything else."""
    presence: Presence = _PRESENCE.parse(_unpacked(body, MAX_PRESENCE_BYTES))
    return presence


def trimmed(presence: Presence) -> Presence:
    """Return the presence with a printable nickname and as many addresses, best first, as fit a directory record."""
    nickname = "".join(filter(str.isprintable, presence.nickname))[:MAX_NICKNAME_CHARS]
    presence = dataclasses.replace(presence, nickname=nickname, addresses=presence.addresses[:MAX_ADDRESSES])
    room = MAX_PRESENCE_BYTES - SIGNATURE_BYTES
    while presence.addresses and len(packed(_PRESENCE.pack(presence))) > room:
        presence = dataclasses.replace(presence, addresses=presence.addresses[:-1])
    return presence


# --- msgpack ----------------------------------------------------------------------------------------------------


def _packed(fields: object, most: int) -> bytes:
    body = packed(fields)
    if len(body) > most:
        raise ValueError(f"expected at most {most} bytes, got {len(body)}")
    return body


def _unpacked(body: bytes, most: int) -> object:
    if len(body) > most:
        raise RemoteError(f"expected at most {most} bytes, got {len(body)}")
    try:
        raw: object = msgpack.unpackb(
            body,
            raw=False,
            use_list=True,
            strict_map_key=True,
            max_str_len=MAX_ADDRESS_CHARS,
            max_bin_len=SIGNATURE_BYTES,
            max_array_len=MAX_FRAGMENTS,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, TypeError, OverflowError) as error:  # msgpack's own exceptions are ValueErrors
        raise RemoteError(f"not canonical msgpack: {error!s:.80}") from None
    return raw
