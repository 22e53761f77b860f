"""The flagship: with the same seed, the simulator and the asyncio driver end bitwise equal.

Same cores, same learner, same latencies; a heap on one side, tasks, links and frames under a virtual-time loop on the
other. If they differ, one shell decides something that belongs to the core.
"""

from __future__ import annotations

import asyncio
from random import Random

import pytest
import torch

from p2ptrain import codec
from p2ptrain.ids import PeerId, RunId
from p2ptrain.net.driver import Driver, Shore, at_once
from p2ptrain.net.memory import MemoryNetwork
from p2ptrain.net.virtual_time import run as run_in_virtual_time
from p2ptrain.outer import OuterRule, slices
from p2ptrain.sim import Calm, QuadraticTask, SimulatedNetwork, SimulatedPeer, World
from p2ptrain.swarm import Peer, PeerState, Presence, SwarmRules
from p2ptrain.telemetry import MemoryLog
from p2ptrain.train.learner import Learner, LearnerRules

RUN = RunId("ab" * 32)
PEERS = [PeerId(name) for name in ("amber", "birch", "cedar", "dune")]
P, H = 5000, 4
LOOKUP_S = 0.05


def step_seconds(peer: PeerId):
    random = Random(f"pace of {peer}")
    return lambda: 0.1 * random.uniform(0.8, 1.2)


def latencies() -> dict[tuple[PeerId, PeerId], float]:
    random = Random("latencies")
    return {(a, b): random.uniform(0.005, 0.06) for a in PEERS for b in PEERS if a != b}


def make_peer(peer: PeerId, codec_name: str, fragments: int, seed: int) -> tuple[Peer, Learner]:
    random = torch.Generator().manual_seed(PEERS.index(peer))
    task = QuadraticTask(
        curvature=0.2 + torch.rand(P, generator=random),
        optimum=torch.randn(P, generator=random),
        noise=0.1,
        seed=seed + PEERS.index(peer),
    )
    learner = Learner(
        task,
        LearnerRules(inner_steps=H, tokens_per_peer=200.0, outer=OuterRule(0.7, 0.9)),
        slices(P, fragments),
        codec.get(codec_name),
        MemoryLog(),
    )
    rules = SwarmRules(
        run=RUN,
        fragment_bytes=tuple(learner.encoded_sizes(range(fragments))),
        weights_bytes=4 * P,
        tokens_per_peer=200.0,
        tokens_per_outer_step=float(H),
        exchanges_per_step=2,
        fragments_per_exchange=max(fragments - 1, 1),
        final_disagreement=0.02,
    )
    return Peer(peer, rules, Random(f"{seed}/{peer}")), learner


def simulate(codec_name: str, fragments: int, seed: int) -> dict[PeerId, SimulatedPeer]:
    world = World()
    network = SimulatedNetwork(world, RUN, Calm(latencies()), lookup_s=LOOKUP_S)
    for index, peer in enumerate(PEERS):
        core, learner = make_peer(peer, codec_name, fragments, seed)
        network.peers[peer] = SimulatedPeer(network, peer, core, learner, step_seconds(peer), MemoryLog())
        world.at(0.001 * index, network.peers[peer].start)
    world.run()
    return network.peers


def drive(codec_name: str, fragments: int, seed: int) -> dict[PeerId, tuple[Peer, Learner, MemoryLog]]:
    delays = latencies()
    ended: dict[PeerId, tuple[Peer, Learner, MemoryLog]] = {}

    async def one(network: MemoryNetwork, peer: PeerId, delay: float) -> None:
        loop = asyncio.get_running_loop()
        core, learner = make_peer(peer, codec_name, fragments, seed)
        notebook = MemoryLog()
        begun = asyncio.Event()
        shore = Shore(
            transport=network.transport(peer),
            directory=network.directory(LOOKUP_S, clock=loop.time),
            notebook=notebook,
            clock=loop.time,
            sign=lambda e: Presence(
                peer, RUN, (), PeerState(e.state), e.step, e.progress, "", loop.time(), lifetime_s=75.0
            ),
            live_until=lambda record: record.issued_at + record.lifetime_s,
            begin_training=begun.set,
            work=at_once,
        )
        driver = Driver(core, learner, shore)
        await asyncio.sleep(delay)
        pace = step_seconds(peer)

        async def trainer() -> None:
            while True:
                await asyncio.sleep(pace())
                for event in learner.advance() if begun.is_set() else learner.settle():
                    driver.handle(event)

        training = asyncio.create_task(trainer())
        await driver.run()
        training.cancel()
        ended[peer] = core, learner, notebook

    async def everybody() -> None:
        network = MemoryNetwork(latency=lambda sender, receiver: delays[sender, receiver])
        async with asyncio.TaskGroup() as tasks:
            for index, peer in enumerate(PEERS):
                tasks.create_task(one(network, peer, 0.001 * index))

    run_in_virtual_time(everybody())
    return ended


@pytest.mark.parametrize(("codec_name", "fragments", "seed"), [("fp32", 1, 0), ("int8", 3, 1), ("bf16", 2, 2)])
def test_simulator_and_driver_end_bitwise_equal(codec_name, fragments, seed):
    simulated = simulate(codec_name, fragments, seed)
    driven = drive(codec_name, fragments, seed)
    for peer in PEERS:
        core, learner, notebook = driven[peer]
        assert [kind for kind, _ in notebook.notes] == simulated[peer].notebook.kinds()
        assert core.counters == simulated[peer].core.counters
        assert core.counters.exchanges_ok >= 40
        assert core.counters.exchanges_failed <= core.counters.exchanges_ok // 10
        tensors, numbers = learner.state_dict()
        expected_tensors, expected_numbers = simulated[peer].learner.state_dict()
        assert numbers == expected_numbers
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected_tensors[name]), name


def test_another_seed_ends_elsewhere():
    one, other = simulate("fp32", 1, 0), simulate("fp32", 1, 7)
    assert not torch.equal(one[PEERS[0]].learner.task.theta, other[PEERS[0]].learner.task.theta)


def test_the_swarm_agrees_and_learns():
    peers = simulate("fp32", 1, 3)
    slow = torch.stack([peer.learner.state_dict()[0]["slow"] for peer in peers.values()])
    mean = slow.mean(0)
    assert float((slow - mean).norm(dim=1).mean() / mean.norm()) < 0.02
    assert "the swarm agrees" in {peer.finished for peer in peers.values()}
