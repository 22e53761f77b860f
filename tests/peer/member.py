"""A peer that its owner can pause: a real core and learner over the network in memory, for virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from memory_network import MemoryNetwork, MemoryTransport
from run_rules import run_rules

from p2ptrain import codec
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.host.learner import Learner
from p2ptrain.host.loop import Signals
from p2ptrain.host.rules import LearnerRules
from p2ptrain.net.driver import DriverEnvironment, at_once
from p2ptrain.outer.fragments import slices
from p2ptrain.outer.step import OuterRule
from p2ptrain.ports import Transport
from p2ptrain.recipes import RECIPES
from p2ptrain.swarm import Counters, Peer, PeerState, Presence
from p2ptrain.swarm.events import Applied, LeaveRequested
from peer.participation import Participation, TrainerControl
from sim.learners import QuadraticTask

RUN = RunId("ab" * 32)
P = 64
H = 4
ENDLESS = 1e9


class Member:
    """A peer that its owner can pause."""

    def __init__(
        self,
        network: MemoryNetwork,
        name: str,
        tokens: float = ENDLESS,
        recipe: str = "ad_psgd",
        parameters: int = P,
        wrap: Callable[[MemoryTransport], Transport] = lambda transport: transport,
        leaves: bool = False,
    ) -> None:
        """``leaves``: leave by itself after the final gossip, as a peer does once it has read its final loss."""
        loop = asyncio.get_running_loop()
        self.peer = PeerId(name)
        random = torch.Generator().manual_seed(len(name))
        task = QuadraticTask(torch.ones(parameters), torch.randn(parameters, generator=random), learning_rate=0.01)
        learned = LearnerRules(inner_steps=H, run_tokens=tokens, outer=OuterRule(0.7, 0.5), recipe=RECIPES[recipe])
        self.notebook = MemoryLog()
        self.learner = Learner(task, learned, slices(parameters, 1), codec.get("fp32"), self.notebook)
        rules = run_rules(
            self.learner.payloads.encoded_sizes((0,)),
            weights_bytes=4 * parameters,
            run_tokens=tokens,
            tokens_per_outer_step=float(H),
            begins_at_zero=True,
            between=(0,) if RECIPES[recipe].blocks else (),
            free=() if RECIPES[recipe].blocks else (0,),
        )
        self.cores: list[Peer] = []
        self.pace_s = 0.1
        self._leaves = leaves
        self.delivered = self.applied = 0
        self.left_over: list[int] = []
        """Number of displacements that were not applied yet when each core was created."""
        deliver = self.learner.inbox.deliver

        def counting(*arguments: Any) -> None:
            self.delivered += 1
            deliver(*arguments)

        self.learner.inbox.deliver = counting  # type: ignore[method-assign]

        def new_core() -> Peer:
            self.left_over.append(self.delivered - self.applied)
            made = Peer(self.peer, rules, Random(len(self.cores)), self.learner.step, self.learner.progress)
            self.cores.append(made)
            return made

        self.signals = Signals()
        environment = DriverEnvironment(
            transport=wrap(network.transport(self.peer)),
            directory=network.directory(0.01, clock=loop.time),
            notebook=self.notebook,
            clock=loop.time,
            sign=lambda e: self._presence(e.step, e.progress, PeerState(e.state), loop.time()),
            live_until=lambda record: record.issued_at + record.lifetime_s,
            begin_training=lambda: None,
            work=at_once,
        )
        self.participation = Participation(
            self.learner, new_core, environment, TrainerControl(self.signals, self.learner.inbox.wake)
        )

    def _presence(self, step: int, progress: float, state: PeerState, now: float) -> Presence:
        return Presence(
            self.peer, RUN, ("/ip4/127.0.0.1/tcp/1",), state, step, progress, True, "", now, lifetime_s=75.0
        )

    async def live(self) -> str:
        training = asyncio.create_task(self._train())
        try:
            return await self.participation.live()
        finally:
            training.cancel()

    async def _train(self) -> None:
        while True:
            await asyncio.sleep(self.pace_s)
            idle = self.learner.is_waiting or self.learner.ended or not self.signals.begin.is_set()
            for event in self.learner.settle() if idle else self.learner.advance():
                self.applied += isinstance(event, Applied)
                self.participation.post(event)
            if self._leaves and self.signals.over.is_set():
                self._leaves = False
                self.participation.post(LeaveRequested(gives_on=True))
            self.participation.turned()

    def counted(self) -> Counters:
        return self.participation.counters()

    def heard(self, kind: str) -> int:
        return self.notebook.kinds().count(kind)


async def until(is_so: Callable[[], object], patience_s: float = 300.0, looks_s: float = 0.1) -> None:
    async with asyncio.timeout(patience_s):
        while not is_so():
            await asyncio.sleep(looks_s)


async def more_exchanges(member: Member, more: int, patience_s: float = 300.0) -> None:
    before = member.counted().exchanges_ok
    await until(lambda: member.counted().exchanges_ok >= before + more, patience_s)
