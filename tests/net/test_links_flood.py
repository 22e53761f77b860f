"""Inbound limits: floods are rejected before a byte is read, other peers are not, and open streams block nobody."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, cast

import base58
import pytest
import virtual_time
from hivemind.proto import p2pd_pb2

from p2ptrain.base.errors import RemoteError
from p2ptrain.base.ids import PeerId
from p2ptrain.framing import FrameKind, encode_header
from p2ptrain.net import address
from p2ptrain.net.links import Limits, StreamLink, origin_of
from p2ptrain.net.node import Node
from p2ptrain.net.p2pd.control import FarEnd
from p2ptrain.net.p2pd.streams import Stream
from p2ptrain.net.rate_limiter import PER_ORIGIN, PER_PEER
from p2ptrain.net.relay import circuit_v2
from p2ptrain.net.throttle import Throttles
from p2ptrain.net.transport import MAX_NAMELESS, P2PTransport

HERE, THERE, ELSEWHERE = (f"/ip4/203.0.114.{host}/tcp/4001" for host in (7, 8, 9))
LIMITS = Limits()
RELAY = "12D3KooWGr9NbThXK1Qf5LqAJAYxngoYbQXcisPpMSsW72V1tfbX"


def link_of(transport: P2PTransport, who: PeerId, place: str = HERE) -> StreamLink:
    return StreamLink(FarEnd(who, place), cast(Stream, None), transport._limits, transport._rates)


def test_a_flood_of_short_conversations_is_turned_down_and_one_caller_is_not() -> None:
    async def main() -> dict[str, int]:
        transport = P2PTransport(cast(Node, None), limits=Limits(inbound=1000))
        served = {"liar": 0, "amber": 0}

        async def call(who: str) -> None:
            """Admit a stream as ``_serve`` does once it knows the peer."""
            task = cast("asyncio.Task[Any]", asyncio.current_task())
            transport._inbound[task] = None
            try:
                served[who] += transport._admit(link_of(transport, PeerId(who)))
            finally:
                del transport._inbound[task]

        for second in range(60):
            for who, times in (("liar", 100), ("amber", 1)):
                for _ in range(times):
                    await asyncio.create_task(call(who))
            await asyncio.sleep(1.0)
            assert len(transport._inbound) == 0, second
        return served

    served = virtual_time.run(main())
    assert served["amber"] == 60
    assert served["liar"] <= PER_PEER.burst + 60 * PER_PEER.per_s


def test_short_conversations_under_many_names_of_one_address_do_not_use_up_everybodys() -> None:
    async def main() -> dict[str, int]:
        transport = P2PTransport(cast(Node, None), limits=Limits(inbound=1000))
        served = {HERE: 0, THERE: 0}

        async def call(who: str, place: str) -> None:
            served[place] += transport._admit(link_of(transport, PeerId(who), place))

        for _ in range(60):
            for name in range(50):
                for _ in range(8):
                    await asyncio.create_task(call(f"liar {name}", HERE))
            await asyncio.create_task(call("amber", THERE))
            transport._inbound.clear()
            await asyncio.sleep(1.0)
        return served

    served = virtual_time.run(main())
    assert served[THERE] == 60
    assert served[HERE] <= PER_ORIGIN.burst + 60 * PER_ORIGIN.per_s


def admitted(transport: P2PTransport, times: int) -> int:
    """Return how many of these simultaneous streams of one peer are admitted."""

    async def main() -> int:
        async def call() -> bool:
            task = cast("asyncio.Task[Any]", asyncio.current_task())
            transport._inbound[task] = None
            try:
                return transport._admit(link_of(transport, PeerId("amber")))
            finally:
                del transport._inbound[task]

        return sum([await asyncio.create_task(call()) for _ in range(times)])

    return virtual_time.run(main())


@pytest.mark.parametrize("serves_others", [True, False])
def test_whether_the_owner_gives_turns_nobody_down_here(serves_others: bool) -> None:
    """Check that the owner's setting affects no admission: services decide, and exchanges are always served."""
    rates = Throttles()
    rates.gives = False
    transport = P2PTransport(cast(Node, None), limits=Limits(inbound=1000), rates=rates, serves_others=serves_others)
    assert admitted(transport, 100) == PER_PEER.burst


# --- streams that stay ------------------------------------------------------------------------------------------------


class Wire:
    """An inbound stream: its initiator as p2pd names it, what it sent, and then silence."""

    def __init__(self, who: int, place: str, said: bytes = b"") -> None:
        peer = b"\x00\x24\x08\x01\x12\x20" + who.to_bytes(32, "big")
        info = p2pd_pb2.StreamInfo(peer=peer, addr=address.packed(place), proto="/test")
        self._unread = circuit_v2.framed(info.SerializeToString()) + said
        self.is_open = True
        self.lacking = 0

    @property
    def is_closing(self) -> bool:
        return not self.is_open

    async def write(self, *buffers: bytes | memoryview) -> None:
        """Drop the data: nobody reads it."""

    async def read_exactly(self, length: int) -> bytes:
        if len(self._unread) < length:
            await asyncio.Event().wait()
        taken, self._unread = self._unread[:length], self._unread[length:]
        return taken

    async def read_into(self, buffer: memoryview) -> None:
        self.lacking = len(buffer)
        buffer[:] = await self.read_exactly(len(buffer))
        self.lacking = 0

    def close(self) -> None:
        self.is_open = False

    abort = close


HELLO = encode_header(FrameKind.MESSAGE, 5) + b"hello"
CUT_OFF = HELLO[:-1]
QUERY = encode_header(FrameKind.MESSAGE, 5) + b"a bit"


class House:
    """A transport, and its inbound streams.

    After "hello" the handler waits forever; after a query it returns.
    """

    def __init__(self) -> None:
        self.streams = Counter[PeerId]()
        self.transport = P2PTransport(cast(Node, self))
        self.transport._handler = self._hear
        self._names = 100

    async def _hear(self, link: StreamLink) -> None:
        _, body = await link.receive()
        if body == b"hello":
            await asyncio.Event().wait()

    def forget_stream(self, peer: PeerId) -> None:
        self.streams[peer] -= 1

    async def call(self, *wires: Wire) -> list[Wire]:
        for wire in wires:
            self.transport._take(cast(Stream, wire))
        for _ in range(12):
            await asyncio.sleep(0)
        return list(wires)

    async def crowd(self, names: int, place: str, said: bytes = b"") -> list[Wire]:
        """Open four streams for each of these new names."""
        self._names, first = self._names + names, self._names
        who = [first + name for name in range(names) for _ in range(LIMITS.inbound_per_peer)]
        return await self.call(*(Wire(each, place, said) for each in who))


def open_of(wires: list[Wire]) -> int:
    return sum(wire.is_open for wire in wires)


def enact(scene: Callable[[House], Awaitable[None]]) -> None:
    async def main() -> None:
        house = House()
        await scene(house)
        await house.transport.close()
        assert not house.transport._inbound
        assert set(house.streams.values()) <= {0}

    virtual_time.run(main())


@pytest.mark.parametrize("said", [b"", CUT_OFF, HELLO], ids=["silent", "half a frame", "a frame"])
def test_many_names_of_one_address_have_half_of_the_places(said: bytes) -> None:
    async def scene(house: House) -> None:
        crowd = await house.crowd(8, HERE, said)
        assert open_of(crowd) == LIMITS.inbound_per_origin == LIMITS.inbound // 2
        others = await house.crowd(4, THERE, HELLO)
        assert open_of(others) == LIMITS.inbound // 2
        assert open_of(crowd) == LIMITS.inbound // 2

    enact(scene)


@pytest.mark.parametrize("said", [b"", CUT_OFF, QUERY], ids=["silent", "half a frame", "through, and not ended"])
@pytest.mark.parametrize("caller", [HERE, ELSEWHERE], ids=["of their address", "of another"])
def test_streams_that_say_nothing_make_room_and_others_do_not(said: bytes, caller: str) -> None:
    async def scene(house: House) -> None:
        talkers = await house.call(*(Wire(1, HERE, HELLO) for _ in range(3)))
        shy = await house.call(Wire(2, ELSEWHERE))
        silent = await house.crowd(8, HERE, said) + await house.crowd(8, THERE, said)
        assert open_of([*talkers, *shy, *silent]) == LIMITS.inbound
        newcomers = await house.call(*(Wire(3, caller, HELLO) for _ in range(4)))
        assert open_of(talkers) + open_of(shy) + open_of(newcomers) == 8

    enact(scene)


def test_who_is_through_with_some_streams_has_others_though_they_have_not_ended() -> None:
    async def scene(house: House) -> None:
        through = await house.call(*(Wire(1, HERE, QUERY) for _ in range(LIMITS.inbound_per_peer)))
        talking = await house.call(*(Wire(1, HERE, HELLO) for _ in range(LIMITS.inbound_per_peer + 1)))
        assert (open_of(through), open_of(talking)) == (0, LIMITS.inbound_per_peer)

    enact(scene)


def test_a_handler_that_fails_leaves_no_link_open() -> None:
    async def scene(house: House) -> None:
        async def fail(link: StreamLink) -> None:
            links.append(link)
            raise RemoteError("that was none")

        links: list[StreamLink] = []
        house.transport._handler = fail
        [wire] = await house.call(Wire(1, HERE, HELLO))
        assert not wire.is_open
        assert links[0]._closed
        assert not house.transport._inbound

    enact(scene)


def test_where_all_have_spoken_the_next_is_turned_down() -> None:
    async def scene(house: House) -> None:
        talkers = await house.crowd(4, HERE, HELLO) + await house.crowd(4, THERE, HELLO)
        assert open_of(talkers) == LIMITS.inbound
        assert open_of(await house.call(Wire(1, ELSEWHERE, HELLO))) == 0

    enact(scene)


def test_of_silent_ones_the_oldest_of_the_largest_crowd_ends() -> None:
    async def scene(house: House) -> None:
        shy = await house.call(Wire(1, ELSEWHERE))
        here, there = await house.crowd(4, HERE), await house.crowd(4, THERE)
        assert [wire.is_open for wire in (*shy, *here[:2])] == [True, False, True]
        assert open_of(there) == LIMITS.inbound_per_origin
        await house.call(Wire(2, ELSEWHERE), Wire(2, ELSEWHERE))
        assert [wire.is_open for wire in (*shy, *here[:3])] == [True, False, False, True]
        assert [wire.is_open for wire in there[:2]] == [False, True]

    enact(scene)


@pytest.mark.parametrize("place", ["/ip4/127.0.0.1/tcp/4001", "/ip6/::1/tcp/4001"])
def test_peers_on_this_machine_have_all_places(place: str) -> None:
    async def scene(house: House) -> None:
        assert open_of(await house.crowd(8, place, HELLO)) == LIMITS.inbound

    enact(scene)


def test_all_who_come_through_one_relay_have_half_of_the_places() -> None:
    """Check all peers behind one relay: our p2pd shows its address as theirs, also of a relay on this machine."""

    async def scene(house: House) -> None:
        relay = base58.b58encode(b"\x00\x24\x08\x01\x12\x20" + bytes(32)).decode()
        for place in (HERE, "/ip4/127.0.0.1/tcp/4001"):
            crowd = await house.crowd(8, f"{place}/p2p/{relay}/p2p-circuit", HELLO)
            assert open_of(crowd) == LIMITS.inbound_per_origin

    enact(scene)


def test_streams_of_which_nobody_knows_yet_whose_they_are_are_bounded() -> None:
    async def scene(house: House) -> None:
        wires = [Wire(1, HERE) for _ in range(1000)]
        for wire in wires:
            wire._unread = b""
        assert open_of(await house.call(*wires)) == LIMITS.inbound + MAX_NAMELESS
        await asyncio.sleep(LIMITS.idle_s + 1.0)
        assert not house.transport._inbound

    enact(scene)


@pytest.mark.parametrize(
    ("place", "counts_for"),
    [
        ("/ip4/8.8.8.8/tcp/5", "8.8.8.8"),
        ("/ip6/2001:db8::1/tcp/5", "2001:db8::/64"),
        (
            "/ip4/8.8.8.8/tcp/5/p2p/12D3KooWGr9NbThXK1Qf5LqAJAYxngoYbQXcisPpMSsW72V1tfbX/p2p-circuit",
            "8.8.8.8",
        ),  # which a relay led to us
        ("/ip4/127.0.0.1/tcp/5", ""),  # a swarm on one machine
    ],
)
def test_a_link_counts_for_where_it_comes_from(place: str, counts_for: str) -> None:
    link = StreamLink(FarEnd(PeerId("amber"), place), cast(Stream, None), LIMITS, Throttles())
    assert origin_of(link) == counts_for
