"""Bulk data over a link: parts of known length, in chunks, each part closed by its length and BLAKE3 digest.

A stream that ends cleanly proves nothing (the streams of a killed process do), so a part counts only once its PART
frame is here and agrees. Both sides know every part's length beforehand, and with it every chunk's: the receiver
allocates what it expects, once, and turns down the first frame that differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from blake3 import blake3

from p2ptrain import framing
from p2ptrain.errors import NetworkError, RemoteError
from p2ptrain.framing import FrameKind, PartEnd
from p2ptrain.ids import short
from p2ptrain.ports import Link


@dataclass(frozen=True, slots=True)
class Pace:
    """How slow a payload as a whole may be. Each of its frames has a deadline of its own, and a sender that just keeps
    every one of them would hold us for as long as it has frames to send; how long its exchange may take it helps to
    say itself (``swarm.deadlines``). Against this clock a byte buys the time of a byte, and a frame buys none."""

    grace_s: float = 20.0
    """Until something must have come: what a frame may take to begin (``links.Limits.idle_s``)."""
    slowest_rate: float = 4096.0
    """Bytes per second after that, on the average since the beginning (``links.Limits.slowest_rate``). Owners' caps
    leave each stream 5 kB/s (``rates.LOWEST_RATE``)."""

    def due_s(self, received_bytes: int) -> float:
        """Seconds after its beginning at which so many bytes must have come."""
        return self.grace_s + received_bytes / self.slowest_rate


async def send_payload(link: Link, parts: Sequence[bytes | bytearray | memoryview]) -> None:
    """Send all parts, in order. The buffers must not change before this returns. Raises NetworkError."""
    for index, part in enumerate(parts):
        view = memoryview(part).cast("B")
        digest = blake3()
        for start in range(0, len(view), framing.MAX_CHUNK_BYTES):
            chunk = view[start : start + framing.MAX_CHUNK_BYTES]
            digest.update(chunk)
            await link.send(FrameKind.CHUNK, chunk)
        await link.send(FrameKind.PART, framing.encode_part_end(PartEnd(index, len(view), digest.digest())))


async def receive_payload(
    link: Link,
    lengths: Sequence[int],
    buffers: Buffers | None = None,
    pace: Pace | None = None,
) -> list[bytearray]:
    """Receive parts of exactly these lengths. NetworkError when the stream ends early, RemoteError when it differs.

    Args:
        buffers: where to take the parts' memory from; None: allocate it. Give it back when nobody reads them any more.
        pace: how slow the whole may be. NetworkError when it is slower.
    """
    buffers, pace = buffers or Buffers(), pace or Pace()
    begun = asyncio.get_running_loop().time()
    received, parts = 0, list[bytearray]()
    try:
        async with asyncio.timeout(None) as deadline:
            for index, length in enumerate(lengths):
                meter = _Meter(pace, begun, received, deadline)
                parts.append(await _receive_part(link, index, buffers.take(length), meter))
                received += length
    except TimeoutError:
        raise NetworkError(f"{short(link.peer)} sends slower than {pace.slowest_rate / 1000:.0f} kB/s") from None
    return parts


@dataclass(frozen=True, slots=True)
class _Meter:
    """Sets the deadline for the next bytes of a part."""

    pace: Pace
    begun: float
    before: int
    """Bytes of the parts before it."""
    deadline: asyncio.Timeout

    def expect(self, upto: int) -> None:
        """So many bytes of this part are to come next."""
        self.deadline.reschedule(self.begun + self.pace.due_s(self.before + upto))


class Buffers:
    """Memory of payloads that were received, kept for the next: touching fresh memory costs more than the digests do
    (our measurement: 49 ms for 64 MiB against 10 ms of BLAKE3)."""

    def __init__(self, most_bytes: int = 256 << 20) -> None:
        self._most_bytes = most_bytes
        self._kept: list[bytearray] = []

    def take(self, length: int) -> bytearray:
        """A buffer of that length, holding anything."""
        for position, buffer in enumerate(self._kept):
            if len(buffer) == length:
                return self._kept.pop(position)
        return bytearray(length)

    def give_back(self, parts: Iterable[bytearray]) -> None:
        """Nobody reads these any more. The oldest are dropped beyond ``most_bytes``."""
        self._kept.extend(parts)
        size = sum(map(len, self._kept))
        while size > self._most_bytes:
            size -= len(self._kept.pop(0))


@runtime_checkable
class DirectLink(Link, Protocol):
    """A link that can receive a frame's body without a copy."""

    async def receive_into(self, buffer: memoryview) -> tuple[int, int]:
        """The next frame's kind and length, its body in the front of the buffer. RemoteError when it does not fit."""


async def _receive_part(link: Link, index: int, part: bytearray, meter: _Meter) -> bytearray:
    receive_into = link.receive_into if isinstance(link, DirectLink) else partial(_receive_copy, link)
    digest = blake3()
    with memoryview(part) as view:
        for start in range(0, len(part), framing.MAX_CHUNK_BYTES):
            chunk = view[start : start + framing.MAX_CHUNK_BYTES]
            meter.expect(start + len(chunk))
            kind, length = await receive_into(chunk)
            if kind != FrameKind.CHUNK or length != len(chunk):
                due = f"a chunk of {len(chunk)} bytes was due"
                raise RemoteError(f"part {index}: {due}, not kind {kind} with {length} bytes")
            digest.update(chunk)
    kind, body = await link.receive()
    if kind != FrameKind.PART:
        raise RemoteError(f"part {index}: its end was due after {len(part)} bytes, not a frame of kind {kind}")
    if framing.decode_part_end(body) != PartEnd(index, len(part), digest.digest()):
        raise RemoteError(f"part {index}: its end does not agree with the {len(part)} bytes before it")
    return part


async def _receive_copy(link: Link, buffer: memoryview) -> tuple[int, int]:
    """``DirectLink.receive_into`` for a link that has none."""
    kind, body = await link.receive()
    if len(body) > len(buffer):
        raise RemoteError(f"a frame of {len(body)} bytes where {len(buffer)} were due")
    buffer[: len(body)] = body
    return kind, len(body)
