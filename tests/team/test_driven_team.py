"""A team behind the network's driver: its swarm ends bitwise as one of plain peers does."""

from __future__ import annotations

import asyncio
import contextlib
from random import Random

import pytest
import torch
from memory_network import MemoryNetwork
from run_rules import run_rules
from test_driver import AMBER, BIRCH, presence
from test_team_payloads import FRAGMENTS
from test_trainer import ThreadTeam, learner, quadratic
from virtual_time import run as run_in_virtual_time

from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.net.driver import Driver, DriverEnvironment, at_once
from p2ptrain.swarm import Peer, PeerState
from p2ptrain.team.shard import LocalShard

CODEC = "modular4"
LIFE_S = 20.0


class DrivenPeer:
    """A peer of a swarm in virtual time, with a learner or a team's leader."""

    def __init__(self, network, peer, learner):
        loop = asyncio.get_running_loop()
        self.learner = learner
        self.notebook = MemoryLog()
        rules = run_rules(
            learner.payloads.encoded_sizes(range(len(FRAGMENTS))),
            weights_bytes=sum(learner.payloads.weight_sizes()),
            run_tokens=1e9,
            tokens_per_outer_step=4.0,
            exchanges_per_step=2,
            due_in_phase=True,
            fragments_per_exchange=3,
        )
        self._begun = asyncio.Event()
        environment = DriverEnvironment(
            transport=network.transport(peer),
            directory=network.directory(0.01, clock=loop.time),
            notebook=self.notebook,
            clock=loop.time,
            sign=lambda e: presence(peer, e.progress, PeerState(e.state), loop.time()),
            live_until=lambda record: record.issued_at + record.lifetime_s,
            begin_training=self._begun.set,
            work=at_once,
        )
        self.driver = Driver(Peer(peer, rules, Random(str(peer))), learner, environment)

    async def live(self):
        training = asyncio.create_task(self._train())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LIFE_S):
                await self.driver.run()
        training.cancel()
        await asyncio.wait([training])

    async def _train(self):
        while True:
            await asyncio.sleep(0.1)
            for event in self.learner.advance() if self._begun.is_set() else self.learner.settle():
                self.driver.handle(event)


def lived(*learners):
    """Return the notes of two peers that lived for a while."""

    async def live():
        network = MemoryNetwork(latency=0.01)
        peers = [DrivenPeer(network, name, each) for name, each in zip((AMBER, BIRCH), learners, strict=True)]
        await asyncio.gather(*(peer.live() for peer in peers))
        return [peer.notebook.notes for peer in peers]

    return run_in_virtual_time(live())


def test_a_team_in_a_swarm_is_like_a_plain_peer():
    plain = [learner(quadratic(seed=seed), FRAGMENTS, name=CODEC) for seed in (1, 2)]
    expected = lived(*plain)
    amber, team = learner(quadratic(seed=1), FRAGMENTS, name=CODEC), ThreadTeam(2, CODEC)
    try:
        found = lived(amber, team.leader)
    finally:
        team.close()
    exchanged = [fields for kind, fields in expected[1] if kind == "exchanged"]
    assert len(exchanged) > 10
    assert found == expected
    assert torch.equal(amber.slow, plain[0].slow)
    assert torch.equal(team.slow(), plain[1].slow)


@pytest.mark.parametrize("behind", ["team", "plain peer"])
def test_a_newcomer_takes_the_weights_of_a_team_and_a_team_those_of_a_peer(behind, monkeypatch):
    """Check that pieces go from owner to owner: the leader never has more than a piece of another rank's weights."""
    ahead, seeds = 0 if behind == "team" else 1, (1, 2)
    plain = [learner(quadratic(seed=seed), FRAGMENTS, name=CODEC) for seed in seeds]
    mixed = learner(quadratic(seed=1), FRAGMENTS, name=CODEC), ThreadTeam(2, CODEC)
    for each in (plain[ahead], (mixed[0], mixed[1].leader)[ahead]):
        for _ in range(400):
            each.advance()
    stored, store = [], LocalShard.store
    monkeypatch.setattr(LocalShard, "store", lambda *arguments: stored.append(arguments) or store(*arguments))
    try:
        expected = lived(*plain)
        found = lived(mixed[0], mixed[1].leader)
    finally:
        mixed[1].close()
    assert found == expected
    assert "took weights" in [kind for kind, _ in expected[1 - ahead]]
    assert torch.equal(mixed[0].slow, plain[0].slow)
    assert torch.equal(mixed[1].slow(), plain[1].slow)
    if behind == "team":
        assert {shard for shard, *_ in stored} == set(mixed[1].shards)
