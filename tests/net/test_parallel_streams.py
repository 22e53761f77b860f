"""Several streams for one payload, over real p2pd processes on loopback."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest
import uvloop

from p2ptrain.base.errors import NetworkError, RemoteError, UnbegunError
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.framing import MAX_CHUNK_BYTES, FrameKind
from p2ptrain.net import parallel_streams as streams_module
from p2ptrain.net.identity import Identity
from p2ptrain.net.links import StreamLink
from p2ptrain.net.node import Node
from p2ptrain.net.parallel_streams import (
    LANE_PROTOCOL,
    PARALLEL_FROM_BYTES,
    PARALLEL_FROM_RATE,
    STREAMS,
    ParallelLink,
    ParallelStreams,
)
from p2ptrain.net.payload import receive_payload, send_payload
from p2ptrain.net.rpc import receive_message, send_message
from p2ptrain.net.transport import P2PTransport
from p2ptrain.statements import packed

pytestmark = pytest.mark.net

RUN = RunId("ab" * 32)
TALK = "/test/wide"
TOKEN = bytes(range(16))
PARTS = [os.urandom(PARALLEL_FROM_BYTES + 77), b"", os.urandom(3 * MAX_CHUNK_BYTES)]
LENGTHS = [len(part) for part in PARTS]
SIZE = sum(LENGTHS)


@dataclass
class Two:
    """Two nodes on one loop, and the parallel streams of each. The second is the initiator."""

    runner: asyncio.Runner
    nodes: list[Node]
    lanes: list[ParallelStreams]

    def converse(
        self,
        opener: Callable[[ParallelLink], Awaitable[Any]],
        answerer: Callable[[ParallelLink], Awaitable[Any]],
    ) -> tuple[Any, Any]:
        """Return what both sides' functions return for one conversation."""

        async def main() -> tuple[Any, Any]:
            answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

            async def answer(link: StreamLink) -> None:
                wide = self.lanes[0].of(link, ours=False)
                try:
                    answered.set_result(await answerer(wide))
                except BaseException as error:
                    answered.set_exception(error)
                    raise
                finally:
                    await wide.close()

            transport = P2PTransport(self.nodes[0], TALK)
            await transport.listen(answer)
            caller = P2PTransport(self.nodes[1], TALK)
            link = self.lanes[1].of(await caller.open(self.nodes[0].peer_id, self.nodes[0].addresses), ours=True)
            try:
                async with asyncio.timeout(60):
                    ours = asyncio.create_task(_outcome(opener(link)))
                    return await ours, await _outcome(answered)
            finally:
                await link.close()
                await transport.close()

        return self.runner.run(main())

    def settled(self) -> None:
        """Wait until no parallel stream is held."""

        async def main() -> None:
            async with asyncio.timeout(20):
                while self.lanes[0]._waiting or self.lanes[0]._transport._inbound:
                    await asyncio.sleep(0.02)

        self.runner.run(main())

    @property
    def peer(self) -> PeerId:
        """The responder's id."""
        return self.nodes[0].peer_id


async def _outcome(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except (NetworkError, RemoteError) as error:
        return error


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    home = tmp_path_factory.mktemp("lanes")

    async def start() -> tuple[list[Node], list[ParallelStreams]]:
        nodes = [
            await Node.start(Identity.load_or_create(home / name), RUN, listen=["/ip4/127.0.0.1/tcp/0"], local=True)
            for name in ("first.key", "second.key")
        ]
        lanes = [ParallelStreams(node) for node in nodes]
        for each in lanes:
            await each.listen()
        return nodes, lanes

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        nodes, lanes = runner.run(start())
        yield Two(runner, nodes, lanes)
        for each in (*lanes, *nodes):
            runner.run(each.close())


@pytest.fixture
def two(pair: Two) -> Iterator[Two]:
    """Yield the pair without its measured rates; check that no parallel stream is left."""
    for lanes in pair.lanes:
        lanes._speeds.clear()
    yield pair
    pair.settled()


async def swap(link: ParallelLink) -> tuple[int, list[bytearray]]:
    """Swap payloads; return the number of streams and the payload that came."""
    others = await link.open_parallel(SIZE)
    async with asyncio.TaskGroup() as both:
        both.create_task(send_payload(link, PARTS, others))
        received = both.create_task(receive_payload(link, LENGTHS, others=others))
    return 1 + len(link._opened) + len(link._claimed), received.result()


def test_the_first_payload_goes_by_one_stream_and_the_next_by_all(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "PARALLEL_FROM_RATE", 1.0)  # a rate that even a busy machine reaches
    for expected in (1, STREAMS):
        assert two.converse(swap, swap) == ((expected, PARTS), (expected, PARTS))
        two.settled()


def test_a_slow_partner_gets_one_stream(two: Two) -> None:
    two.lanes[1].record_rate(two.peer, PARALLEL_FROM_RATE - 1)
    assert two.converse(swap, swap) == ((1, PARTS), (1, PARTS))


def test_a_partner_that_takes_no_more_streams_gets_the_payload_by_one(two: Two) -> None:
    """Check the limit per peer: two conversations get parallel streams, the third gets none and leaves none open."""
    two.lanes[1].record_rate(two.peer, 1e9)

    async def fill() -> list[list[StreamLink]]:
        return [await two.lanes[1].open(two.peer, bytes([number]) * 16) for number in range(2)]

    held = two.runner.run(fill())
    assert [len(links) for links in held] == [STREAMS - 1] * 2
    assert two.converse(swap, swap) == ((1, PARTS), (1, PARTS))
    for link in (link for links in held for link in links):
        two.runner.run(link.close())
    two.runner.run(forget(two.lanes[0]))


async def forget(lanes: ParallelStreams) -> None:
    """Drop the streams whose conversations will not come, as after ``UNCLAIMED_S``."""
    for lane in [lane for waiting in lanes._waiting.values() for lane in waiting.values()]:
        lane.over.set()


def test_a_small_payload_says_nothing_of_lanes(two: Two) -> None:
    async def small(link: ParallelLink) -> bool:
        return not await link.open_parallel(PARALLEL_FROM_BYTES - 1)

    assert two.converse(small, small) == (True, True)


def test_lanes_that_are_not_there_fail_the_payload(two: Two) -> None:
    async def boast(link: ParallelLink) -> None:
        await send_message(link, ["lanes", TOKEN])
        await link.receive()

    _, outcome = two.converse(boast, swap)
    assert isinstance(outcome, NetworkError)  # they may have expired
    assert str(outcome).endswith("announced 3 parallel streams, but 0 are open")


@pytest.mark.parametrize("words", [["lanes"], ["lanes", b"short"], ["lanes", 1], ["lane", TOKEN], [], [["lanes"]]])
def test_nonsense_about_lanes_is_an_offence(two: Two, words: list[Any]) -> None:
    async def babble(link: ParallelLink) -> None:
        await send_message(link, words)
        await link.receive()

    _, outcome = two.converse(babble, swap)
    assert isinstance(outcome, RemoteError)


@pytest.mark.parametrize(
    "words",
    [
        ["lane", TOKEN, 0],
        ["lane", TOKEN, STREAMS],
        ["lane", TOKEN, True],
        ["lane", b"", 1],
        ["lane", TOKEN],
        ["lanes", TOKEN],
    ],
)
def test_a_lane_that_says_nonsense_is_closed(two: Two, words: list[Any]) -> None:
    async def main() -> None:
        link = await P2PTransport(two.nodes[1], LANE_PROTOCOL).open(two.peer)
        await send_message(link, words)
        with pytest.raises(NetworkError):
            await link.receive()
        await link.close()

    two.runner.run(main())


def test_a_lane_that_comes_twice_is_closed_and_the_first_is_held(two: Two) -> None:
    async def main() -> None:
        transport = P2PTransport(two.nodes[1], LANE_PROTOCOL)
        first, second = [await transport.open(two.peer) for _ in range(2)]
        await send_message(first, ["lane", TOKEN, 1])
        assert await receive_message(first, "a lane", 64) == ["lane", TOKEN, 1]
        await send_message(second, ["lane", TOKEN, 1])
        with pytest.raises(NetworkError):
            await second.receive()
        assert list(two.lanes[0]._waiting[two.nodes[1].peer_id, TOKEN]) == [1]
        for each in (first, second):
            await each.close()
        await forget(two.lanes[0])

    two.runner.run(main())


def test_a_lane_without_a_conversation_is_given_up(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "UNCLAIMED_S", 2.0)  # all must be open before

    async def main() -> None:
        [first, *_] = await two.lanes[1].open(two.peer, TOKEN)
        with pytest.raises(NetworkError):
            await first.receive()

    two.runner.run(main())


class Echo:
    """A stream that requests to be a parallel one, and accepts every answer."""

    peer = PeerId("opener")

    def __init__(self, number: int) -> None:
        self._asked = [(FrameKind.MESSAGE, packed(["lane", TOKEN, number]))]

    async def receive(self) -> tuple[int, bytes]:
        return self._asked.pop()

    async def send(self, kind: int, body: bytes | memoryview) -> None:
        pass


def test_lanes_that_are_named_as_they_are_given_up_fail_the_payload_alone(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check streams that have expired but have not noticed: after a stall of 30 s, or timed by an adversarial peer."""
    monkeypatch.setattr(streams_module, "UNCLAIMED_S", 0.5)
    ours, outcomes = two.lanes[0], list[str]()

    def name() -> None:
        try:
            ours.claim(Echo.peer, TOKEN)
        except NetworkError as error:
            outcomes.append(str(error))

    async def main() -> None:
        lanes = [asyncio.create_task(ours._take(cast(StreamLink, Echo(number)))) for number in range(1, STREAMS)]
        while len(ours._waiting.get((Echo.peer, TOKEN), {})) < STREAMS - 1:
            await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.51, name)
        time.sleep(0.6)  # all timers are due at once
        given_up = await asyncio.gather(*lanes, return_exceptions=True)
        assert [type(each) for each in given_up] == [NetworkError] * (STREAMS - 1)

    two.runner.run(main())
    assert outcomes == ["opener announced 3 parallel streams, but 0 are open"]


def test_somebody_elses_token_claims_nothing(two: Two) -> None:
    """Check that a stream belongs to the peer that opened it, also if another peer learns its token."""

    async def main() -> None:
        links = await two.lanes[1].open(two.peer, TOKEN)
        with pytest.raises(NetworkError, match="0 are open"):
            two.lanes[0].claim(PeerId("somebody"), TOKEN)
        for each in links:
            await each.close()
        await forget(two.lanes[0])

    two.runner.run(main())


def test_lanes_are_claimed_once(two: Two) -> None:
    """Check that a second claim fails: two conversations would read the same stream."""

    async def main() -> None:
        links = await two.lanes[1].open(two.peer, TOKEN)
        claimed = two.lanes[0].claim(two.nodes[1].peer_id, TOKEN)
        with pytest.raises(NetworkError, match="0 are open"):
            two.lanes[0].claim(two.nodes[1].peer_id, TOKEN)
        for lane in claimed:
            lane.over.set()
        for each in links:
            await each.close()

    two.runner.run(main())


def test_who_waits_for_a_payload_to_begin_waits_for_its_first_chunk(two: Two) -> None:
    two.lanes[1].record_rate(two.peer, 1e9)

    async def late(link: ParallelLink) -> int:
        others = await link.open_parallel(SIZE)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await link.wait_for_frame()  # only our own streams are left to wait for
        await send_payload(link, PARTS, others)
        return 1 + len(link._opened)

    async def patient(link: ParallelLink) -> list[bytearray]:
        others = await link.open_parallel(SIZE)
        await link.wait_for_frame()
        return await receive_payload(link, LENGTHS, others=others)

    assert two.converse(late, patient) == (STREAMS, PARTS)


def test_who_ends_before_its_payload_had_not_begun_it(two: Two) -> None:
    two.lanes[1].record_rate(two.peer, 1e9)

    async def leaves(link: ParallelLink) -> None:
        await link.open_parallel(SIZE)
        await link.close()

    async def waits(link: ParallelLink) -> None:
        await link.open_parallel(SIZE)
        await link.wait_for_frame()

    _, outcome = two.converse(leaves, waits)
    assert isinstance(outcome, UnbegunError)


def test_a_lane_that_breaks_fails_the_payload_and_all_lanes_end(two: Two) -> None:
    two.lanes[1].record_rate(two.peer, 1e9)

    async def breaks(link: ParallelLink) -> None:
        others = await link.open_parallel(SIZE)
        await link._opened[1].close()
        await send_payload(link, PARTS, others)

    mine, theirs = two.converse(breaks, receive)
    assert isinstance(mine, NetworkError)
    assert isinstance(theirs, NetworkError)


def test_chunks_on_a_lane_out_of_turn_are_an_offence(two: Two) -> None:
    two.lanes[1].record_rate(two.peer, 1e9)

    async def stray(link: ParallelLink) -> None:
        await link.open_parallel(SIZE)
        for lane in link._opened:
            await lane.send(FrameKind.CHUNK, b"x")
        await link.send(FrameKind.CHUNK, b"x" * MAX_CHUNK_BYTES)
        await link.receive()

    _, outcome = two.converse(stray, receive)
    assert isinstance(outcome, RemoteError)


async def receive(link: ParallelLink) -> None:
    others = await link.open_parallel(SIZE)
    await receive_payload(link, LENGTHS, others=others)


def test_speeds_of_few_partners_are_remembered(two: Two) -> None:
    lanes = two.lanes[1]
    for number in range(streams_module.MAX_REMEMBERED + 1):
        lanes.record_rate(PeerId(f"{number}"), 1e9)
    assert len(lanes._speeds) == streams_module.MAX_REMEMBERED
    assert not lanes.is_fast(PeerId("0"))
    assert lanes.is_fast(PeerId("1"))
