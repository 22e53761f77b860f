"""Framing of a stream, and every check on a frame's header. Pure; no socket, no clock.

A stream is a sequence of frames. A frame is a fixed header and a body; all integers are big-endian::

    u8 magic (0xA0 + protocol version) | u8 kind | u32 length of the body | body

    kind  name              body                                                        largest
    1     MESSAGE           one swarm message, msgpack                                  64 KiB
    2     CHUNK             a slice of a payload part; full, except a part's last       256 KiB
    3     PART              end of a part: u32 number, u64 length, 32 bytes BLAKE3      44 B
    4     MANIFEST_REQUEST  the RunId, ASCII                                            64 B
    5     MANIFEST          the signed manifest's bytes                                 64 KiB
    6     BADGE             the sender's certificate (``p2ptrain.admission``)           640 B
    7     REFUSAL           reason why the peer is not admitted, ASCII                  64 B
    8     END               the sender is finished with the conversation                0 B

A header of another version or kind, or with a body longer than its kind allows, raises ``RemoteError`` before the body
is read. ``p2ptrain.wire`` defines the content of messages, ``net.payload`` that of payloads.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from p2ptrain.base.errors import RemoteError
from p2ptrain.base.ids import PROTOCOL_VERSION

# --- Limits. 256 KiB is the measured knee of p2pd's goodput. Guess: measure the other frame sizes in real runs.

MAX_MESSAGE_BYTES = 64 << 10
MAX_CHUNK_BYTES = 256 << 10
MAX_MANIFEST_BYTES = 64 << 10
"""Largest manifest; a generated one has about 8 kB of TOML and 2 kB of JSON."""
MAX_CERTIFICATE_BYTES = 640
"""Maximum size of a membership certificate; usual ones have 355 bytes. Each conversation and each
presence record carries one."""
MAX_IDENTIFIER_CHARS = 64
"""Maximum length of a RunId or a peer id on the wire."""
DIGEST_BYTES = 32

# --- Frames -----------------------------------------------------------------------------------------------------

MAGIC = 0xA0 + PROTOCOL_VERSION
"""First byte of a frame: identifies the protocol version and rejects foreign streams."""
_HEADER = struct.Struct(">BBI")
HEADER_BYTES = _HEADER.size
_PART_END = struct.Struct(f">IQ{DIGEST_BYTES}s")


class FrameKind(IntEnum):
    """Type of a frame's body."""

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
    FrameKind.BADGE: MAX_CERTIFICATE_BYTES,
    FrameKind.REFUSAL: MAX_IDENTIFIER_CHARS,
    FrameKind.END: 0,
}
"""Largest body of each kind; no other kinds exist."""

OF_EVERY_VERSION = (FrameKind.MANIFEST_REQUEST, FrameKind.MANIFEST)
"""Kinds accepted from every protocol version: a newcomer's manifest tells it which p2ptrain the run needs."""


def encode_header(kind: int, length: int) -> bytes:
    """Return the six bytes before a body of ``length`` bytes. Raises ValueError (a bug) if the frame is invalid."""
    if not 0 <= length <= MAX_BODY_BYTES.get(kind, -1):
        raise ValueError(f"no frame of kind {kind} with {length} bytes exists")
    return _HEADER.pack(MAGIC, kind, length)


def decode_header(header: bytes) -> tuple[int, int]:
    """Return a header's kind and body length. Raises RemoteError if it is invalid."""
    if len(header) != HEADER_BYTES:
        raise RemoteError(f"expected a frame header of {HEADER_BYTES} bytes, got {len(header)}")
    magic, kind, length = _HEADER.unpack(header)
    if magic != MAGIC and not (kind in OF_EVERY_VERSION and magic & 0xF0 == 0xA0):
        raise RemoteError(f"expected a frame that begins with 0x{MAGIC:02x}, got 0x{magic:02x}")
    if length > MAX_BODY_BYTES.get(kind, -1):
        raise RemoteError(f"expected a frame of a known kind and length, got kind {kind} with {length} bytes")
    return kind, length


class PartEnd(NamedTuple):
    """Body of a PART frame: total length and digest of the preceding chunks."""

    part: int
    length: int
    digest: bytes


def encode_part_end(end: PartEnd) -> bytes:
    return _PART_END.pack(*end)


def decode_part_end(body: bytes) -> PartEnd:
    if len(body) != _PART_END.size:
        raise RemoteError(f"expected a part end of {_PART_END.size} bytes, got {len(body)}")
    return PartEnd(*_PART_END.unpack(body))
