"""Throttle arithmetic with a manual clock, and throttled links over fake streams in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any

import pytest
import virtual_time
from hypothesis import given, settings
from hypothesis import strategies as some

from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import PeerId
from p2ptrain.framing import HEADER_BYTES, MAX_CHUNK_BYTES, FrameKind, encode_header
from p2ptrain.net.links import Limits, StreamLink
from p2ptrain.net.p2pd.control import FarEnd
from p2ptrain.net.p2pd.streams import Stream
from p2ptrain.net.payload import receive_payload, send_payload
from p2ptrain.net.throttle import (
    BURST_S,
    MIN_RATE,
    PIECE_BYTES,
    SMALL_BYTES,
    UNWAITED_S,
    UNWAITED_SHARE,
    Throttle,
    Throttles,
)
from p2ptrain.swarm.rules import MAX_DONATIONS, MAX_EXCHANGES


class Watch:
    """A clock that tests set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def line(rate: float = inf) -> tuple[Throttle, Watch]:
    watch = Watch()
    made = Throttle(watch)
    made.rate = rate
    return made, watch


def test_without_a_cap_nothing_waits_and_everything_counts() -> None:
    free, _ = line()
    assert [free.book(10**9) for _ in range(3)] == [0.0] * 3
    assert free.total_bytes == 3 * 10**9


def test_turns_come_in_order_at_the_rate() -> None:
    capped, watch = line(1000.0)
    assert capped.book(500) == 0.0  # the burst that half a second without traffic has left
    assert capped.book(1000) == 0.0
    assert capped.book(2000) == 1.0
    assert capped.book(1) == 3.0
    watch.now += 3.001
    assert capped.book(1) == 0.0


def test_rest_is_not_saved_up() -> None:
    capped, watch = line(1000.0)
    capped.book(1)
    watch.now += 3600
    assert capped.book(int(BURST_S * 1000)) == 0.0
    assert capped.book(1000) == 0.0
    assert capped.book(1000) == 1.0


def test_a_new_cap_holds_for_what_is_booked_and_has_not_left() -> None:
    capped, _ = line(1000.0)
    capped.book(10_500)  # leaves within 10 s
    capped.rate = 10_000.0
    assert capped.book(1) == 1.0
    capped.rate = inf
    assert capped.book(1) == 0.0
    capped.rate = 1000.0
    assert capped.book(10_000) == 0.0
    assert capped.book(1) == 10.0


@settings(max_examples=50)
@given(
    some.lists(some.tuples(some.integers(1, 100_000), some.floats(0, 5)), min_size=1, max_size=50),
    some.floats(MIN_RATE, 1e9),
)
def test_no_span_of_time_has_more_than_the_rate_and_one_burst(steps: list[tuple[int, float]], rate: float) -> None:
    capped, watch = line(rate)
    moved = []
    for size, pause in steps:
        watch.now += pause
        moved.append((watch.now + capped.book(size), size))
    for first in range(len(moved)):
        size = 0
        for at, each in moved[first:]:
            # The last one was admitted, and has still to leave.
            assert size <= rate * (at - moved[first][0] + BURST_S) + 1e-3
            size += each


def test_pieces_are_the_whole_and_small_only_where_capped() -> None:
    free, capped = line()[0], line(MIN_RATE)[0]
    view = memoryview(bytes(range(256)) * 300)
    assert list(free.pieces(view)) == [view]
    assert b"".join(capped.pieces(view)) == view
    assert max(map(len, capped.pieces(view))) == PIECE_BYTES
    assert [bytes(piece) for piece in capped.pieces(memoryview(b""))] == [b""]


def test_at_the_lowest_cap_no_partner_takes_us_for_dead() -> None:
    limits, streams = Limits(), MAX_EXCHANGES + MAX_DONATIONS + 1
    assert streams * PIECE_BYTES / MIN_RATE < limits.idle_s
    assert streams * MAX_CHUNK_BYTES / MIN_RATE < limits.frame_s(MAX_CHUNK_BYTES)


# --- links ------------------------------------------------------------------------------------------------------------


class Pipe:
    """Connection between two fake streams without delay."""

    def __init__(self) -> None:
        self.bytes = bytearray()
        self.came = asyncio.Event()

    def put(self, data: bytes | memoryview) -> None:
        self.bytes += data
        self.came.set()

    async def take(self, length: int) -> bytes:
        while len(self.bytes) < length:
            self.came.clear()
            await self.came.wait()
        taken = bytes(self.bytes[:length])
        del self.bytes[:length]
        return taken


class FakeStream:
    """The part of ``streams.Stream`` that a link uses."""

    is_closing = False
    lacking = 0

    def __init__(self, out: Pipe, into: Pipe) -> None:
        self._out, self._into = out, into

    async def write(self, *buffers: bytes | memoryview) -> None:
        for buffer in buffers:
            self._out.put(buffer)

    async def read_exactly(self, length: int) -> bytes:
        return await self._into.take(length)

    async def read_into(self, buffer: memoryview) -> None:
        self.lacking = len(buffer)
        try:
            buffer[:] = await self._into.take(len(buffer))
            self.lacking = 0
        except asyncio.CancelledError:
            self.lacking = len(buffer) - len(self._into.bytes)
            raise

    def abort(self) -> None:
        self.is_closing = True


def over_a_link(play: Callable[[StreamLink, StreamLink, Throttles, Throttles], Awaitable[None]]) -> None:
    """Run ``play(near, far, near's throttles, far's throttles)`` in virtual time."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        there, back = Pipe(), Pipe()
        mine, theirs = Throttles(loop.time), Throttles(loop.time)
        near = StreamLink(FarEnd(PeerId("far"), ""), FakeStream(there, back), Limits(), mine)  # type: ignore[arg-type]
        far = StreamLink(FarEnd(PeerId("near"), ""), FakeStream(back, there), Limits(), theirs)  # type: ignore[arg-type]
        await play(near, far, mine, theirs)

    virtual_time.run(main())


PART = bytes(1_000_000)


@pytest.mark.parametrize("capped", ["sender", "receiver"])
def test_a_payload_passes_at_the_cap_of_either_side(capped: str) -> None:
    """Check a transfer of 32 s in which each frame takes 8 s, and no side times out."""

    async def play(near: StreamLink, far: StreamLink, mine: Throttles, theirs: Throttles) -> None:
        (mine.up if capped == "sender" else theirs.down).rate = MIN_RATE
        started = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as both:
            both.create_task(send_payload(near, [PART]))
            got = both.create_task(receive_payload(far, [len(PART)]))
        assert got.result() == [PART]
        took_s = asyncio.get_running_loop().time() - started
        assert len(PART) / MIN_RATE - 2 * BURST_S < took_s < len(PART) / MIN_RATE + 1
        assert mine.up.total_bytes == theirs.down.total_bytes > len(PART)
        assert mine.down.total_bytes == theirs.up.total_bytes == 0

    over_a_link(play)


def test_messages_pass_a_queue_of_chunks_and_count() -> None:
    async def play(near: StreamLink, far: StreamLink, mine: Throttles, theirs: Throttles) -> None:
        mine.up.rate = theirs.down.rate = MIN_RATE
        mine.up.book(10 * 60 * int(MIN_RATE))  # ten minutes of other streams' chunks
        before = mine.up.total_bytes
        async with asyncio.timeout(0.001):
            await near.send(FrameKind.MESSAGE, b"hello")
            assert await far.receive() == (FrameKind.MESSAGE, b"hello")
        assert mine.up.total_bytes == before + len(b"hello") + 6

    over_a_link(play)


def test_a_long_answer_waits_its_turn_like_a_chunk() -> None:
    """Check answers of other services: repeated requests for a manifest or an access list must not exceed the cap."""

    async def play(near: StreamLink, far: StreamLink, mine: Throttles, theirs: Throttles) -> None:
        mine.up.rate = MIN_RATE
        mine.up.book(10 * int(MIN_RATE))
        started = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as both:
            both.create_task(near.send(FrameKind.MANIFEST, bytes(2 * SMALL_BYTES)))
            both.create_task(far.receive())
        assert asyncio.get_running_loop().time() - started == pytest.approx(10.0, abs=1.0)

    over_a_link(play)


def test_what_passes_on_a_link_that_is_a_gift_is_counted_as_given() -> None:
    async def play(near: StreamLink, far: StreamLink, mine: Throttles, theirs: Throttles) -> None:
        near._serves_others = True
        await near.send(FrameKind.MESSAGE, b"hello")
        await far.receive()
        await far.send(FrameKind.CHUNK, b"bytes")
        await near.receive()
        assert mine.given_bytes == mine.up.total_bytes + mine.down.total_bytes == 22
        assert theirs.given_bytes == 0

    over_a_link(play)


@pytest.mark.parametrize("cap", [MIN_RATE, inf])
@pytest.mark.parametrize("kind", [FrameKind.MESSAGE, FrameKind.CHUNK])
@pytest.mark.parametrize("length", [100, 3 * SMALL_BYTES])
def test_a_body_counts_as_far_as_it_comes(length: int, kind: FrameKind, cap: float) -> None:
    """Check that only received bytes count: six bytes announce a quarter of a megabyte."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        rates, into = Throttles(loop.time), Pipe()
        rates.down.rate = cap
        into.put(encode_header(kind, length) + b"some of it")
        stream: Any = FakeStream(Pipe(), into)
        link = StreamLink(FarEnd(PeerId("liar"), ""), stream, Limits(), rates, serves_others=True)
        with pytest.raises(NetworkError, match="sent nothing"):
            await link.receive()
        assert rates.down.total_bytes == rates.given_bytes == HEADER_BYTES + len(b"some of it")
        await asyncio.sleep(1.0)
        assert rates.down.book(0) == 0.0

    virtual_time.run(main())


def test_what_never_waits_has_its_share_of_a_cap_whatever_else_is_booked() -> None:
    capped, watch = line(1000.0)
    capped.book(10**6)  # circuits and donations wait, and use nothing of that share
    assert not capped.is_flooded
    capped.book_unwaited(round(UNWAITED_S * UNWAITED_SHARE * 1000.0) + 500)
    assert capped.is_flooded
    watch.now += 0.5
    assert capped.is_flooded
    watch.now += 0.5
    assert not capped.is_flooded
    for _ in range(1000):  # continuously at its share
        watch.now += 1.0
        capped.book_unwaited(500)
        assert not capped.is_flooded
    assert capped.total_bytes == 10**6 + 5500 + 500_000


def test_a_flood_of_what_never_waits_puts_off_no_turn_and_is_over_soon_after() -> None:
    capped, watch = line(1000.0)
    capped.book_unwaited(10**9)
    assert capped.book(100) == 0.0
    assert capped.is_flooded
    watch.now += UNWAITED_S
    assert not capped.is_flooded


def test_without_a_cap_nothing_is_a_flood_and_a_new_cap_begins_at_nothing() -> None:
    free, _ = line()
    free.book_unwaited(10**9)
    assert not free.is_flooded
    free.rate = MIN_RATE
    assert not free.is_flooded


def test_small_frames_move_at_once_within_their_share_and_wait_beyond_it() -> None:
    capped, watch = line(1000.0)
    share = UNWAITED_S * UNWAITED_SHARE * 1000.0
    capped.book(10**5)
    assert [capped.book_small(500) for _ in range(int(share) // 500)] == [0.0] * 10
    assert capped.book_small(500) == pytest.approx(10**5 / 1000.0 + share / 1000.0 - BURST_S)
    watch.now += 2.0
    assert [capped.book_small(500) > 0 for _ in range(3)] == [False, False, True]
    assert capped.total_bytes == 10**5 + share + 4 * 500


def test_a_flood_of_small_frames_puts_off_others_by_a_bounded_time() -> None:
    capped, watch = line(1000.0)
    for _ in range(6000):
        watch.now += 0.1
        capped.book_small(50)  # at half the cap
    assert capped.book(0) == 0.0
    for _ in range(6000):
        watch.now += 0.1
        if (wait_s := capped.book_small(500)) > 0:  # five times the cap; a sender that had to wait gives up
            with pytest.raises(asyncio.CancelledError):
                asyncio.run(cancelled_in(capped, wait_s, 500))
    assert capped.book(0) <= UNWAITED_S * UNWAITED_SHARE


async def cancelled_in(capped: Throttle, wait_s: float, size_bytes: int) -> None:
    task = asyncio.ensure_future(capped.wait(wait_s, size_bytes))
    await asyncio.sleep(0)
    task.cancel()
    await task


def test_small_frames_and_the_dht_have_shares_of_their_own() -> None:
    capped, _ = line(1000.0)
    capped.book_unwaited(10**9)
    assert capped.book_small(100) == 0.0
    capped, _ = line(1000.0)
    for _ in range(1000):
        capped.book_small(100)
    assert not capped.is_flooded


@pytest.mark.parametrize("way", ["in", "out"])
def test_strangers_small_frames_put_off_a_partners_payload_by_seconds(way: str) -> None:
    """Check sixteen streams for a minute at four times the lowest cap."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        rates = Throttles(loop.time)
        line = rates.down if way == "in" else rates.up
        line.rate = MIN_RATE
        passed = 0

        async def pass_one(kind: int, size: int) -> float:
            """Return the seconds that a frame takes."""
            out, into, began = Pipe(), Pipe(), loop.time()
            stream = FakeStream(out, into)
            link = StreamLink(FarEnd(PeerId("amber"), ""), stream, Limits(), rates)  # type: ignore[arg-type]
            if way == "out":
                await link.send(kind, bytes(size))
            else:
                into.put(encode_header(kind, size) + bytes(size))
                await link.receive()
            return loop.time() - began

        async def flood() -> None:
            nonlocal passed
            while True:
                await asyncio.sleep(0.5)
                await pass_one(FrameKind.MESSAGE, SMALL_BYTES)
                passed += 1

        strangers = [asyncio.create_task(flood()) for _ in range(16)]
        await asyncio.sleep(60.0)
        at_once = UNWAITED_S * UNWAITED_SHARE
        assert await pass_one(FrameKind.CHUNK, PIECE_BYTES) < at_once + 16 * SMALL_BYTES / MIN_RATE
        assert passed * SMALL_BYTES < MIN_RATE * (loop.time() + at_once)
        for stranger in strangers:
            stranger.cancel()
        await asyncio.sleep(UNWAITED_S)
        assert await pass_one(FrameKind.MESSAGE, SMALL_BYTES) == 0.0
        assert await pass_one(FrameKind.CHUNK, PIECE_BYTES) == 0.0

    virtual_time.run(main())


@pytest.mark.parametrize("kind", [FrameKind.MESSAGE, FrameKind.CHUNK])
def test_who_gives_up_before_its_turn_puts_off_nobody(kind: FrameKind) -> None:
    """Check a stranger that repeatedly announces a frame and closes before the throttle admits it."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        rates = Throttles(loop.time)
        rates.down.rate = MIN_RATE
        rates.down.book(10 * int(MIN_RATE))
        before_s = rates.down.book(0)
        for _ in range(100):
            into = Pipe()
            into.put(encode_header(kind, 2 * SMALL_BYTES))
            link = StreamLink(FarEnd(PeerId("liar"), ""), FakeStream(Pipe(), into), Limits(), rates)  # type: ignore[arg-type]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await link.receive()
        assert rates.down.book(0) == pytest.approx(before_s, abs=0.2)

    virtual_time.run(main())


def test_our_own_cap_is_not_the_partners_silence_but_silence_still_is() -> None:
    """Check a chunk delayed by our throttle for four minutes, with a timeout of 84 s; then one that never comes."""

    async def play(near: StreamLink, far: StreamLink, mine: Throttles, theirs: Throttles) -> None:
        theirs.down.rate = MIN_RATE
        theirs.down.book(240 * int(MIN_RATE))
        await near.send(FrameKind.CHUNK, bytes(MAX_CHUNK_BYTES))
        assert await far.receive() == (FrameKind.CHUNK, bytes(MAX_CHUNK_BYTES))
        with pytest.raises(NetworkError, match="sent nothing for too long"):
            await far.receive()

    over_a_link(play)


def test_a_cap_that_is_lifted_ends_the_wait_for_the_next_piece() -> None:
    async def play(near: StreamLink, far: StreamLink, mine: Throttles, theirs: Throttles) -> None:
        mine.up.rate = MIN_RATE
        started = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as both:
            both.create_task(send_payload(near, [PART]))
            got = both.create_task(receive_payload(far, [len(PART)]))
            await asyncio.sleep(5)
            mine.up.rate = inf
        assert got.result() == [PART]
        assert asyncio.get_running_loop().time() - started < 6

    over_a_link(play)


@pytest.mark.parametrize("spare", [b"", b"ab"])
def test_a_stream_says_what_a_read_that_failed_still_lacked(spare: bytes) -> None:
    async def main() -> list[int]:
        stream = Stream()
        feed(stream, spare)
        reading = asyncio.ensure_future(stream.read_into(memoryview(bytearray(10))))
        await asyncio.sleep(0)
        feed(stream, b"xyz")
        reading.cancel()
        await asyncio.wait([reading])
        lacking = [stream.lacking]
        feed(stream, bytes(10))
        await stream.read_into(memoryview(bytearray(10)))
        stream.eof_received()
        lacking.append(stream.lacking)
        with pytest.raises(EOFError):
            await stream.read_into(memoryview(bytearray(4)))
        return [*lacking, stream.lacking]

    assert virtual_time.run(main()) == [7 - len(spare), 0, 4]


def feed(stream: Stream, data: bytes) -> None:
    """Feed data as p2pd's socket does."""
    if data:
        stream.get_buffer(-1)[: len(data)] = data
        stream.buffer_updated(len(data))
