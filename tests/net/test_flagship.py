"""The flagship test: with the same seed, the simulator and the asyncio driver end bitwise equal.

The order of events at one instant is each shell's own. Cores, learner and latencies are the same; a heap on one
side, tasks, links and frames under a virtual-time loop on the other. If they differ, one shell decides something
that belongs to the core.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from random import Random

import pytest
import torch
from memory_network import MemoryNetwork
from stored import stored
from virtual_time import run as run_in_virtual_time

from p2ptrain import codec
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.host.learner import Learner
from p2ptrain.host.rules import learner_rules, swarm_rules
from p2ptrain.manifest import OuterSection, SwarmSection
from p2ptrain.net.driver import Driver, DriverEnvironment, at_once
from p2ptrain.outer.fragments import slices
from p2ptrain.recipes import RECIPES
from p2ptrain.swarm import Peer, PeerState, Presence
from sim.learners import QuadraticTask
from sim.lockstep.lockstep import Lockstep, LockstepRules
from sim.network import SimulatedNetwork
from sim.peer import SimulatedPeer
from sim.world import World

RUN = RunId("ab" * 32)
PEERS = [PeerId(name) for name in ("amber", "birch", "cedar", "dune")]
P, H, TOKENS = 5000, 4, 4 * 140.0
LOOKUP_S = 0.05


def step_seconds(peer: PeerId):
    random = Random(f"pace of {peer}")
    return lambda: 0.1 * random.uniform(0.8, 1.2)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latency (seconds) of each new link from one peer to another, in the order of their opening.

    Each has its own, so that messages that a peer sends over two links at one instant arrive one after the other: the
    simulator would deliver them in sending order, the driver an offer last.
    """

    draws: dict[tuple[PeerId, PeerId], Random] = field(
        default_factory=lambda: {(a, b): Random(f"latencies of {a} and {b}") for a in PEERS for b in PEERS if a != b}
    )

    def __call__(self, sender: PeerId, receiver: PeerId) -> float:
        return self.draws[sender, receiver].uniform(0.005, 0.06)


@dataclass(frozen=True)
class Case:
    """One run of the four peers."""

    recipe: str = "swarm"
    codec: str = "fp32"
    fragments: int = 1
    seed: int = 0
    topology: str = "random"
    partners: int = 1
    gradients: str = "fp32"
    adaptive: bool = False
    final_gossip_s: float = 60.0

    @property
    def outer(self) -> OuterSection:
        recipe = RECIPES[self.recipe]
        return OuterSection(
            recipe=self.recipe,
            inner_steps=1 if recipe.every_step else H,
            learning_rate=0.7,
            momentum=0.5,
            nesterov=True,
            topology=self.topology,
            partners=self.partners,
            weights="equal",
            exchanges_per_step=2 if recipe.is_random else 0,
            fragments=self.fragments,
            fragments_per_exchange=max(self.fragments - 1, 1),
        )


@dataclass(frozen=True, slots=True)
class Calm:
    """Conditions without failures."""

    latency_s: Latencies

    def breaks_swap(self, sender: PeerId, receiver: PeerId) -> float | None:
        return None


def make_peer(peer: PeerId, case: Case) -> tuple[Peer, Learner]:
    random = torch.Generator().manual_seed(PEERS.index(peer))
    task = QuadraticTask(
        curvature=0.2 + torch.rand(P, generator=random),
        optimum=torch.randn(P, generator=random),
        noise=0.1,
        seed=case.seed + PEERS.index(peer),
    )
    outer, swarm = (
        case.outer,
        SwarmSection(catch_up_outer_steps=8, final_disagreement=0.02, final_gossip_s=case.final_gossip_s),
    )
    parts = slices(P, case.fragments)
    learner = Learner(
        task,
        learner_rules(outer, TOKENS),
        parts,
        codec.get(case.codec),
        MemoryLog(),
        gradient_codec=codec.get(case.gradients, rank=8, adaptive=case.adaptive),
    )
    rules = swarm_rules(RUN, outer, swarm, learner.payloads, TOKENS, float(outer.inner_steps))
    return Peer(peer, rules, Random(f"{case.seed}/{peer}")), learner


def simulate(case: Case) -> dict[PeerId, SimulatedPeer]:
    world = World()
    network = SimulatedNetwork(world, RUN, Calm(Latencies()), lookup_s=LOOKUP_S)
    for index, peer in enumerate(PEERS):
        core, learner = make_peer(peer, case)
        network.peers[peer] = SimulatedPeer(network, peer, core, learner, step_seconds(peer), MemoryLog())
        world.at(0.001 * index, network.peers[peer].start)
    world.run()
    return network.peers


def drive(case: Case) -> dict[PeerId, tuple[Peer, Learner, MemoryLog]]:
    ended: dict[PeerId, tuple[Peer, Learner, MemoryLog]] = {}

    async def one(network: MemoryNetwork, peer: PeerId, delay: float) -> None:
        loop = asyncio.get_running_loop()
        core, learner = make_peer(peer, case)
        notebook = MemoryLog()
        begun = asyncio.Event()
        environment = DriverEnvironment(
            transport=network.transport(peer),
            directory=network.directory(LOOKUP_S, clock=loop.time),
            notebook=notebook,
            clock=loop.time,
            sign=lambda e: Presence(
                peer, RUN, (), PeerState(e.state), e.step, e.progress, e.settled, "", loop.time(), lifetime_s=75.0
            ),
            live_until=lambda record: record.issued_at + record.lifetime_s,
            begin_training=begun.set,
            work=at_once,
        )
        driver = Driver(core, learner, environment)
        proceed = asyncio.Event()
        learner.inbox.proceed = lambda step, then=learner.inbox.proceed: (then(step), proceed.set())
        await asyncio.sleep(delay)
        pace = step_seconds(peer)

        async def trainer() -> None:
            while True:
                await asyncio.sleep(pace())
                for event in learner.advance() if begun.is_set() else learner.settle():
                    driver.handle(event)
                while learner.is_waiting:
                    await proceed.wait()
                    proceed.clear()
                    for event in learner.settle():
                        driver.handle(event)

        training = asyncio.create_task(trainer())
        await driver.run()
        training.cancel()
        ended[peer] = core, learner, notebook

    async def everybody() -> None:
        network = MemoryNetwork(latency=Latencies())
        async with asyncio.TaskGroup() as tasks:
            for index, peer in enumerate(PEERS):
                tasks.create_task(one(network, peer, 0.001 * index))

    run_in_virtual_time(everybody())
    return ended


CASES = [
    Case(),
    Case(codec="int8", fragments=3, seed=1),
    Case(codec="bf16", fragments=2, seed=2),
    Case(codec="modular4", fragments=2),
    Case("swarm_both", fragments=2),
    Case("swarm_both", codec="modular8", gradients="topk"),
    Case("dilocox", codec="modular4", fragments=2),
    Case("dilocox", gradients="lowrank", adaptive=True),
    Case("ad_psgd"),
    Case("gasloc", partners=2),
    Case("gasloc_y", topology="ring", seed=1),
    Case("noloco", fragments=3),
    Case("factored_gossip", codec="bf16", seed=1),
    Case("dpsgd", topology="exponential"),
    Case("diloco", topology="complete"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_simulator_and_driver_end_bitwise_equal(case):
    simulated = simulate(case)
    driven = drive(case)
    for peer in PEERS:
        core, learner, notebook = driven[peer]
        assert [kind for kind, _ in notebook.notes] == simulated[peer].notebook.kinds()
        assert core.counters == simulated[peer].core.counters
        assert core.counters.exchanges_ok >= 40
        assert core.counters.exchanges_failed <= core.counters.exchanges_ok // 10
        tensors, numbers = stored(learner)
        expected_tensors, expected_numbers = stored(simulated[peer].learner)
        assert numbers == expected_numbers
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected_tensors[name]), name


@pytest.mark.parametrize(
    "case",
    [
        Case("diloco", topology="complete"),
        Case("gasloc"),
        Case("gasloc", partners=2, seed=3),
        Case("gasloc_y", topology="ring"),
        Case("gasloc_z", topology="exponential"),
        Case("noloco"),
        Case("dpsgd"),
    ],
    ids=str,
)
def test_where_nothing_fails_peers_do_what_lockstep_does(case):
    """Check messages, offers, rounds and byte strings on one side against a mixing matrix on the other."""
    tasks = [make_peer(peer, case)[1].task for peer in PEERS]
    rules = learner_rules(case.outer, TOKENS)
    lockstep = Lockstep(
        tasks,
        LockstepRules(rules.recipe, rules.outer, rules.inner_steps, case.topology, case.partners, seed=RUN),
        advance=lambda progress: [task.inner_step(progress).loss for task in tasks],
        tokens_per_step=float(len(PEERS)),
    )
    peers = simulate(replace(case, final_gossip_s=0.0))
    while lockstep.step < peers[PEERS[0]].learner.step:
        lockstep.outer_step()
    assert 0 <= lockstep.progress - TOKENS <= len(PEERS) * case.outer.inner_steps
    for peer, row in zip(PEERS, lockstep.slow, strict=True):
        assert peers[peer].learner.step == lockstep.step
        assert peers[peer].core.counters.exchanges_failed == 0
        torch.testing.assert_close(peers[peer].learner.slow, row, rtol=0, atol=2e-5)


def test_another_seed_ends_elsewhere():
    one, other = simulate(Case()), simulate(Case(seed=7))
    assert not torch.equal(one[PEERS[0]].learner.task.theta, other[PEERS[0]].learner.task.theta)


def test_the_swarm_agrees_and_learns():
    peers = simulate(Case(seed=3))
    slow = torch.stack([peer.learner.slow for peer in peers.values()])
    mean = slow.mean(0)
    assert float((slow - mean).norm(dim=1).mean() / mean.norm()) < 0.02
    assert "the swarm agrees" in {peer.finished for peer in peers.values()}
