"""Leaving the swarm and returning: real cores and learners over the network in memory, in virtual time.

Birch stays the whole time; amber is paused and resumed. Each trains an inner step every 100 ms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import torch
from member import ENDLESS, H, Member, more_exchanges, until
from memory_network import MemoryNetwork
from virtual_time import run as run_in_virtual_time

from p2ptrain.host.loop import Signals
from p2ptrain.swarm import PeerState
from p2ptrain.swarm.events import Event, LeaveRequested, OuterStepDone, PhaseDone
from peer.participation import Mode, TrainerControl

Scene = Callable[[Member, Member, MemoryNetwork], Awaitable[None]]


def play(scene: Scene, recipe: str = "ad_psgd", amber_tokens: float = ENDLESS) -> tuple[Member, Member, str]:
    """Let both peers settle, play the scene, ask both to leave, and return them and amber's reason for its end."""
    found: list[Member] = []

    async def stage() -> str:
        network = MemoryNetwork(latency=0.01)
        amber, birch = Member(network, "amber", amber_tokens, recipe), Member(network, "birch", recipe=recipe)
        found.extend((amber, birch))
        first = asyncio.create_task(amber.live())
        second = asyncio.create_task(birch.live())
        await until(lambda: amber.counted().exchanges_ok > 2 and birch.counted().exchanges_ok > 2)
        await scene(amber, birch, network)
        for each in (amber, birch):
            each.participation.post(LeaveRequested())
        async with asyncio.timeout(100):
            await second
            return await first

    why = run_in_virtual_time(stage())
    return found[0], found[1], why


def test_who_rests_stands_still_and_nobody_waits_for_it() -> None:
    async def scene(amber: Member, birch: Member, network: MemoryNetwork) -> None:
        both = amber.participation, birch.participation
        await until(lambda: all(each.exchanges_under_way == 1 for each in both), looks_s=0.003)
        amber.participation.set_mode(Mode.PAUSED)
        await until(lambda: amber.participation.state == "away")
        assert amber.participation.exchanges_under_way == 0
        await until(lambda: birch.participation.live_peers == 0)
        assert network.records[amber.peer].state is PeerState.LEAVING
        tokens, theta = amber.learner.tokens, amber.learner.task.theta.clone()
        failed, step = birch.counted().exchanges_failed, birch.learner.step
        await asyncio.sleep(600)
        assert amber.learner.tokens == tokens
        assert torch.equal(amber.learner.task.theta, theta)
        assert amber.participation.live_peers == 0
        assert birch.learner.step == step + 600 * 10 // H
        assert birch.counted().exchanges_failed == failed
        assert birch.heard("failed") <= 1  # an offer on its way

    _, _, why = play(scene)
    assert why == "stopped by its owner"


def test_who_rested_long_comes_back_as_a_newcomer_and_counts_go_on() -> None:
    async def scene(amber: Member, birch: Member, network: MemoryNetwork) -> None:
        amber.participation.set_mode(Mode.PAUSED)
        await asyncio.sleep(600)
        amber.participation.set_mode(Mode.SWARM)
        await until(lambda: amber.heard("caught up") == 1)
        await more_exchanges(amber, 3)
        assert amber.signals.begin.is_set()
        assert abs(amber.learner.progress - birch.learner.progress) < 20 * H
        assert len(amber.cores) == 2
        assert amber.counted().exchanges_ok == sum(core.counters.exchanges_ok for core in amber.cores)

    play(scene)


def test_who_rested_shortly_goes_on_with_its_own_weights() -> None:
    async def scene(amber: Member, birch: Member, network: MemoryNetwork) -> None:
        amber.participation.set_mode(Mode.PAUSED)
        await until(lambda: amber.participation.state == "away")
        step = amber.learner.step
        amber.participation.set_mode(Mode.SWARM)
        await more_exchanges(amber, 3)
        assert amber.learner.step > step
        assert amber.heard("caught up") == 0

    play(scene)


def test_who_comes_back_to_nobody_counts_itself_alone() -> None:
    async def scene(amber: Member, birch: Member, network: MemoryNetwork) -> None:
        amber.participation.set_mode(Mode.PAUSED)
        await until(lambda: amber.participation.state == "away")
        birch.participation.set_mode(Mode.PAUSED)
        await asyncio.sleep(600)
        amber.participation.set_mode(Mode.SWARM)
        tokens, progress = amber.learner.tokens, amber.learner.progress
        await until(lambda: amber.learner.tokens >= tokens + 10 * H)
        assert amber.learner.progress - progress == amber.learner.tokens - tokens

    play(scene)


def test_what_the_owner_gives_holds_for_the_core_of_the_day_and_the_next() -> None:
    async def scene(amber: Member, birch: Member, network: MemoryNetwork) -> None:
        assert amber.cores[-1]._core.gives
        amber.participation.give(False)
        await asyncio.sleep(1)
        assert not amber.cores[-1]._core.gives
        amber.participation.set_mode(Mode.PAUSED)
        await until(lambda: amber.participation.state == "away")
        amber.participation.set_mode(Mode.SWARM)
        await more_exchanges(amber, 3)
        assert len(amber.cores) == 2
        assert not amber.cores[-1]._core.gives
        amber.participation.give(True)
        await asyncio.sleep(1)
        assert amber.cores[-1]._core.gives

    play(scene)


def test_wishes_that_follow_each_other_at_once_end_with_the_last() -> None:
    async def scene(amber: Member, birch: Member, network: MemoryNetwork) -> None:
        for mode in (Mode.PAUSED, Mode.SWARM, Mode.PAUSED, Mode.PAUSED, Mode.SWARM):
            amber.participation.set_mode(mode)
        await more_exchanges(amber, 3)
        for mode in (Mode.SWARM, Mode.PAUSED, Mode.SWARM, Mode.PAUSED):
            amber.participation.set_mode(mode)
        await asyncio.sleep(20)
        tokens = amber.learner.tokens
        await asyncio.sleep(20)
        assert (amber.participation.state, amber.learner.tokens) == ("away", tokens)

    play(scene)


def test_a_trainer_that_waits_for_partners_is_not_left_waiting() -> None:
    """Check a recipe that waits between inner phases: its partner hangs, and the core that would give up is gone."""

    async def scene(amber: Member, birch: Member, network: MemoryNetwork) -> None:
        birch.signals.begin.clear()
        await until(lambda: amber.learner.is_waiting)
        step = amber.learner.step
        amber.participation.set_mode(Mode.PAUSED)
        await until(lambda: amber.learner.step > step, patience_s=5)
        assert not amber.learner.is_waiting

    play(scene, recipe="gasloc")


def test_a_trainer_that_comes_to_wait_while_it_is_called_back_is_not_left_waiting() -> None:
    """Check a wait that starts between two cores: neither gets the event of the phase's end."""

    async def scene(amber: Member, birch: Member, network: MemoryNetwork) -> None:
        post, waited = amber.participation.post, []

        def called_back_meanwhile(event: Event) -> None:
            post(event)
            if isinstance(event, PhaseDone) and amber.participation.state == "away" and not waited:
                waited.append(event.step)
                amber.participation.set_mode(Mode.SWARM)

        amber.participation.set_mode(Mode.PAUSED)
        await until(lambda: amber.participation.state == "away")
        amber.participation.post = called_back_meanwhile  # type: ignore[method-assign]
        for _ in range(200):  # the trainer has not yet seen that it is held
            amber.signals.begin.set()
            await asyncio.sleep(0.05)
        assert waited
        await until(lambda: amber.learner.step > waited[0] + 5, patience_s=100)

    play(scene, recipe="gasloc")


@pytest.mark.parametrize("mode", [None, Mode.PAUSED])
def test_after_the_final_gossip_no_other_core_changes_the_weights(mode: Mode | None) -> None:
    """Check the time in which the trainer reads the final loss: the peer gives its weights, unless it is paused."""

    async def stage() -> None:
        network = MemoryNetwork(latency=0.01)
        amber, birch = (Member(network, name, 2000) for name in ("amber", "birch"))
        living = [asyncio.create_task(each.live()) for each in (amber, birch)]
        await until(lambda: amber.signals.over.is_set() and birch.signals.over.is_set())
        applied = amber.applied
        assert network.records[amber.peer].state is PeerState.FINISHING
        if mode is not None:
            amber.participation.set_mode(mode)
            await asyncio.sleep(10)
            amber.participation.set_mode(Mode.SWARM)
        else:
            late = Member(network, "late", 2000)
            late_living = asyncio.create_task(late.live())
            await until(lambda: late.signals.over.is_set())
            assert (late.heard("run ended"), late.learner.tokens) == (1, 0)
            assert torch.equal(late.learner.slow, amber.learner.slow) or torch.equal(
                late.learner.slow, birch.learner.slow
            )
            late.participation.post(LeaveRequested(gives_on=True))
            await late_living
        for each in (amber, birch):
            each.participation.post(LeaveRequested(gives_on=True))
        async with asyncio.timeout(100):
            whys = [await each for each in living]
        assert set(whys) <= {"the swarm agrees", "nobody is left to exchange with"}
        assert (len(amber.cores), amber.applied) == (1, applied)

    run_in_virtual_time(stage())


def test_away_before_it_ever_began() -> None:
    async def stage() -> None:
        network = MemoryNetwork(latency=0.01)
        amber = Member(network, "amber")
        amber.participation.set_mode(Mode.PAUSED)
        living = asyncio.create_task(amber.live())
        await asyncio.sleep(60)
        assert (amber.learner.tokens, amber.cores) == (0, [])
        amber.participation.set_mode(Mode.SWARM)
        await until(lambda: amber.learner.tokens > 0)
        amber.participation.set_mode(Mode.PAUSED)
        await asyncio.sleep(60)
        amber.participation.post(LeaveRequested())
        async with asyncio.timeout(10):
            assert await living == "stopped by its owner"

    run_in_virtual_time(stage())


def test_displacements_of_the_last_core_never_reach_the_next_one() -> None:
    """Check a trainer that applies displacements late: the next core's links have the same ids."""

    async def scene(amber: Member, birch: Member, network: MemoryNetwork) -> None:
        amber.pace_s = 7.0
        for _ in range(5):
            await more_exchanges(amber, 1)
            amber.participation.set_mode(Mode.PAUSED)
            amber.participation.set_mode(Mode.SWARM)
        amber.pace_s = 0.1
        await more_exchanges(amber, 3)

    amber, _, _ = play(scene)
    assert amber.left_over == [0] * 6


def test_events_that_come_while_nobody_is_there_are_dropped() -> None:
    async def scene(amber: Member, birch: Member, network: MemoryNetwork) -> None:
        amber.participation.set_mode(Mode.PAUSED)
        await until(lambda: amber.participation.state == "away")
        steps = amber.counted().outer_steps
        amber.participation.post(OuterStepDone(1, 1.0, 1))
        await asyncio.sleep(1)
        assert amber.counted().outer_steps == steps

    play(scene)


def test_a_node_without_a_trainer_never_begins_to_train() -> None:
    signals, woken = Signals(), list[int]()
    TrainerControl(signals, lambda: woken.append(1), trains=False).begin()
    assert not signals.begin.is_set()
    assert woken == [1]
