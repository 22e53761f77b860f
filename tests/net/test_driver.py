"""A driven peer against a puppet that violates the wire format, and against partners that vanish or freeze.

Whatever the puppet does: training never stops, the fragments are released, the puppet's offence is remembered, and
an honest exchange works afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from random import Random

import pytest
import torch
from memory_network import MemoryLink, MemoryNetwork
from run_rules import run_rules
from virtual_time import run as run_in_virtual_time

from p2ptrain import codec
from p2ptrain.base.errors import MisfitError, NetworkError
from p2ptrain.base.ids import PROTOCOL_VERSION, PeerId, RunId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.framing import MAX_CHUNK_BYTES, FrameKind
from p2ptrain.host.learner import Learner
from p2ptrain.host.rules import LearnerRules
from p2ptrain.net.driver import FAREWELL_S, FINISHED_S, Driver, DriverEnvironment, at_once
from p2ptrain.net.payload import receive_payload, send_payload
from p2ptrain.net.rpc import send_message as ask
from p2ptrain.outer.fragments import slices
from p2ptrain.outer.step import OuterRule
from p2ptrain.swarm import Offer, Peer, PeerState, Presence, Terms
from p2ptrain.swarm.deadlines import PAYLOAD_BOUNDS_S
from p2ptrain.swarm.events import Commit, LeaveRequested
from p2ptrain.swarm.messages import Accept, Acknowledge, Decline, DeclineReason, WeightsReply, WeightsRequest
from p2ptrain.wire import decode_message, encode_message
from sim.learners import QuadraticTask

RUN = RunId("ab" * 32)
AMBER, BIRCH, CEDAR = PeerId("amber"), PeerId("birch"), PeerId("cedar")
P = 2048
TERMS = Terms(1, 4.0, 1.0, float("inf"), True, PeerState.TRAINING)
OFFER = Offer(RUN, PROTOCOL_VERSION, (0,), TERMS)


class Trainee:
    """A driven peer with its trainer."""

    def __init__(
        self, network: MemoryNetwork, peer: PeerId, codec_name: str = "fp32", work=at_once, inner_steps=4
    ) -> None:
        loop = asyncio.get_running_loop()
        random = torch.Generator().manual_seed(len(peer))
        task = QuadraticTask(torch.ones(P), torch.randn(P, generator=random), learning_rate=0.01)
        rules = LearnerRules(inner_steps, run_tokens=1e9, outer=OuterRule(0.7, 0.5))
        self.notebook = MemoryLog()
        self.learner = Learner(task, rules, slices(P, 1), codec.get(codec_name), self.notebook)
        swarm_rules = run_rules(
            self.learner.payloads.encoded_sizes((0,)),
            weights_bytes=4 * P,
            run_tokens=1e9,
            tokens_per_outer_step=4.0,
        )
        self.core = Peer(peer, swarm_rules, Random(1))
        self._begun = asyncio.Event()
        self.committed: list[Commit] = []
        environment = DriverEnvironment(
            transport=network.transport(peer),
            directory=network.directory(0.01, clock=loop.time),
            notebook=self.notebook,
            clock=loop.time,
            sign=lambda e: presence(peer, e.progress, PeerState(e.state), loop.time()),
            live_until=lambda record: record.issued_at + record.lifetime_s,
            begin_training=self._begun.set,
            work=work,
            committed=self.committed.append,
        )
        self.driver = Driver(self.core, self.learner, environment)

    async def live(self) -> None:
        training = asyncio.create_task(self._train())
        try:
            await self.driver.run()
        finally:
            training.cancel()

    async def _train(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            for event in self.learner.advance() if self._begun.is_set() else self.learner.settle():
                self.driver.handle(event)


def presence(peer: PeerId, progress: float, state: PeerState, now: float) -> Presence:
    return Presence(peer, RUN, ("/ip4/127.0.0.1/tcp/1",), state, 0, progress, True, "", now, lifetime_s=75.0)


async def send_message(link: MemoryLink, message) -> None:
    await link.send(FrameKind.MESSAGE, encode_message(message))


async def receive_message(link: MemoryLink):
    kind, body = await link.receive()
    assert kind == FrameKind.MESSAGE
    return decode_message(body)


Scene = Callable[[MemoryNetwork, Trainee], Awaitable[None]]


def play(scene: Scene) -> Trainee:
    """Start amber, play the scene, stop amber, and check everything else about amber."""
    actor: list[Trainee] = []

    async def stage() -> None:
        network = MemoryNetwork(latency=0.01)
        amber = Trainee(network, AMBER)
        actor.append(amber)
        living = asyncio.create_task(amber.live())
        await asyncio.sleep(1.0)
        before = amber.learner.tokens
        started = asyncio.get_running_loop().time()
        await scene(network, amber)
        elapsed = asyncio.get_running_loop().time() - started
        await asyncio.sleep(1.0)
        assert amber.learner.tokens - before >= int(elapsed / 0.1)  # training never waited
        assert not amber.core._exchanges.book.engaged()
        await honest_exchange(network)
        amber.driver.handle(LeaveRequested())
        await living

    run_in_virtual_time(stage())
    assert not actor[0].driver._sessions
    notes = [fields for kind, fields in actor[0].notebook.notes if kind == "exchanged"]
    committed = [(each.link.peer, each.sent_bytes, each.received_bytes) for each in actor[0].committed]
    assert committed == [(each["peer"], each["sent_bytes"], each["received_bytes"]) for each in notes]
    return actor[0]


async def honest_exchange(network: MemoryNetwork) -> None:
    """Exchange with amber as an honest stranger."""
    link = await network.transport(CEDAR).open(AMBER)
    await send_message(link, replace(OFFER, terms=replace(TERMS, progress=50.0)))
    accept = await receive_message(link)
    assert isinstance(accept, Accept)
    await send_payload(link, [torch.zeros(P).numpy().tobytes()])
    await receive_payload(link, [4 * P])
    await send_message(link, Acknowledge())
    assert isinstance(await receive_message(link), Acknowledge)
    await link.close()


async def until_closed(link: MemoryLink) -> None:
    """Read until amber closes; fail if it does not."""
    with contextlib.suppress(NetworkError):
        while True:
            await link.receive()


async def opened(network: MemoryNetwork) -> MemoryLink:
    """Return a link on which amber has accepted birch's offer."""
    link = await network.transport(BIRCH).open(AMBER)
    await send_message(link, OFFER)
    assert isinstance(await receive_message(link), Accept)
    return link


PAYLOAD = torch.zeros(P).numpy().tobytes()

BOTTOMLESS = b"\x91" * 1000 + b"\xc0"
"""A list nested a thousand deep: msgpack decodes it, and Python cannot even print it."""


async def wrong_digest(link: MemoryLink) -> None:
    await link.send(FrameKind.CHUNK, PAYLOAD)
    await link.send(FrameKind.PART, bytes(44))


async def too_short(link: MemoryLink) -> None:
    await send_payload(link, [PAYLOAD[:-4]])


async def too_long(link: MemoryLink) -> None:
    await send_payload(link, [PAYLOAD + bytes(4)])


async def endless(link: MemoryLink) -> None:
    for _ in range(100):
        await link.send(FrameKind.CHUNK, bytes(MAX_CHUNK_BYTES))


async def duplicated_chunk(link: MemoryLink) -> None:
    await link.send(FrameKind.CHUNK, PAYLOAD)
    await link.send(FrameKind.CHUNK, PAYLOAD)


async def message_instead(link: MemoryLink) -> None:
    await send_message(link, Acknowledge())


async def nan(link: MemoryLink) -> None:
    await send_payload(link, [torch.full((P,), float("nan")).numpy().tobytes()])


async def infinite(link: MemoryLink) -> None:
    await send_payload(link, [torch.full((P,), float("inf")).numpy().tobytes()])


async def enormous(link: MemoryLink) -> None:
    await send_payload(link, [torch.full((P,), 3e38).numpy().tobytes()])


async def garbage_message(link: MemoryLink) -> None:
    await link.send(FrameKind.MESSAGE, b"\xc1\xff\x00garbage")


async def bottomless_message(link: MemoryLink) -> None:
    """Send it in place of the acknowledgement."""
    await send_payload(link, [PAYLOAD])
    await link.send(FrameKind.MESSAGE, BOTTOMLESS)


@pytest.mark.parametrize(
    "misdeed",
    [
        wrong_digest,
        too_short,
        too_long,
        endless,
        duplicated_chunk,
        message_instead,
        nan,
        infinite,
        enormous,
        garbage_message,
        bottomless_message,
    ],
    ids=lambda misdeed: misdeed.__name__,
)
def test_a_payload_against_the_rules_is_an_offence(misdeed):
    async def scene(network: MemoryNetwork, amber: Trainee) -> None:
        link = await opened(network)
        await misdeed(link)
        await until_closed(link)

    amber = play(scene)
    assert amber.core.counters.offences == 1
    assert amber.core.counters.exchanges_failed == 1
    assert amber.core.counters.exchanges_ok == 1  # the honest one
    assert torch.isfinite(amber.learner.task.theta).all()


def test_a_payload_that_does_not_fit_is_no_reason_to_leave_its_peer_alone(monkeypatch):
    """Check that a payload of the wrong size causes no backoff: the next one's step widths are learnt from it."""

    def difference(*_):
        raise MisfitError("it does not fit")

    async def scene(network: MemoryNetwork, amber: Trainee) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(amber.learner.payloads, "difference", difference)
            link = await opened(network)
            await send_payload(link, [PAYLOAD])
            await until_closed(link)
        assert not amber.core._core.members.is_distrusted(BIRCH, asyncio.get_running_loop().time())
        await (await opened(network)).close()  # the next offer is answered at once

    amber = play(scene)
    assert amber.core.counters.exchanges_failed == 1
    assert amber.core.counters.offences == 0


def test_an_offer_that_is_taken_back_is_no_exchange_that_failed():
    """Check an initiator that prefers another partner, and closes its link in good order."""

    async def scene(network: MemoryNetwork, amber: Trainee) -> None:
        link = await opened(network)
        await link.close()

    amber = play(scene)
    assert amber.core.counters.offers_withdrawn == 1
    assert amber.core.counters.exchanges_failed == 0
    assert amber.core.counters.offences == 0


def test_whoever_answers_sends_no_payload_before_the_opener_does():
    """Check that the responder waits: its answer may take long, and the offer may have been taken back meanwhile."""

    async def scene(network: MemoryNetwork, amber: Trainee) -> None:
        link = await opened(network)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await link.receive()
        await link.send(FrameKind.CHUNK, PAYLOAD)
        async with asyncio.timeout(0.5):
            kind, body = await link.receive()
        assert (kind, len(body)) == (FrameKind.CHUNK, len(PAYLOAD))
        await link.close()

    assert play(scene).core.counters.offers_withdrawn == 0


@pytest.mark.parametrize("after_bytes", [0, 1000])
def test_a_partner_killed_while_it_sends_costs_the_exchange_only(after_bytes):
    async def scene(network: MemoryNetwork, amber: Trainee) -> None:
        link = await opened(network)
        if after_bytes:
            await link.send(FrameKind.CHUNK, PAYLOAD)
        network.cut(BIRCH)

    amber = play(scene)
    assert amber.core.counters.exchanges_failed == 1
    assert amber.core.counters.offences == 0


def test_a_clean_end_in_mid_payload_is_no_success():
    async def scene(network: MemoryNetwork, amber: Trainee) -> None:
        link = await opened(network)
        await link.send(FrameKind.CHUNK, PAYLOAD)
        await link.close()

    assert play(scene).core.counters.exchanges_failed == 1


def test_a_partner_frozen_after_accepting_is_given_up_at_the_deadline():
    async def scene(network: MemoryNetwork, amber: Trainee) -> None:
        link = await opened(network)
        await until_closed(link)

    amber = play(scene)
    assert amber.core.counters.exchanges_failed == 1
    failed = next(fields for kind, fields in amber.notebook.notes if kind == "failed")
    assert failed["seconds"] >= PAYLOAD_BOUNDS_S[0]  # of what both had agreed to; it tells this from unanswered calls


def test_a_partner_frozen_before_its_acknowledgement_may_be_a_half_commit():
    async def scene(network: MemoryNetwork, amber: Trainee) -> None:
        link = await opened(network)
        await send_payload(link, [PAYLOAD])
        await until_closed(link)

    assert play(scene).core.counters.half_commits == 1


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"\x90" * 60_000, BOTTOMLESS, b"\x92\x01" + BOTTOMLESS, b"\x92\x01\x90"],
    ids=["empty", "invalid", "nested", "bottomless", "bottomless fields", "fields missing"],
)
def test_garbage_as_a_first_message_ends_the_link(body):
    async def scene(network: MemoryNetwork, amber: Trainee) -> None:
        link = await network.transport(BIRCH).open(AMBER)
        await link.send(FrameKind.MESSAGE, body)
        await until_closed(link)

    play(scene)


def test_a_stranger_that_says_nothing_is_closed():
    async def scene(network: MemoryNetwork, amber: Trainee) -> None:
        links = [await network.transport(BIRCH).open(AMBER) for _ in range(20)]
        for link in links:
            await until_closed(link)

    play(scene)


@pytest.mark.parametrize(
    ("offer", "reason"),
    [
        (replace(OFFER, run=RunId("cd" * 32)), DeclineReason.OTHER_RUN),
        (replace(OFFER, protocol=PROTOCOL_VERSION + 1), DeclineReason.OTHER_PROTOCOL),
        (replace(OFFER, terms=replace(TERMS, progress=1e15)), DeclineReason.IMPLAUSIBLE_PROGRESS),
        (replace(OFFER, terms=replace(TERMS, state=PeerState.TRAINING), fragments=(3,)), DeclineReason.BUSY),
    ],
    ids=lambda value: str(getattr(value, "value", ""))[:24],
)
def test_partners_that_do_not_fit_hear_why(offer, reason):
    async def scene(network: MemoryNetwork, amber: Trainee) -> None:
        link = await network.transport(BIRCH).open(AMBER)
        await send_message(link, offer)
        answer = await receive_message(link)
        assert isinstance(answer, Decline)
        assert answer.reason == reason
        await until_closed(link)

    play(scene)


def test_a_newcomer_gets_our_weights_whole():
    async def scene(network: MemoryNetwork, amber: Trainee) -> None:
        await asyncio.sleep(20.0)  # until amber is further ahead than the bound
        link = await network.transport(BIRCH).open(AMBER)
        await send_message(link, WeightsRequest(RUN, PROTOCOL_VERSION, 0.0))
        reply = await receive_message(link)
        assert isinstance(reply, WeightsReply)
        await ask(link, ["piece", 0])
        parts = await receive_payload(link, [4 * P])
        assert torch.isfinite(torch.frombuffer(parts[0], dtype=torch.float32)).all()
        await ask(link, ["enough"])
        await until_closed(link)

    assert play(scene).core.counters.donations == 1


@pytest.mark.parametrize("kind", ["vanishes", "sends NaN", "sends too much"])
def test_a_donor_that_fails_leaves_a_newcomer_training(kind):
    """Check that amber, which asks birch for weights since birch claims to be far ahead, trains when it gets none."""
    asked = []

    async def serve(link) -> None:
        message = await receive_message(link)
        if not isinstance(message, WeightsRequest):
            return
        asked.append(message)
        await send_message(link, WeightsReply(100, 400.0))
        if kind == "sends NaN":
            await send_payload(link, [torch.full((P,), float("nan")).numpy().tobytes()])
        elif kind == "sends too much":
            await send_payload(link, [PAYLOAD * 2])
        await until_closed(link)

    async def scene(network: MemoryNetwork, amber: Trainee) -> None:
        transport = network.transport(BIRCH)
        await transport.listen(serve)
        now = asyncio.get_running_loop().time()
        directory = network.directory(0.0)
        await directory.announce(presence(BIRCH, 400.0, PeerState.TRAINING, now))
        await asyncio.sleep(60.0)
        network.records.pop(BIRCH)
        await transport.close()
        await asyncio.sleep(60.0)

    amber = play(scene)
    assert asked
    assert amber.core.counters.pulls == 0
    assert torch.isfinite(amber.learner.task.theta).all()


def test_a_dead_directory_does_not_hold_up_who_leaves():
    class Dead:
        async def announce(self, presence):
            await asyncio.sleep(1000.0)

        async def lookup(self):
            await asyncio.sleep(1000.0)

        async def finished(self):
            await asyncio.sleep(1000.0)

    async def stage() -> None:
        amber = Trainee(MemoryNetwork(latency=0.01), AMBER)
        amber.driver._environment = replace(amber.driver._environment, directory=Dead())
        living = asyncio.create_task(amber.driver.run())
        await asyncio.sleep(1.0)
        started = asyncio.get_running_loop().time()
        amber.driver.post(LeaveRequested())
        assert await living == "stopped by its owner"
        assert asyncio.get_running_loop().time() - started <= FAREWELL_S + 1.0

    run_in_virtual_time(stage())


def test_farewells_that_do_not_come_hold_up_no_lookup():
    class Half:
        size = 0

        async def announce(self, presence):
            """Do nothing: nobody asks."""

        async def lookup(self):
            return []

        async def finished(self):
            await asyncio.sleep(1000.0)

    async def stage() -> None:
        amber, seen = Trainee(MemoryNetwork(latency=0.01), AMBER), []
        amber.driver._environment = replace(amber.driver._environment, directory=Half())
        amber.driver._see = lambda records, **others: seen.append(asyncio.get_running_loop().time())
        living, started = asyncio.create_task(amber.driver.run()), asyncio.get_running_loop().time()
        await asyncio.sleep(FINISHED_S + 1.0)
        assert seen
        assert seen[0] - started <= FINISHED_S + 0.5
        amber.driver.post(LeaveRequested())
        await living

    run_in_virtual_time(stage())


def test_what_is_posted_before_the_driver_runs_is_not_lost():
    """Check events before the driver runs: the owner presses Ctrl+C only once."""

    async def stage() -> None:
        amber = Trainee(MemoryNetwork(latency=0.01), AMBER)
        amber.driver.post(LeaveRequested())
        async with asyncio.timeout(60.0):
            await amber.driver.run()

    run_in_virtual_time(stage())
