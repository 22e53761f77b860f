"""Bulk data over a link: parts of known length, in chunks, each part closed by its length and BLAKE3 digest.

A stream that ends cleanly proves nothing (the streams of a killed process do), so a part counts only once its PART
frame is here and agrees. Both sides know every part's length beforehand, and with it every chunk's: the receiver
allocates what it expects, once, and turns down the first frame that differs.
"""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

from p2ptrain import wire
from p2ptrain.errors import RemoteError
from p2ptrain.ports import Link
from p2ptrain.wire import FrameKind, PartEnd


async def send_payload(link: Link, parts: Sequence[bytes | bytearray | memoryview]) -> None:
    """Send all parts, in order. The buffers must not change before this returns. Raises NetworkError."""
    for index, part in enumerate(parts):
        view = memoryview(part).cast("B")
        digest = blake3()
        for start in range(0, len(view), wire.MAX_CHUNK_BYTES):
            chunk = view[start : start + wire.MAX_CHUNK_BYTES]
            digest.update(chunk)
            await link.send(FrameKind.CHUNK, chunk)
        await link.send(FrameKind.PART, wire.encode_part_end(PartEnd(index, len(view), digest.digest())))


async def receive_payload(link: Link, lengths: Sequence[int]) -> list[bytearray]:
    """Receive parts of exactly these lengths. NetworkError when the stream ends early, RemoteError when it differs."""
    return [await _receive_part(link, index, length) for index, length in enumerate(lengths)]


async def _receive_part(link: Link, index: int, length: int) -> bytearray:
    part = bytearray(length)
    digest = blake3()
    for start in range(0, length, wire.MAX_CHUNK_BYTES):
        due = min(wire.MAX_CHUNK_BYTES, length - start)
        kind, body = await link.receive()
        if kind != FrameKind.CHUNK or len(body) != due:
            raise RemoteError(f"part {index}: a chunk of {due} bytes was due, not kind {kind} with {len(body)} bytes")
        digest.update(body)
        part[start : start + due] = body
    kind, body = await link.receive()
    if kind != FrameKind.PART:
        raise RemoteError(f"part {index}: its end was due after {length} bytes, not a frame of kind {kind}")
    if wire.decode_part_end(body) != PartEnd(index, length, digest.digest()):
        raise RemoteError(f"part {index}: its end does not agree with the {length} bytes before it")
    return part
