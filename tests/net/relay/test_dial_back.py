"""Dial-back requests: the reachability of a peer as others see it, over links in memory."""

from __future__ import annotations

import asyncio
from typing import cast

import msgpack
import pytest
import virtual_time
from memory_network import MemoryNetwork, MemoryTransport

from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId
from p2ptrain.framing import FrameKind
from p2ptrain.net.node import Node
from p2ptrain.net.relay.dial_back import (
    DialOutcome,
    ReachabilityReport,
    answer,
    ask_to_look,
    dial_limit,
    serve_reach,
)
from p2ptrain.net.throttle import Throttles
from p2ptrain.net.transport import P2PTransport
from p2ptrain.ports import Link

ASKER, ANSWERER, THIRD = (
    PeerId("12D3KooWEjsyWGBHNsPbf2CDHKsRoeEPPfkU1UBYGNuQiHnLb6sG"),
    PeerId("12D3KooWGr9NbThXK1Qf5LqAJAYxngoYbQXcisPpMSsW72V1tfbX"),
    PeerId("12D3KooWF3oCrpQYDKnfzk7tXj8DNU8ih3D8LA8SitytUWZetEQ9"),
)
PLACE = "/ip4/203.0.114.7/tcp/40000"
CIRCUIT = f"/ip4/8.8.8.8/tcp/1/p2p/{THIRD}/p2p-circuit"


class World:
    """A responder, and the peer that it finds when it dials."""

    def __init__(self, place: str = PLACE, found: PeerId | None = ASKER) -> None:
        self.dialed: list[tuple[str, int]] = []
        self.network = MemoryNetwork()
        self._place = place
        self._found = found
        self._allowances = dial_limit()

    async def start(self) -> MemoryTransport:
        await self.network.transport(ANSWERER).listen(self._serve)
        return self.network.transport(ASKER)

    async def _serve(self, link: Link) -> None:
        loop = asyncio.get_running_loop()
        await answer(link, self._place, self._allowances, self._dial, loop.time, lambda: 1000.0 + loop.time())

    async def _dial(self, host: str, port: int) -> PeerId:
        self.dialed.append((host, port))
        if self._found is None:
            raise NetworkError("nobody answers")
        return self._found


def looks(world: World, *ports: int) -> list[ReachabilityReport]:
    async def main() -> list[ReachabilityReport]:
        transport = await world.start()
        return [await ask_to_look(transport, ANSWERER, [], port) for port in ports]

    return virtual_time.run(main())


def test_only_the_host_that_the_question_came_from_is_dialed() -> None:
    world = World()
    [sight] = looks(world, 31337)
    assert sight == ReachabilityReport(PLACE, DialOutcome.YES, "", 1000.0)
    assert world.dialed == [("203.0.114.7", 31337)]


@pytest.mark.parametrize(
    ("world", "dialed", "why"),
    [
        (World(found=None), DialOutcome.NO, "nobody answers"),
        (World(found=THIRD), DialOutcome.NO, "another peer answers there: "),
        (World(place=CIRCUIT), DialOutcome.DECLINED, "through a relay"),
        (World(place=""), DialOutcome.DECLINED, "through a relay"),
    ],
    ids=["nobody", "somebody else", "relayed", "unknown"],
)
def test_what_the_answerer_makes_of_it(world: World, dialed: DialOutcome, why: str) -> None:
    [sight] = looks(world, 31337)
    assert (sight.dialed, why in sight.why) == (dialed, True)


def test_without_a_port_nothing_is_dialed() -> None:
    world = World()
    assert [each.dialed for each in looks(world, 0)] == [DialOutcome.DECLINED]
    assert world.dialed == []


def test_who_asks_too_often_is_declined() -> None:
    world = World()
    assert [each.dialed for each in looks(world, *[31337] * 6)] == [DialOutcome.YES] * 4 + [DialOutcome.DECLINED] * 2
    assert len(world.dialed) == 4


def test_dial_backs_are_counted_and_wait_under_the_owners_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that dial-back traffic counts for the month and the throttle: strangers cause it."""
    served: list[P2PTransport] = []

    async def listen(self: P2PTransport, handler: object) -> None:
        served.append(self)

    monkeypatch.setattr(P2PTransport, "listen", listen)
    rates = Throttles()
    transport = virtual_time.run(serve_reach(cast(Node, None), rates))
    assert served == [transport]
    assert transport._rates is rates


@pytest.mark.parametrize(
    "question",
    [
        [],
        ["look"],
        ["look", 70_000],
        ["look", -1],
        ["look", "31337"],
        ["give", 1000],
        ["shout", 1],
        {"look": 1},
        "look",
        ["look", 1, 2],
    ],
)
def test_other_questions_break_the_protocol(question: object) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        caught: asyncio.Future[Exception] = loop.create_future()

        async def serve(link: Link) -> None:
            try:
                await answer(link, PLACE, dial_limit())
            except RemoteError as error:
                caught.set_result(error)

        network = MemoryNetwork()
        await network.transport(ANSWERER).listen(serve)
        link = await network.transport(ASKER).open(ANSWERER)
        await link.send(FrameKind.MESSAGE, msgpack.packb(question))
        async with asyncio.timeout(5.0):
            assert isinstance(await caught, RemoteError)

    virtual_time.run(main())


@pytest.mark.parametrize(
    "reply",
    [
        [],
        ["", "maybe", "", 1.0],
        [1, "yes", "", 1.0],
        ["", "yes", "", 1],
        ["", "yes", "", float("nan")],
        ["", "yes", ""],
    ],
)
def test_other_answers_break_the_protocol(reply: object) -> None:
    async def main() -> None:
        async def serve(link: Link) -> None:
            await link.receive()
            await link.send(FrameKind.MESSAGE, msgpack.packb(reply))

        network = MemoryNetwork()
        await network.transport(ANSWERER).listen(serve)
        with pytest.raises(RemoteError):
            await ask_to_look(network.transport(ASKER), ANSWERER, [], 1)

    virtual_time.run(main())


def test_an_answers_words_are_short_and_its_place_is_an_address_or_nothing() -> None:
    async def main() -> ReachabilityReport:
        async def serve(link: Link) -> None:
            await link.receive()
            await link.send(FrameKind.MESSAGE, msgpack.packb(["\x1b[2J", "no", "\x1b" + "x" * 400, 1.0]))

        network = MemoryNetwork()
        await network.transport(ANSWERER).listen(serve)
        return await ask_to_look(network.transport(ASKER), ANSWERER, [], 1)

    sight = virtual_time.run(main())
    assert sight == ReachabilityReport("", DialOutcome.NO, "x" * 120, 1.0)


def test_another_peer_may_be_expected_at_the_same_place() -> None:
    """Check a second p2pd that asks for the first: still only the place that the request came from is dialed."""
    world = World(found=THIRD)

    async def main() -> None:
        transport = await world.start()
        report = await ask_to_look(transport, ANSWERER, [], 7, THIRD)
        assert report.dialed is DialOutcome.YES
        assert (await ask_to_look(transport, ANSWERER, [], 7)).dialed is DialOutcome.NO
        with pytest.raises((NetworkError, RemoteError)):
            await ask_to_look(transport, ANSWERER, [], 7, PeerId("nobody"))

    virtual_time.run(main())
    assert world.dialed == [("203.0.114.7", 7)] * 2
