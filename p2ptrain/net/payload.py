"""Bulk data over a link: parts of known length, in chunks; the length and BLAKE3 digest follow each part.

A clean end of a stream proves nothing (a killed process's streams end so), so a part counts only when its PART frame
has come and matches. Both sides know the length of every part, and thus of every chunk, in advance: the receiver
allocates its buffers once and rejects the first frame that differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from blake3 import blake3

from p2ptrain import framing
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import short
from p2ptrain.framing import FrameKind, PartEnd
from p2ptrain.net.concurrently import concurrently
from p2ptrain.ports import Link

GRACE_S = 20.0
"""Time until a payload's first bytes, as until a frame begins (``links.Limits.idle_s``)."""
SLOWEST_RATE = 4096.0
"""Least mean rate of a payload after that in bytes per second (``links.Limits.slowest_rate``). At the lowest cap each
stream has 5 kB/s (``throttle.MIN_RATE``)."""


def due_s(received_bytes: int) -> float:
    """Return the deadline for so many bytes of a payload, in seconds after its beginning.

    Deadlines of single frames are not enough: a sender that just meets each of them could hold us for many frames, and
    the sender itself influences the deadline of its exchange (``swarm.deadlines``).
    """
    return GRACE_S + received_bytes / SLOWEST_RATE


async def send_payload(
    link: Link, parts: Sequence[bytes | bytearray | memoryview], others: Sequence[Link] = ()
) -> None:
    """Send all parts, in order. The buffers must not change before this returns. Raises NetworkError.

    Args:
        others: further streams for the chunks (``Link.open_parallel``).
    """
    views = [memoryview(part).cast("B") for part in parts]
    layout = _Layout([len(view) for view in views], 1 + len(others))
    if others:
        streams = enumerate((link, *others))
        await concurrently(*(_send_share(stream, views, layout, number) for number, stream in streams))
    else:
        await _send_share(link, views, layout, 0)


async def receive_payload(
    link: Link,
    lengths: Sequence[int],
    others: Sequence[Link] = (),
) -> list[bytearray]:
    """Receive parts of exactly these lengths.

    Raises NetworkError if the stream ends early or misses its deadline, RemoteError if the data differ.

    Args:
        others: further streams for the chunks (``Link.open_parallel``).
    """
    loop = asyncio.get_running_loop()
    layout, began = _Layout(lengths, 1 + len(others)), loop.time()
    try:
        async with asyncio.timeout(None) as deadline:
            arrivals = _Arrivals([bytearray(length) for length in lengths], deadline)
            if others:
                streams = enumerate((link, *others))
                await concurrently(*(_receive_share(stream, layout, number, arrivals) for number, stream in streams))
            else:
                await _receive_share(link, layout, 0, arrivals)
    except TimeoutError:
        raise NetworkError(f"{short(link.peer)} sends slower than {SLOWEST_RATE / 1000:.0f} kB/s") from None
    link.record_transfer(sum(lengths), loop.time() - began)
    return arrivals.parts


class _Layout:
    """Assignment of a payload's chunks to its streams: in turn, from the first chunk of the first part.

    Args:
        lengths: bytes of each part.
        streams: number of streams.
    """

    def __init__(self, lengths: Sequence[int], streams: int) -> None:
        self.lengths = lengths
        self._streams = streams

    def shares(self, stream: int) -> Iterator[list[slice]]:
        """Yield, for each part, the chunks on one stream, in order."""
        before = 0
        for length in self.lengths:
            first = (stream - before) % self._streams * framing.MAX_CHUNK_BYTES
            starts = range(first, length, self._streams * framing.MAX_CHUNK_BYTES)
            yield [slice(start, min(start + framing.MAX_CHUNK_BYTES, length)) for start in starts]
            before += -(-length // framing.MAX_CHUNK_BYTES)


async def _send_share(stream: Link, parts: Sequence[memoryview], layout: _Layout, number: int) -> None:
    """Send one stream's chunks; on the first stream also the end of each part, after its chunks."""
    for index, chunks in enumerate(layout.shares(number)):
        part, hashed, digest = parts[index], 0, blake3()
        for chunk in chunks:
            if number == 0:  # hash everything up to here, in small steps that do not block the event loop
                digest.update(part[hashed : chunk.stop])
                hashed = chunk.stop
            await stream.send(FrameKind.CHUNK, part[chunk])
        if number == 0:
            digest.update(part[hashed:])
            await stream.send(FrameKind.PART, framing.encode_part_end(PartEnd(index, len(part), digest.digest())))


class _Arrivals:
    """Receive state of a payload over all streams.

    Each part is hashed as far as it has come without a gap, and compared with its end when both are complete.
    """

    def __init__(self, parts: list[bytearray], deadline: asyncio.Timeout) -> None:
        self.parts = parts
        self._deadline = deadline
        self._begun = asyncio.get_running_loop().time()
        self._came = 0
        self._ahead: list[dict[int, int]] = [{} for _ in parts]
        """For each part, beginning and end of chunks that have come and are not hashed yet."""
        self._hashed = [0 for _ in parts]
        self._digests = [blake3() for _ in parts]
        self._ends: list[PartEnd | None] = [None for _ in parts]

    def expect(self, size_bytes: int) -> None:
        """Set the deadline for the next so many bytes."""
        if not self._deadline.expired():  # another stream may not have been cancelled yet
            self._deadline.reschedule(self._begun + due_s(self._came + size_bytes))

    def take(self, index: int, chunk: slice) -> None:
        """Count a chunk that is in its place. Raises RemoteError if its part is complete and does not match its end."""
        self._came += chunk.stop - chunk.start
        ahead = self._ahead[index]
        ahead[chunk.start] = chunk.stop
        with memoryview(self.parts[index]) as view:
            while (upto := ahead.pop(start := self._hashed[index], None)) is not None:
                self._digests[index].update(view[start:upto])
                self._hashed[index] = upto
        self._compare(index)

    def end(self, index: int, end: PartEnd) -> None:
        """Take the end of a part. Raises RemoteError if the part is complete and does not match."""
        self._ends[index] = end
        self._compare(index)

    def _compare(self, index: int) -> None:
        length, end = len(self.parts[index]), self._ends[index]
        if self._hashed[index] < length or end is None:
            return
        if end != PartEnd(index, length, self._digests[index].digest()):
            raise RemoteError(f"part {index}: the length or digest at its end does not match its {length} bytes")


async def _receive_share(stream: Link, layout: _Layout, number: int, arrivals: _Arrivals) -> None:
    for index, chunks in enumerate(layout.shares(number)):
        part = arrivals.parts[index]
        for chunk in chunks:
            arrivals.expect(chunk.stop - chunk.start)
            with memoryview(part) as view, view[chunk] as place:
                kind, length = await stream.receive_into(place)
                if kind != FrameKind.CHUNK or length != len(place):
                    due = f"expected a chunk of {len(place)} bytes"
                    raise RemoteError(f"part {index}: {due}, got kind {kind} with {length} bytes")
            arrivals.take(index, chunk)
        if number == 0:
            kind, body = await stream.receive()
            if kind != FrameKind.PART:
                raise RemoteError(f"part {index}: expected its end after {len(part)} bytes, got a frame of kind {kind}")
            arrivals.end(index, framing.decode_part_end(body))
