"""Payloads, both sides back to back over a fake link."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence

import pytest
import virtual_time
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as some
from memory_network import MemoryLink, MemoryNetwork

from p2ptrain import framing
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId
from p2ptrain.framing import FrameKind, PartEnd, encode_part_end
from p2ptrain.net.payload import due_s, receive_payload, send_payload
from p2ptrain.ports import Link

A, B = PeerId("a"), PeerId("b")
CHUNK = framing.MAX_CHUNK_BYTES


async def pair(delay: float = 0.1) -> tuple[Link, MemoryLink]:
    """Return the two ends of a link: A's, B's."""
    network = MemoryNetwork(delay)
    far: asyncio.Future[Link] = asyncio.get_running_loop().create_future()

    async def hold(link: Link) -> None:
        far.set_result(link)
        await asyncio.sleep(1000)

    await network.transport(B).listen(hold)
    near = await network.transport(A).open(B)
    return near, await far


def received(frames: Sequence[tuple[int, bytes]], lengths: Sequence[int]) -> list[bytearray]:
    """Return the receiver's result for these frames and a clean end."""

    async def main() -> list[bytearray]:
        near, far = await pair()
        for kind, body in frames:
            await near.send(kind, body)
        await near.close()
        return await receive_payload(far, lengths)

    return virtual_time.run(main())


def end(number: int, data: bytes) -> tuple[int, bytes]:
    return FrameKind.PART, encode_part_end(PartEnd(number, len(data), blake3(data).digest()))


@settings(max_examples=20)
@given(some.lists(some.sampled_from([0, 1, 1000, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK]), max_size=4))
def test_parts_of_any_length_arrive_both_ways_at_once(lengths):
    mine = [bytes([index]) * length for index, length in enumerate(lengths)]
    theirs = [bytes([100 + index]) * length for index, length in enumerate(reversed(lengths))]

    async def main() -> tuple[list[bytearray], list[bytearray]]:
        near, far = await pair()
        async with asyncio.TaskGroup() as both:
            both.create_task(send_payload(near, mine))
            both.create_task(send_payload(far, [memoryview(part) for part in theirs]))
            got = both.create_task(receive_payload(far, lengths))
            answer = both.create_task(receive_payload(near, lengths[::-1]))
        return got.result(), answer.result()

    assert virtual_time.run(main()) == (mine, theirs)


async def streams(delays: Sequence[float]) -> tuple[list[Link], list[MemoryLink]]:
    """Return both ends of parallel streams with these delays in seconds."""
    pairs = [await pair(delay) for delay in delays]
    return [near for near, _ in pairs], [far for _, far in pairs]


@settings(max_examples=40)
@given(
    some.lists(some.sampled_from([0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 5 * CHUNK + 3]), max_size=4),
    some.lists(some.sampled_from([0.1, 0.2, 5.0]), min_size=1, max_size=4),
)
def test_parts_arrive_over_streams_of_any_speed(lengths, delays):
    parts = [random.randbytes(length) for length in lengths]

    async def main() -> tuple[list[bytearray], list[int]]:
        near, far = await streams(delays)
        recorded: list[int] = []
        far[0].record_transfer = lambda size_bytes, seconds: recorded.append(size_bytes)
        async with asyncio.TaskGroup() as both:
            both.create_task(send_payload(near[0], parts, near[1:]))
            got = both.create_task(receive_payload(far[0], lengths, others=far[1:]))
        return got.result(), recorded

    assert virtual_time.run(main()) == (parts, [sum(lengths)])


def test_each_stream_carries_its_share():
    async def main() -> list[list[int]]:
        near, far = await streams([0.1] * 3)
        await send_payload(near[0], [bytes(4 * CHUNK), bytes(3 * CHUNK)], near[1:])
        for stream in near:
            await stream.close()
        return [[kind async for kind in kinds_on(stream)] for stream in far]

    chunk, part = FrameKind.CHUNK, FrameKind.PART
    assert virtual_time.run(main()) == [[chunk, chunk, part, chunk, part], [chunk, chunk], [chunk, chunk]]


async def kinds_on(link: Link) -> AsyncIterator[int]:
    with contextlib.suppress(NetworkError):
        while True:
            yield (await link.receive())[0]


def test_a_wrong_chunk_on_any_stream_is_a_remote_error():
    async def main(number: int) -> None:
        near, far = await streams([0.1] * 3)
        good = bytes(3 * CHUNK)
        for index, stream in enumerate(near):
            await stream.send(FrameKind.CHUNK, bytes([index == number]) * CHUNK)
        await near[0].send(*end(0, good))
        await receive_payload(far[0], [len(good)], others=far[1:])

    for number in range(3):
        with pytest.raises(RemoteError, match="does not match"):
            virtual_time.run(main(number))


@pytest.mark.parametrize("silent", range(3))
def test_a_stream_that_is_silent_holds_the_payload_no_longer_than_its_pace(silent):
    async def main() -> float:
        near, far = await streams([0.1] * 3)
        for index, stream in enumerate(near):
            if index != silent:
                await stream.send(FrameKind.CHUNK, bytes(CHUNK))
        started = asyncio.get_running_loop().time()
        with pytest.raises(NetworkError, match="slower"):
            await receive_payload(far[0], [3 * CHUNK], others=far[1:])
        return asyncio.get_running_loop().time() - started

    assert virtual_time.run(main()) <= due_s(3 * CHUNK)


def test_a_stream_that_is_cut_ends_the_others():
    async def main() -> None:
        _, far = await streams([0.1] * 3)
        asyncio.get_running_loop().call_later(0.5, far[1].cut)
        await receive_payload(far[0], [3 * CHUNK], others=far[1:])

    with pytest.raises(NetworkError, match="cut"):
        virtual_time.run(main())


def test_arrays_of_wider_items_are_sent_as_bytes():
    part = memoryview(bytes(range(64))).cast("I")

    async def main() -> list[bytearray]:
        near, far = await pair()
        await send_payload(near, [part])
        return await receive_payload(far, [64])

    assert virtual_time.run(main()) == [bytes(range(64))]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [(FrameKind.CHUNK, b"abc")],
        [(FrameKind.CHUNK, b"abc"), end(0, b"abc")],
        [(FrameKind.CHUNK, b"abc"), end(0, b"abc"), (FrameKind.CHUNK, b"de")],
    ],
    ids=["nothing", "no end", "a part missing", "the last end missing"],
)
def test_a_clean_end_too_early_is_a_network_error(frames):
    with pytest.raises(NetworkError):
        received(frames, [3, 2])


@pytest.mark.parametrize(
    "frames",
    [
        [(FrameKind.CHUNK, b"abcd")],
        [(FrameKind.CHUNK, b"ab"), (FrameKind.CHUNK, b"c"), end(0, b"abc")],
        [(FrameKind.CHUNK, b""), (FrameKind.CHUNK, b"abc"), end(0, b"abc")],
        [(FrameKind.CHUNK, b"abc"), (FrameKind.CHUNK, b"abc"), end(0, b"abc")],
        [(FrameKind.CHUNK, b"abc"), end(1, b"abc")],
        [(FrameKind.CHUNK, b"abc"), end(0, b"abd")],
        [(FrameKind.CHUNK, b"abc"), end(0, b"abcd")],
        [(FrameKind.CHUNK, b"abc"), (FrameKind.PART, b"short")],
        [(FrameKind.CHUNK, b"abc"), end(0, b"abc"), end(0, b"abc")],
        [end(0, b"abc")],
        [(FrameKind.MESSAGE, b"abc")],
        [(FrameKind.CHUNK, b"abc"), (FrameKind.MESSAGE, b"abc")],
    ],
    ids=[
        "oversized",
        "dripped",
        "empty chunk",
        "chunk twice",
        "part out of order",
        "wrong digest",
        "wrong length",
        "garbled end",
        "part twice",
        "no chunks",
        "a message instead of a chunk",
        "a message instead of the end",
    ],
)
def test_whatever_differs_is_a_remote_error(frames):
    with pytest.raises(RemoteError):
        received(frames, [3, 2])


def test_a_cut_link_is_a_network_error():
    async def main() -> None:
        near, far = await pair()
        await near.send(FrameKind.CHUNK, b"x" * CHUNK)
        asyncio.get_running_loop().call_later(0.5, far.cut)
        await receive_payload(far, [2 * CHUNK])

    with pytest.raises(NetworkError):
        virtual_time.run(main())


def dripped(lengths: Sequence[int], pause_s: float) -> tuple[str, float]:
    """Return how and when a transfer ends if the sender pauses for so long before each of its frames."""

    async def main() -> tuple[str, float]:
        near, far = await pair()
        loop = asyncio.get_running_loop()

        async def drip() -> None:
            for number, length in enumerate(lengths):
                part = bytes(length)
                for start in range(0, length, CHUNK):
                    await asyncio.sleep(pause_s)
                    await near.send(FrameKind.CHUNK, part[start : start + CHUNK])
                await near.send(*end(number, part))

        begun, dripping = loop.time(), loop.create_task(drip())
        try:
            await receive_payload(far, lengths)
            return "whole", loop.time() - begun
        except NetworkError as error:
            return str(error), loop.time() - begun
        finally:
            dripping.cancel()

    return virtual_time.run(main())


@pytest.mark.parametrize("lengths", [[100] * 500, [5 * CHUNK], [1000, 3 * CHUNK, 10]])
def test_a_drip_that_keeps_every_frames_deadline_cannot_stretch_the_payloads(lengths):
    how, seconds = dripped(lengths, pause_s=(64.0 if max(lengths) > CHUNK else 0.0) + 19.0)
    assert how == "a sends slower than 4 kB/s"
    assert seconds <= due_s(sum(lengths))


@pytest.mark.parametrize("lengths", [[100] * 5, [5 * CHUNK], [3 * CHUNK, 2 * CHUNK]])
def test_who_is_slow_but_not_that_slow_gets_through(lengths):
    how, seconds = dripped(lengths, pause_s=CHUNK / 5000 if max(lengths) > CHUNK else 1.0)
    assert how == "whole"
    assert seconds > 4.9
