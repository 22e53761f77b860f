"""Bulk data over a link: parts of known length, in chunks, each part closed by its length and BLAKE3 digest.

A stream that ends cleanly proves nothing (the streams of a killed process do), so a part counts only once its PART
frame is here and agrees. Both sides know every part's length beforehand, and with it every chunk's: the receiver
allocates what it expects, once, and turns down the first frame that differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from blake3 import blake3

from p2ptrain import framing
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import short
from p2ptrain.framing import FrameKind, PartEnd
from p2ptrain.net.concurrently import concurrently
from p2ptrain.ports import Link


@dataclass(frozen=True, slots=True)
class PayloadDeadline:
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
    lanes = lanes_of(link)
    views = [memoryview(part).cast("B") for part in parts]
    layout = _Layout([len(view) for view in views], len(lanes))
    if len(lanes) == 1:
        await _send_share(lanes[0], views, layout, 0)
    else:
        await concurrently(*(_send_share(lane, views, layout, number) for number, lane in enumerate(lanes)))


async def receive_payload(
    link: Link,
    lengths: Sequence[int],
    buffers: Buffers | None = None,
    pace: PayloadDeadline | None = None,
) -> list[bytearray]:
    """Receive parts of exactly these lengths. NetworkError when the stream ends early, RemoteError when it differs.

    Args:
        buffers: where to take the parts' memory from; None: allocate it. Give it back when nobody reads them any more.
        pace: how slow the whole may be. NetworkError when it is slower.
    """
    buffers, pace = buffers or Buffers(), pace or PayloadDeadline()
    lanes, loop = lanes_of(link), asyncio.get_running_loop()
    layout, began = _Layout(lengths, len(lanes)), loop.time()
    try:
        async with asyncio.timeout(None) as deadline:
            arrivals = _Arrivals([buffers.take(length) for length in lengths], pace, deadline)
            if len(lanes) == 1:
                await _receive_share(lanes[0], layout, 0, arrivals)
            else:
                shares = [_receive_share(lane, layout, number, arrivals) for number, lane in enumerate(lanes)]
                await concurrently(*shares)
    except TimeoutError:
        raise NetworkError(f"{short(link.peer)} sends slower than {pace.slowest_rate / 1000:.0f} kB/s") from None
    if isinstance(link, StreamGroup):
        link.came(sum(lengths), loop.time() - began)
    return arrivals.parts


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
class HeraldLink(Link, Protocol):
    """A link that tells when a frame begins."""

    async def begun(self) -> None:
        """Until the next frame begins, which is then received as ever. Raises NetworkError and RemoteError."""


@runtime_checkable
class DirectLink(HeraldLink, Protocol):
    """A link that can receive a frame's body without a copy."""

    async def receive_into(self, buffer: memoryview) -> tuple[int, int]:
        """The next frame's kind and length, its body in the front of the buffer. RemoteError when it does not fit."""


@runtime_checkable
class WideLink(DirectLink, Protocol):
    """A link that can have more streams for a large payload (``net.parallel_streams``)."""

    async def widened(self, size_bytes: int) -> Link:
        """Return the link that carries a payload of that size each way, possibly a ``StreamGroup``. Both sides ask at
        the same point of the conversation, and use it for that payload alone. Raises NetworkError and RemoteError."""


@runtime_checkable
class StreamGroup(Link, Protocol):
    """Several streams for one payload each way."""

    @property
    def lanes(self) -> Sequence[Link]:
        """At least one, in the same order on both sides."""

    def came(self, size_bytes: int, seconds: float) -> None:
        """The payload came."""


async def begun(link: Link) -> None:
    """``HeraldLink.begun``; at once where the link cannot tell."""
    if isinstance(link, HeraldLink):
        await link.begun()


def lanes_of(link: Link) -> Sequence[Link]:
    """``StreamGroup.lanes``; the link itself where it is none."""
    return link.lanes if isinstance(link, StreamGroup) else (link,)


async def widened(link: Link, size_bytes: int) -> Link:
    """``WideLink.widened``; the link itself where it has none."""
    return await link.widened(size_bytes) if isinstance(link, WideLink) else link


class _Layout:
    """Which chunk of a payload travels on which of its lanes: in turn, from the first chunk of the first part on.

    Args:
        lengths: bytes of each part.
        lanes: how many there are.
    """

    def __init__(self, lengths: Sequence[int], lanes: int) -> None:
        self.lengths = lengths
        self._lanes = lanes

    def shares(self, lane: int) -> Iterator[list[slice]]:
        """Of each part, the chunks that a lane carries, in order."""
        before = 0
        for length in self.lengths:
            first = (lane - before) % self._lanes * framing.MAX_CHUNK_BYTES
            starts = range(first, length, self._lanes * framing.MAX_CHUNK_BYTES)
            yield [slice(start, min(start + framing.MAX_CHUNK_BYTES, length)) for start in starts]
            before += -(-length // framing.MAX_CHUNK_BYTES)


async def _send_share(lane: Link, parts: Sequence[memoryview], layout: _Layout, number: int) -> None:
    """The chunks of one lane; on the first also the end of each part, after what it carries of it."""
    for index, chunks in enumerate(layout.shares(number)):
        part, hashed, digest = parts[index], 0, blake3()
        for chunk in chunks:
            if number == 0:  # all that lies before is hashed here, a little at a time: the loop has other things to do
                digest.update(part[hashed : chunk.stop])
                hashed = chunk.stop
            await lane.send(FrameKind.CHUNK, part[chunk])
        if number == 0:
            digest.update(part[hashed:])
            await lane.send(FrameKind.PART, framing.encode_part_end(PartEnd(index, len(part), digest.digest())))


class _Arrivals:
    """What has come of a payload, by whichever lanes.

    A part is hashed in order as far as it has come without a gap, and compared with its end once both are here.
    """

    def __init__(self, parts: list[bytearray], pace: PayloadDeadline, deadline: asyncio.Timeout) -> None:
        self.parts = parts
        self._pace = pace
        self._deadline = deadline
        self._begun = asyncio.get_running_loop().time()
        self._came = 0
        self._ahead: list[dict[int, int]] = [{} for _ in parts]
        """Of each part, where chunks begin and end that came and are not hashed yet."""
        self._hashed = [0 for _ in parts]
        self._digests = [blake3() for _ in parts]
        self._ends: list[PartEnd | None] = [None for _ in parts]

    def expect(self, size_bytes: int) -> None:
        """So many bytes are to come next: set the deadline for them."""
        if not self._deadline.expired():  # it was just now, and the other lanes have not heard of it
            self._deadline.reschedule(self._begun + self._pace.due_s(self._came + size_bytes))

    def take(self, index: int, chunk: slice) -> None:
        """This chunk lies in its place. Raises RemoteError where its part is complete and is not what its end says."""
        self._came += chunk.stop - chunk.start
        ahead = self._ahead[index]
        ahead[chunk.start] = chunk.stop
        with memoryview(self.parts[index]) as view:
            while (upto := ahead.pop(start := self._hashed[index], None)) is not None:
                self._digests[index].update(view[start:upto])
                self._hashed[index] = upto
        self._compare(index)

    def end(self, index: int, end: PartEnd) -> None:
        """A part's end came. Raises RemoteError where the part is complete and is something else."""
        self._ends[index] = end
        self._compare(index)

    def _compare(self, index: int) -> None:
        length, end = len(self.parts[index]), self._ends[index]
        if self._hashed[index] < length or end is None:
            return
        if end != PartEnd(index, length, self._digests[index].digest()):
            raise RemoteError(f"part {index}: its end does not agree with the {length} bytes before it")


async def _receive_share(lane: Link, layout: _Layout, number: int, arrivals: _Arrivals) -> None:
    """What ``_send_share`` sends."""
    receive_into = lane.receive_into if isinstance(lane, DirectLink) else partial(_receive_copy, lane)
    for index, chunks in enumerate(layout.shares(number)):
        part = arrivals.parts[index]
        for chunk in chunks:
            arrivals.expect(chunk.stop - chunk.start)
            with memoryview(part) as view, view[chunk] as place:
                kind, length = await receive_into(place)
                if kind != FrameKind.CHUNK or length != len(place):
                    due = f"a chunk of {len(place)} bytes was due"
                    raise RemoteError(f"part {index}: {due}, not kind {kind} with {length} bytes")
            arrivals.take(index, chunk)
        if number == 0:
            kind, body = await lane.receive()
            if kind != FrameKind.PART:
                raise RemoteError(f"part {index}: its end was due after {len(part)} bytes, not a frame of kind {kind}")
            arrivals.end(index, framing.decode_part_end(body))


async def _receive_copy(link: Link, buffer: memoryview) -> tuple[int, int]:
    """``DirectLink.receive_into`` for a link that has none."""
    kind, body = await link.receive()
    if len(body) > len(buffer):
        raise RemoteError(f"a frame of {len(body)} bytes where {len(buffer)} were due")
    buffer[: len(body)] = body
    return kind, len(body)
