"""Runner: starts the initial peers, follows the script, and ends all processes.

Every started child is in ``Conductor.lives`` or ``bootstraps`` and ends before ``run_script`` returns, in every case;
cancelling ``run_script`` ends them after a short grace. Suspended peers are resumed, and acts in progress end. The
stage belongs to the code that made it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque

from lab.busy import KINDS
from lab.conductor import Conductor
from lab.run_record import Ended, RunRecord
from lab.scenario import BOOTSTRAP
from lab.script import Act, ActKind, Script, describe
from lab.stages import Stage
from peer.testnet import processes
from peer.testnet.plan import Plan
from peer.testnet.report import LEARNED
from peer.testnet.runner import SAVE_GRACE_S, TICK_S, join_link, page_url, said
from peer.testnet.watch import Watch

ABANDON_GRACE_S = 3.0
"""Time for a trainer to end, without saving, after an interrupt. Guess: the times of interrupted lab runs would settle
it."""

BUSY_LOG = "busy.log"
"""File in the output folder that takes what busy programs print."""

LEARNING_S = 600.0
"""Longest wait for the swarm to learn before second 0. The demo model needs about 2 s (measured on 2 cores)."""


async def run_script(
    plan: Plan, script: Script, stage: Stage, seconds: float | None, threads: int, watch: Watch
) -> RunRecord:
    """Run the script and return its record.

    Args:
        seconds: time after second 0 at which all remaining peers save and leave; None to wait for the run's end.
    """
    conductor = Conductor(plan, script, stage, threads, watch)
    try:
        return await _run(conductor, seconds)
    finally:
        conductor.breakages.close()


async def _run(conductor: Conductor, seconds: float | None) -> RunRecord:
    watch = conductor.watch
    began: float | None = None
    cut_short = False
    busy: list[processes.Child] = []
    try:
        conductor.breakages.prepare(conductor.script.acts, {each.name: each.home.path for each in conductor.plan.peers})
        troubles = await _begin(conductor)
        if not troubles:
            for number in range(conductor.script.busy_programs):
                log = conductor.plan.out / BUSY_LOG
                busy.append(await processes.start(f"busy-{number}", "lab.busy", [KINDS[number % len(KINDS)]], log, 1))
            began = time.monotonic()
            watch.say(f"second 0: all peers {'have learned' if conductor.script.waits_for_learning else 'train'}")
            troubles, cut_short = await _until_over(conductor, seconds)
        await conductor.queue.join()
        await conductor.restore_all()
        await processes.stop(busy, ABANDON_GRACE_S)
        await processes.stop(conductor.trainers, SAVE_GRACE_S)  # before the bootstrap, which they tell that they leave
        await processes.stop(conductor.ranks.values(), SAVE_GRACE_S)
        watch.refresh()
        wall_s = 0.0 if began is None else time.monotonic() - began
        of_lines = {name: conductor.stage.line_bytes(name) for name in conductor.script.bootstraps}
        await processes.stop(conductor.all_bootstraps, SAVE_GRACE_S)
    except BaseException:
        try:
            await conductor.queue.cancel()
            await conductor.restore_all()
        finally:
            await processes.stop(
                [*busy, *conductor.trainers, *conductor.ranks.values(), *conductor.all_bootstraps], ABANDON_GRACE_S
            )
        raise
    lives = {
        name: [Ended(life.child.ended.result(), life.ended_by_us) for life in lives]
        for name, lives in conductor.lives.items()
    }
    last = {name: those[-1].child.process.pid for name, those in (conductor.lives | conductor.bootstraps).items()}
    order = {(act.at_s, str(act.kind), act.who): place for place, act in enumerate(conductor.script.acts)}
    samples = {name: conductor.monitor.samples.get(pid, []) for name, pid in last.items()}
    peaks = {name: conductor.monitor.peaks[pid] for name, pid in last.items() if pid in conductor.monitor.peaks}
    done = sorted(conductor.done, key=lambda each: order[each.at_s, each.do, each.who])
    return RunRecord(lives, done, conductor.missed, troubles, cut_short, wall_s, samples, peaks, of_lines)


async def _begin(conductor: Conductor) -> list[str]:
    """Start the bootstraps and the initial peers, and wait until all train; return what went wrong."""
    for name in conductor.script.bootstraps:
        bootstrap = await conductor.start_bootstrap(name, conductor.link)
        link = await join_link(conductor.link_file(name), bootstrap)
        if link is None:
            return [f"the {name} printed no join link; {said(bootstrap)}"]
        conductor.link = link
    watch, first = conductor.watch, conductor.script.first
    watch.say(f"the bootstrap is up; starting {', '.join(first)}")
    if conductor.stage.page:
        watch.say(f"watch them at {page_url(conductor.link_file(BOOTSTRAP).with_name('output.log'))}")
    for who in first:
        await conductor.start(who)
    while not all(watch.views[who].begun for who in first):  # troubles() reports a peer that never trains
        if troubles := await _tick(conductor):
            return troubles
    return await _learning(conductor) if conductor.script.waits_for_learning else []


async def _learning(conductor: Conductor) -> list[str]:
    """Wait until all initial peers have learned; return what went wrong."""
    until = time.monotonic() + LEARNING_S
    while slow := _have_not_learned(conductor):
        if not conductor.running_trainers:
            return [f"all peers ended before {', '.join(slow)} had learned anything, so second 0 never came"]
        if time.monotonic() >= until:
            return [f"{', '.join(slow)} had learned nothing after {LEARNING_S:.0f} s, so second 0 never came"]
        if troubles := await _tick(conductor):
            return troubles
    return []


async def _until_over(conductor: Conductor, seconds: float | None) -> tuple[list[str], bool]:
    """Follow the script until no peer is left or the time is up; return what went wrong, and whether the time was up.

    The script's clock stands still while a peer starts, which takes no time in a simulation.
    """
    pending = deque(conductor.script.acts)
    clock_s, looked_at = 0.0, time.monotonic()
    while True:
        if any(view.fraction >= 1.0 for view in conductor.watch.views.values()):  # then churn ends
            pending = deque(act for act in pending if act.who not in conductor.script.churning)
        while pending and pending[0].at_s <= clock_s and not conductor.is_waiting:
            conductor.schedule(pending.popleft())
        if troubles := await _tick(conductor):
            return troubles, False
        elapsed_s, looked_at = time.monotonic() - looked_at, time.monotonic()
        if not conductor.is_waiting:
            clock_s += elapsed_s
        if seconds is not None and clock_s >= seconds:
            conductor.watch.say(f"{seconds:g} s are over; all peers save and leave")
            _mark_missed(conductor, pending)
            return [], True
        peers = conductor.running_trainers
        more_to_come = conductor.being_started or any(
            act.kind is ActKind.START and act.who != BOOTSTRAP for act in pending
        )
        if not peers and (conductor.any_finished or not more_to_come):
            _mark_missed(conductor, pending)
            return [], False


def _have_not_learned(conductor: Conductor) -> list[str]:
    """Return the initial peers whose loss has not fallen enough.

    The reference is the swarm's first loss, because a peer that starts a moment later may begin with others' weights.
    """
    views = {who: conductor.watch.views[who] for who in conductor.script.first}
    began = max((view.first_loss for view in views.values() if not math.isnan(view.first_loss)), default=math.nan)
    return [who for who, view in views.items() if not view.loss < LEARNED * began]  # true for NaN


def _mark_missed(conductor: Conductor, pending: deque[Act]) -> None:
    conductor.missed += [f"{describe(act.who, act.kind)} at {act.at_s:g} s: the run was over" for act in pending]


async def _tick(conductor: Conductor) -> list[str]:
    """Wait for one tick and return what went wrong in it."""
    await asyncio.sleep(TICK_S)
    conductor.queue.check()
    conductor.watch.refresh()
    conductor.limit_begun()
    conductor.monitor.sample(time.monotonic(), [child.process.pid for child in conductor.running.values()])
    return conductor.troubles(time.monotonic() - conductor.watch.heard_at)
