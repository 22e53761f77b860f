"""A newcomer's driver among donors: it adopts what another donor confirms, and what no donor contradicts."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from random import Random

import pytest
import torch
from memory_network import MemoryNetwork
from run_rules import run_rules
from virtual_time import run as run_in_virtual_time

from p2ptrain import codec
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.framing import FrameKind
from p2ptrain.host.learner import Learner
from p2ptrain.host.payloads import Payloads, Snapshot
from p2ptrain.host.rules import LearnerRules
from p2ptrain.net.driver import Driver, DriverEnvironment, at_once
from p2ptrain.net.payload import send_payload
from p2ptrain.net.rpc import receive_message
from p2ptrain.net.weight_download import Downloader
from p2ptrain.net.weight_server import WeightServer
from p2ptrain.outer.fragments import slices
from p2ptrain.outer.step import OuterRule
from p2ptrain.ports import Link
from p2ptrain.swarm import Peer, PeerState, Presence
from p2ptrain.swarm.messages import Decline, DeclineReason, WeightsReply, WeightsRequest
from p2ptrain.wire import decode_message, encode_message
from sim.learners import QuadraticTask

RUN = RunId("ab" * 32)
ME, DONORS = PeerId("newcomer"), tuple(map(PeerId, ("donor a", "donor b", "donor c")))
F, P = 4, 4096
COMMON = torch.randn(P, generator=torch.Generator().manual_seed(1))


def weights_of(peer: PeerId, lies: bool) -> torch.Tensor:
    noise = torch.randn(P, generator=torch.Generator().manual_seed(len(peer) + ord(peer[-1])))
    return -COMMON if lies else COMMON + 0.03 * noise


class Swarm:
    """Donors that give on request; some are adversarial, some break off after one fragment."""

    def __init__(self, liars: Collection[PeerId], breaking: Collection[PeerId]) -> None:
        self.links, self.weight_server = MemoryNetwork(0.01), MemoryNetwork(0.01)
        self.asked: list[PeerId] = []
        self._liars, self._breaking = liars, breaking

    async def begin(self) -> None:
        loop = asyncio.get_running_loop()
        for peer in DONORS:
            parts = tuple(weights_of(peer, peer in self._liars)[piece] for piece in slices(P, F))
            payloads = Payloads([P // F] * F, codec.get("fp32"), None)
            payloads.publish(Snapshot(100, parts, parts))
            copies = WeightServer(payloads, at_once, loop.time)
            await self.weight_server.transport(peer).listen(copies.answer)
            await self.links.transport(peer).listen(self._donor(peer, payloads, copies))
            await self.links.directory(0.0).announce(
                Presence(peer, RUN, ("/ip4/127.0.0.1/tcp/1",), PeerState.TRAINING, 100, 400.0, True, "", 1.0, 3600.0)
            )

    def _donor(self, peer: PeerId, payloads: Payloads, copies: WeightServer):
        async def serve(link: Link) -> None:
            _, body = await link.receive()
            if not isinstance(decode_message(body), WeightsRequest):
                decline = Decline(DeclineReason.BUSY, PeerState.TRAINING, 100, 400.0)
                await link.send(FrameKind.MESSAGE, encode_message(decline))
                return
            self.asked.append(peer)
            await link.send(FrameKind.MESSAGE, encode_message(WeightsReply(100, 400.0)))
            if peer in self._breaking:
                _, number = await receive_message(link, "copies", 64)
                await send_payload(link, [payloads.slow()[number].numpy().tobytes()])
            else:
                await copies.give(link)

        return serve


def joined(
    liars: Collection[PeerId], breaking: Collection[PeerId] = (), seed: int = 0
) -> tuple[Swarm, Learner, MemoryLog]:
    """Return a newcomer ten minutes after it met these donors."""
    notebook = MemoryLog()
    task = QuadraticTask(torch.ones(P), torch.zeros(P), learning_rate=0.01)
    task.theta.copy_(torch.full((P,), 0.5))
    learner = Learner(
        task,
        LearnerRules(inner_steps=4, run_tokens=1e9, outer=OuterRule(0.7, 0.5)),
        slices(P, F),
        codec.get("fp32"),
        notebook,
    )
    swarm = Swarm(liars, breaking)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        sizes = learner.payloads.weight_sizes()
        rules = run_rules(sizes, weights_bytes=sum(sizes), run_tokens=1e9, tokens_per_outer_step=4.0)
        downloader = Downloader(swarm.weight_server.transport(ME).open, sizes, at_once, notebook)
        environment = DriverEnvironment(
            transport=swarm.links.transport(ME),
            directory=swarm.links.directory(0.01),
            notebook=notebook,
            clock=loop.time,
            sign=lambda e: Presence(ME, RUN, (), PeerState(e.state), 0, e.progress, e.settled, "", loop.time(), 75.0),
            live_until=lambda record: record.issued_at + record.lifetime_s,
            begin_training=lambda: None,
            work=at_once,
            downloader=downloader,
        )
        await swarm.begin()
        driver = Driver(Peer(ME, rules, Random(seed)), learner, environment)
        running = asyncio.create_task(driver.run())
        for _ in range(600):
            await asyncio.sleep(1.0)
            for event in learner.settle():
                driver.handle(event)
        running.cancel()
        await asyncio.wait([running])

    run_in_virtual_time(main())
    return swarm, learner, notebook


def whose(weights: torch.Tensor) -> list[PeerId]:
    """Return the donor of each fragment, compared bitwise."""
    return [
        next(peer for peer in DONORS if torch.equal(weights[piece], weights_of(peer, lies=False)[piece]))
        for piece in slices(P, F)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_what_others_confirm_is_adopted_to_the_bit(seed: int) -> None:
    swarm, learner, notebook = joined(set(), seed=seed)
    assert set(whose(learner.slow)) == set(DONORS)  # all gave at the same time
    assert len(swarm.asked) == 1
    assert "caught up" in notebook.kinds()
    assert learner.progress == 400.0


@pytest.mark.parametrize("seed", range(6))
def test_whoever_lies_the_newcomer_ends_with_honest_weights(seed: int) -> None:
    liar = DONORS[seed % 3]
    swarm, learner, notebook = joined({liar}, seed=seed)
    assert liar not in whose(learner.slow)
    assert ("broke protocol" in notebook.kinds()) is (liar in swarm.asked)


def test_of_a_donor_that_breaks_off_the_rest_comes_from_others() -> None:
    swarm, learner, notebook = joined(set(), breaking=set(DONORS))
    assert len(swarm.asked) == 1
    assert set(whose(learner.slow)) >= set(DONORS) - set(swarm.asked)
    assert "caught up" in notebook.kinds()
