"""Framing: how a stream is cut into frames, and every check on a frame's header. Pure; no socket, no clock.

A stream is a sequence of frames. A frame is a fixed header and a body; all integers are big-endian::

    u8 magic (0xA0 + protocol version) | u8 kind | u32 length of the body | body

    kind  name              body                                                        largest
    1     MESSAGE           one swarm message, msgpack                                  64 KiB
    2     CHUNK             a slice of a payload part; all are full but a part's last   256 KiB
    3     PART              end of a part: u32 number, u64 length, 32 bytes BLAKE3       44 B
    4     MANIFEST_REQUEST  the RunId, ASCII                                            64 B
    5     MANIFEST          the signed manifest's bytes                                 64 KiB
    6     BADGE             what lets its sender take part (``p2ptrain.admission``)     640 B
    7     REFUSAL           why it is not let in, ASCII                                 64 B
    8     END               its sender says nothing more, and hears nothing more        0 B

A header of another version or kind, or with a body longer than its kind allows, raises ``RemoteError`` before the body
is read. What is in a message is the business of ``p2ptrain.wire``, what is in a payload that of ``net.payload``.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from p2ptrain.base.errors import RemoteError
from p2ptrain.base.ids import PROTOCOL_VERSION

# --- Caps: guesses with room to spare, except the chunk: 256 KiB is the knee of p2pd's goodput (our measurement).

MAX_MESSAGE_BYTES = 64 << 10
MAX_CHUNK_BYTES = 256 << 10
MAX_MANIFEST_BYTES = 64 << 10
MAX_BADGE_BYTES = 640
"""With four witnesses a badge has 545. It travels with each conversation and each presence record."""
MAX_IDENTIFIER_CHARS = 64
"""Of a RunId or a peer id, on the wire."""
DIGEST_BYTES = 32
"""Of BLAKE3."""

# --- Frames -----------------------------------------------------------------------------------------------------

MAGIC = 0xA0 + PROTOCOL_VERSION
"""A frame's first byte: a stream of another version, or of no peer, is noticed at once."""
_HEADER = struct.Struct(">BBI")
HEADER_BYTES = _HEADER.size
_PART_END = struct.Struct(f">IQ{DIGEST_BYTES}s")


class FrameKind(IntEnum):
    """What a frame's body is."""

    MESSAGE = 1
    CHUNK = 2
    PART = 3
    MANIFEST_REQUEST = 4
    MANIFEST = 5
    BADGE = 6
    REFUSAL = 7
    END = 8


MAX_BODY_BYTES: dict[int, int] = {
    FrameKind.MESSAGE: MAX_MESSAGE_BYTES,
    FrameKind.CHUNK: MAX_CHUNK_BYTES,
    FrameKind.PART: _PART_END.size,
    FrameKind.MANIFEST_REQUEST: MAX_IDENTIFIER_CHARS,
    FrameKind.MANIFEST: MAX_MANIFEST_BYTES,
    FrameKind.BADGE: MAX_BADGE_BYTES,
    FrameKind.REFUSAL: MAX_IDENTIFIER_CHARS,
    FrameKind.END: 0,
}
"""By kind; no other kind exists."""

OF_EVERY_VERSION = (FrameKind.MANIFEST_REQUEST, FrameKind.MANIFEST)
"""Taken whatever version their magic says: a run's manifest tells who joins by a link which p2ptrain it needs."""


def encode_header(kind: int, length: int) -> bytes:
    """The six bytes before a body of ``length`` bytes. ValueError (a bug of ours) when the kind does not allow it."""
    if not 0 <= length <= MAX_BODY_BYTES.get(kind, -1):
        raise ValueError(f"no frame of kind {kind} with {length} bytes exists")
    return _HEADER.pack(MAGIC, kind, length)


def decode_header(header: bytes) -> tuple[int, int]:
    """A header's kind and body length; RemoteError when it is none of ours."""
    if len(header) != HEADER_BYTES:
        raise RemoteError(f"a frame header of {len(header)} bytes instead of {HEADER_BYTES}")
    magic, kind, length = _HEADER.unpack(header)
    if magic != MAGIC and not (kind in OF_EVERY_VERSION and magic & 0xF0 == 0xA0):
        raise RemoteError(f"a frame begins with 0x{magic:02x} instead of 0x{MAGIC:02x}")
    if length > MAX_BODY_BYTES.get(kind, -1):
        raise RemoteError(f"a frame of kind {kind} with {length} bytes")
    return kind, length


class PartEnd(NamedTuple):
    """The body of a PART frame: what the chunks before it must add up to."""

    part: int
    length: int
    digest: bytes


def encode_part_end(end: PartEnd) -> bytes:
    return _PART_END.pack(*end)


def decode_part_end(body: bytes) -> PartEnd:
    if len(body) != _PART_END.size:
        raise RemoteError(f"a part ends with {len(body)} bytes instead of {_PART_END.size}")
    return PartEnd(*_PART_END.unpack(body))
