"""Two nodes that exchange weights, one of them with a plain torch program in a process of its own as its trainer."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from memory_network import MemoryNetwork
from virtual_time import run as run_in_virtual_time

from p2ptrain import codec
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.host.learner import Learner
from p2ptrain.host.rules import learner_rules, swarm_rules
from p2ptrain.manifest import OuterSection, SwarmSection
from p2ptrain.net.driver import Driver, DriverEnvironment, at_once
from p2ptrain.ports import InnerTask
from p2ptrain.swarm import Peer, PeerState, Presence
from peer.training import trainer_supervisor
from peer.training.plan import TrainerPlan
from peer.training.remote_task import RemoteTask
from sim.learners import QuadraticTask

pytestmark = pytest.mark.net

RUN = RunId("ab" * 32)
AMBER, BIRCH = PeerId("amber"), PeerId("birch")
H, UNITS, TOKENS = 4, 8, 2 * 4 * 8 * 60.0
LINE = torch.tensor([1.0] * 4 + [0.0] * 28)
"""What both learn: a weight of 1 for each of the plain trainer's four inputs, no bias, and padding."""
TRAINER = Path(__file__).parent.parent / "trainer" / "mortal_trainer.py"
OUTER = OuterSection(
    recipe="swarm",
    inner_steps=H,
    learning_rate=0.7,
    momentum=0.5,
    nesterov=True,
    topology="random",
    partners=1,
    weights="equal",
    exchanges_per_step=2,
    fragments=1,
    fragments_per_exchange=1,
)


SWARM = SwarmSection(catch_up_outer_steps=8, final_disagreement=0.02, final_gossip_s=60.0)


class Node:
    """A driven peer. The network's time stands still while its trainer makes a step, and while it lacks one after two
    exchanges without."""

    def __init__(
        self, network: MemoryNetwork, peer: PeerId, task: InnerTask, notebook: MemoryLog, is_ready: Callable[[], bool]
    ) -> None:
        loop, self.is_ready = asyncio.get_running_loop(), is_ready
        self.begun = asyncio.Event()
        pieces = [slice(0, len(task.theta))]
        self.learner = Learner(task, learner_rules(OUTER, TOKENS), pieces, codec.get("fp32"), notebook)
        rules = swarm_rules(RUN, OUTER, SWARM, self.learner.payloads, TOKENS, float(H * UNITS))
        self.core = Peer(peer, rules, Random(peer))
        self.exchanges_away = 0
        """Exchanges that succeeded while there was no trainer."""
        self.absences = 0
        environment = DriverEnvironment(
            transport=network.transport(peer),
            directory=network.directory(0.05, clock=loop.time),
            notebook=notebook,
            clock=loop.time,
            sign=lambda e: Presence(
                peer, RUN, (), PeerState(e.state), e.step, e.progress, e.settled, "", loop.time(), lifetime_s=75.0
            ),
            live_until=lambda record: record.issued_at + record.lifetime_s,
            begin_training=self.begun.set,
            work=at_once,
        )
        self.driver = Driver(self.core, self.learner, environment)

    async def live(self) -> None:
        training = asyncio.create_task(self._train())
        await self.driver.run()
        training.cancel()

    async def _train(self) -> None:
        while True:
            was_away, before = self.learner.is_away, self.core.counters.exchanges_ok
            await asyncio.sleep(0.1)
            self.exchanges_away += was_away * (self.core.counters.exchanges_ok - before)
            for event in self.learner.advance() if self.begun.is_set() else self.learner.settle():
                self.driver.handle(event)
            self.absences += self.learner.is_away and not was_away
            while self.learner.is_away and self.exchanges_away >= 2 * self.absences and not self.is_ready():
                time.sleep(0.02)


def test_a_plain_torch_program_trains_with_others_dies_and_comes_back(tmp_path, monkeypatch, in_own_process):
    monkeypatch.setattr(trainer_supervisor, "PAUSE_S", (0.01, 0.02))
    log, nodes = MemoryLog(), dict[PeerId, Node]()
    plan = TrainerPlan(
        home=str(tmp_path),
        peer=AMBER,
        devices=("cpu",),
        stages=1,
        threads=1,
        activation_bytes=0,
        most_sequences=1,
        store=str(tmp_path),
        index=None,
        weights=None,
        begins=True,
        tried_tokens=0,
        tried_s=0.0,
        compile="off",
        memory_bytes=None,
    )
    (tmp_path / "lives").mkdir()
    command = sys.executable, str(TRAINER), "kill before", "30", str(tmp_path / "lives"), "2"
    amber = RemoteTask(plan, UNITS, log, lambda: False, command)
    birch = QuadraticTask(torch.ones(32), LINE, learning_rate=0.05, noise=0.01, tokens_per_step=UNITS)

    async def everybody() -> None:
        network = MemoryNetwork(latency=lambda sender, receiver: 0.01)
        nodes[AMBER] = Node(network, AMBER, amber, log, lambda: amber.is_ready)
        nodes[BIRCH] = Node(network, BIRCH, birch, MemoryLog(), lambda: True)
        async with asyncio.TaskGroup() as tasks:
            for node in nodes.values():
                tasks.create_task(node.live())

    try:
        amber.start()
        run_in_virtual_time(everybody())
        assert amber.held_out_loss(1, 1.0, lambda read, wanted: True).value < 0.05
    finally:
        amber.close()
    deaths = [kind for kind in log.kinds() if kind in ("trainer died", "trainer returned", "discarded")]
    assert deaths == ["trainer died", "trainer returned"] * 2
    assert all(node.core.counters.exchanges_ok >= 20 for node in nodes.values())
    assert nodes[AMBER].exchanges_away >= 4
    for node in nodes.values():
        assert (node.learner.slow - LINE).norm() < 0.2 * LINE.norm()
