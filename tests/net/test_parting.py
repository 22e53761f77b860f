"""Ends of links: a side that has finished says so, and waits for the other side's end until a deadline.

In virtual time, over pipes in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
import virtual_time

from p2ptrain.base.errors import NetworkError, UnbegunError
from p2ptrain.base.ids import PeerId
from p2ptrain.framing import HEADER_BYTES, FrameKind, encode_header
from p2ptrain.net.links import MAX_UNHEARD, WINDOW_BYTES, Limits, StreamLink
from p2ptrain.net.node import Node
from p2ptrain.net.p2pd.control import FarEnd
from p2ptrain.net.p2pd.streams import Stream
from p2ptrain.net.throttle import Throttles
from p2ptrain.net.transport import HANGING_S, MAX_HANGING, P2PTransport

LIMITS = Limits()
END = encode_header(FrameKind.END, 0)
THEM = PeerId("them")


class Wire:
    """One end of a stream (``streams.Stream``). Each end reads what the other writes, until either is closed."""

    def __init__(self) -> None:
        self.other: Wire = self
        self.came = bytearray()
        self.is_closing = False
        self.lacking = 0
        self._news = asyncio.Event()

    def tell(self) -> None:
        self._news.set()

    async def write(self, *buffers: bytes | memoryview) -> None:
        if self.is_closing:
            raise EOFError("closed")
        for buffer in buffers:
            self.other.came += buffer
        self.other.tell()

    async def read_exactly(self, length: int) -> bytes:
        buffer = bytearray(length)
        await self.read_into(memoryview(buffer))
        return bytes(buffer)

    async def read_into(self, buffer: memoryview) -> None:
        while len(self.came) < len(buffer):
            self.lacking = len(buffer) - len(self.came)
            if self.is_closing or self.other.is_closing:
                raise EOFError("the stream ended")
            self._news.clear()
            await self._news.wait()
        buffer[:] = self.came[: len(buffer)]
        del self.came[: len(buffer)]
        self.lacking = 0

    def abort(self) -> None:
        self.is_closing = True
        self.tell()
        self.other.tell()

    close = abort


def wires() -> tuple[Wire, Wire]:
    one, other = Wire(), Wire()
    one.other, other.other = other, one
    return one, other


class Daemon:
    """Fake daemon that counts the connections that it closes."""

    def __init__(self) -> None:
        self.disconnected: list[PeerId] = []

    async def disconnect(self, peer: PeerId) -> None:
        self.disconnected.append(peer)


class House:
    """A transport whose links lead to wires."""

    def __init__(self) -> None:
        self.daemon = Daemon()
        self.transport = P2PTransport(cast(Node, self))

    def link(self, wire: Wire) -> StreamLink:
        far_end = FarEnd(THEM, "/ip4/203.0.114.7/tcp/4001")
        return StreamLink(far_end, cast(Stream, wire), LIMITS, Throttles(), on_end=self.transport._on_link_end)


def enact(scene: Callable[[House], Awaitable[None]]) -> None:
    async def main() -> None:
        house = House()
        await scene(house)
        await house.transport.close()
        assert not house.transport._partings

    virtual_time.run(main())


def clock() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("ends", [StreamLink.close, StreamLink.give_up])
@pytest.mark.parametrize("said", [[], [FrameKind.MESSAGE], [FrameKind.MESSAGE, FrameKind.CHUNK]])
def test_an_end_says_whether_a_payload_had_begun(ends: Any, said: list[FrameKind]) -> None:
    async def scene(house: House) -> None:
        ours, theirs = map(house.link, wires())
        for kind in said:
            await theirs.send(kind, b"what they say")
            await ours.receive()
        if ends is StreamLink.close:
            await theirs.close()
        else:
            theirs.give_up()
        with pytest.raises(NetworkError) as caught:
            await ours.receive()
        is_in_order = ends is StreamLink.close
        assert isinstance(caught.value, UnbegunError) is (is_in_order and FrameKind.CHUNK not in said)

    enact(scene)


def test_a_frame_that_begins_is_received_as_ever() -> None:
    async def scene(house: House) -> None:
        ours, theirs = map(house.link, wires())
        waiting = asyncio.create_task(ours.wait_for_frame())
        await asyncio.sleep(LIMITS.idle_s / 2)
        assert not waiting.done()
        await theirs.send(FrameKind.MESSAGE, b"one")
        await waiting
        assert await ours.receive() == (FrameKind.MESSAGE, b"one")
        await theirs.send(FrameKind.CHUNK, b"two")
        await ours.wait_for_frame()
        buffer = bytearray(3)
        assert await ours.receive_into(memoryview(buffer)) == (FrameKind.CHUNK, 3)
        assert buffer == b"two"
        await theirs.close()
        with pytest.raises(NetworkError, match="ended"):
            await ours.wait_for_frame()

    enact(scene)


def test_a_frame_begins_with_its_header_and_who_ends_then_ends_amid_it() -> None:
    async def scene(house: House) -> None:
        near, far = wires()
        link = house.link(near)
        await far.write(encode_header(FrameKind.CHUNK, 3))
        await link.wait_for_frame()
        await far.write(b"two")
        assert await link.receive() == (FrameKind.CHUNK, b"two")
        await far.write(encode_header(FrameKind.CHUNK, 3))
        await link.wait_for_frame()
        await link.close()
        assert near.is_closing
        assert far.came == b""

    enact(scene)


def test_an_end_in_place_of_a_frame_says_that_none_had_begun() -> None:
    async def scene(house: House) -> None:
        ours, theirs = map(house.link, wires())
        await theirs.close()
        with pytest.raises(UnbegunError):
            await ours.wait_for_frame()

    enact(scene)


def test_nobody_waits_for_ever_for_a_frame_to_begin() -> None:
    async def scene(house: House) -> None:
        ours, _ = map(house.link, wires())
        began = clock()
        with pytest.raises(NetworkError, match="sent nothing for too long"):
            await ours.wait_for_frame()
        assert clock() - began == pytest.approx(LIMITS.idle_s)

    enact(scene)


def test_who_speaks_last_stays_until_the_other_has_heard() -> None:
    async def scene(house: House) -> None:
        near, far = wires()
        link, theirs = house.link(near), house.link(far)
        await link.send(FrameKind.MESSAGE, b"the last word")
        await link.close()
        await asyncio.sleep(LIMITS.parting_s / 2)
        assert not near.is_closing
        assert await theirs.receive() == (FrameKind.MESSAGE, b"the last word")
        with pytest.raises(NetworkError, match="ended"):
            await theirs.receive()
        assert far.is_closing
        await asyncio.sleep(0.1)
        assert near.is_closing
        assert house.daemon.disconnected == []

    enact(scene)


def test_two_who_end_at_once_wait_for_nobody() -> None:
    async def scene(house: House) -> None:
        near, far = wires()
        links = house.link(near), house.link(far)
        for link in links:
            await link.send(FrameKind.MESSAGE, b"a last word")
            await link.close()
        began = clock()
        await asyncio.gather(*house.transport._partings.values())
        assert clock() == began
        assert near.is_closing
        assert far.is_closing

    enact(scene)


@pytest.mark.parametrize(
    "unheard",
    [
        encode_header(FrameKind.CHUNK, 1000),
        encode_header(FrameKind.MESSAGE, 0) * (1 + MAX_UNHEARD),
        b"GET / HTTP/1.1",
    ],
    ids=["a payload", "a talker", "garbage"],
)
def test_who_goes_on_is_not_listened_to(unheard: bytes) -> None:
    async def scene(house: House) -> None:
        near, far = wires()
        await house.link(near).close()
        await far.write(unheard)
        await asyncio.sleep(0.1)
        assert near.is_closing

    enact(scene)


def test_small_words_that_crossed_our_end_are_dropped() -> None:
    async def scene(house: House) -> None:
        near, far = wires()
        await house.link(near).close()
        for _ in range(MAX_UNHEARD):
            await far.write(encode_header(FrameKind.MESSAGE, 5), b"hello")
        await asyncio.sleep(1.0)
        assert not near.is_closing
        assert bytes(far.came) == END
        await far.write(END)
        await asyncio.sleep(0.1)
        assert near.is_closing

    enact(scene)


@pytest.mark.parametrize("amid", ["a frame of ours", "a frame of theirs", "its header"])
def test_amid_a_frame_there_is_nothing_to_say(amid: str) -> None:
    async def scene(house: House) -> None:
        near, far = wires()
        link = house.link(near)
        if amid == "a frame of ours":
            link._rates.up.rate = 8192.0
            doing = asyncio.create_task(link.send(FrameKind.CHUNK, bytes(200_000)))
        else:
            said = encode_header(FrameKind.MESSAGE, 100) + b"not all of it"
            await far.write(said[: HEADER_BYTES - 2] if amid == "its header" else said)
            doing = asyncio.create_task(cast(Any, link.receive()))
        await asyncio.sleep(15.0)
        doing.cancel()
        await asyncio.wait([doing])
        sent = len(far.came)
        await link.close()
        await asyncio.sleep(0.1)
        assert near.is_closing
        assert len(far.came) == sent

    enact(scene)


def test_who_was_waiting_in_vain_for_a_frame_still_says_that_it_ends() -> None:
    async def scene(house: House) -> None:
        near, far = wires()
        link = house.link(near)
        waiting = asyncio.create_task(link.receive())
        await asyncio.sleep(1.0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await link.close()
        await asyncio.sleep(0.1)
        assert bytes(far.came) == END
        assert not near.is_closing

    enact(scene)


@pytest.mark.parametrize(
    ("size", "pause_s", "is_cut_off"),
    [(WINDOW_BYTES // 2, 0.0, False), (WINDOW_BYTES + 1, 0.0, True), (WINDOW_BYTES + 1, HANGING_S, False)],
    ids=["little", "much", "much, seldom"],
)
def test_a_peer_that_reads_nothing_loses_its_connection(size: int, pause_s: float, is_cut_off: bool) -> None:
    async def scene(house: House) -> None:
        for number in range(1, MAX_HANGING + 1):
            near, _ = wires()
            link = house.link(near)
            for start in range(0, size, 200_000):
                await link.send(FrameKind.CHUNK, bytes(min(200_000, size - start)))
            began = clock()
            await link.close()
            await asyncio.gather(*house.transport._partings.values())
            assert near.is_closing
            assert clock() - began == pytest.approx(LIMITS.parting_s)
            assert bool(house.daemon.disconnected) is (is_cut_off and number == MAX_HANGING)
            await asyncio.sleep(pause_s)
        assert len(house.transport._hanging) == (size > WINDOW_BYTES and not is_cut_off)

    enact(scene)


@pytest.mark.parametrize("ending", ["it dies", "we give up amid a frame", "its place is needed", "it ends"])
def test_nobody_else_is_said_to_read_nothing(ending: str) -> None:
    async def scene(house: House) -> None:
        for _ in range(2 * MAX_HANGING):
            near, far = wires()
            link = house.link(near)
            for _ in range(2):
                await link.send(FrameKind.CHUNK, bytes(200_000))
            if ending == "it dies":
                far.abort()
                with pytest.raises(NetworkError):
                    await link.receive()
            elif ending == "we give up amid a frame":
                link.give_up()
            elif ending == "its place is needed":
                asyncio.get_running_loop().call_later(0.05, link.hurry)
            else:
                await far.write(END)
            await link.close()
            await asyncio.sleep(0.1)
            assert near.is_closing
            link.hurry()  # too late, which is not an error
        assert house.daemon.disconnected == []
        assert not house.transport._hanging

    enact(scene)


def test_a_transport_that_closes_waits_a_moment_for_last_words_and_no_longer() -> None:
    async def main() -> None:
        house = House()
        (near, far), (deaf, _) = wires(), wires()
        for wire in (near, deaf):
            link = house.link(wire)
            await link.send(FrameKind.MESSAGE, b"farewell")
            await link.close()
        asyncio.get_running_loop().call_later(0.1, far.abort)
        began = clock()
        await house.transport.close()
        assert clock() - began < 1.0
        assert near.is_closing
        assert deaf.is_closing
        assert not house.transport._partings

    virtual_time.run(main())
