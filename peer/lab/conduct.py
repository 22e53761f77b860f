"""From the first process to the last: start who is there from the beginning, then do what the script says.

Who closes what: every child that was started is in ``Conductor.lives`` or ``bootstraps`` and ends before ``conduct``
returns, whatever happens; cancelling ``conduct`` ends them too, without asking long. Naps end there as well. The stage
is its maker's.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path

from p2ptrain.sim.reality import BOOTSTRAP
from peer.lab.breakage import BREAKAGE, Breakages
from peer.lab.clock import beside
from peer.lab.course import Course, Done, Ended
from peer.lab.pulse import Pulse
from peer.lab.script import Act, Do, Script, told
from peer.lab.stages import Sleep, Stage
from peer.testnet import processes
from peer.testnet.conduct import SAVE_GRACE_S, SILENCE_S, TICK_S, join_link, said
from peer.testnet.plan import Plan
from peer.testnet.processes import Child
from peer.testnet.watch import Watch

STARTING_S = 90.0
"""So long the script waits until somebody who comes trains. A guess: imports take 3 s, and 30 s on a busy machine."""
ABANDON_GRACE_S = 3.0
"""For a trainer when the owner interrupts: time to end, not to save. A guess."""


@dataclass(slots=True)
class Life:
    """One process of a peer."""

    child: Child
    ended_by_us: str = ""
    """What we did to end it before its run did: a ``Do``; empty: nothing."""


@dataclass(slots=True)
class Conductor:
    """Everybody who was started so far, and what became of the script."""

    plan: Plan
    script: Script
    stage: Stage
    threads: int
    watch: Watch
    lives: dict[str, list[Life]] = field(default_factory=dict)
    bootstraps: dict[str, list[Child]] = field(default_factory=dict)
    """By name, each one's processes."""
    naps: dict[str, Sleep] = field(default_factory=dict)
    breakages: Breakages = field(default_factory=Breakages)
    pulse: Pulse = field(default_factory=Pulse)
    done: list[Done] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    starting: dict[str, float] = field(default_factory=dict)
    """Who comes and does not train yet, and until when the script waits for it, on the monotonic clock."""
    unended: set[str] = field(default_factory=set)
    """Hosts whose last occupant was gone before we could end it: nobody comes in its place."""
    link: str = ""

    async def act(self, act: Act) -> None:
        """Make one thing happen, or note that it cannot."""
        self.watch.say(f"{act.at_s:g} s: {told(act.who, act.do)}")
        match act.do:
            case Do.PART:
                self.stage.parts(act.who)
            case Do.HEAL:
                self.stage.heals(act.who)
            case Do.START:
                if self._host(act.who) in self.unended:
                    self.unended.discard(self._host(act.who))
                    self.missed.append(f"{told(act.who, act.do)}: who was there before had gone by itself")
                    return
                if act.who in self.running:
                    self.missed.append(f"{told(act.who, act.do)}: it is still there")
                    return
                await self.start(act.who)
            case _:
                if act.who not in self.running:
                    if act.do in (Do.KILL, Do.STOP):
                        self.unended.add(self._host(act.who))
                    self.missed.append(f"{told(act.who, act.do)}: it is not there any more")
                    return
                self._do_to(self.running[act.who], act)
        self.done.append(Done(act.at_s, time.time(), act.do, act.who))

    def _do_to(self, child: Child, act: Act) -> None:
        """Something happens to somebody who is there."""
        if act.do in BREAKAGE:
            self.breakages.do(act, child.process.pid)
            return
        host = self._host(act.who)
        if act.do is Do.FREEZE:
            self.naps[act.who] = self.stage.nap(act.who, child.process.pid)
            self.stage.sleeps(host, True)
            return
        if act.do is Do.KILL:
            self.stage.kill(act.who, child.process.pid)
        if act.who in self.naps:  # who leaves asleep has no line left to cut; who is asked to leave must hear it
            self.naps.pop(act.who).end()
            self.stage.sleeps(host, False)
        if act.do is Do.STOP:
            child.terminate()
        if act.do is not Do.THAW and act.who in self.lives:
            self.lives[act.who][-1].ended_by_us = act.do

    async def start(self, who: str) -> None:
        """A peer, or the bootstrap again."""
        if who == BOOTSTRAP:
            await self.start_bootstrap(who)
            self.starting[who] = time.monotonic() + STARTING_S
            return
        trainer = next(each for each in self.plan.peers if each.name == who)
        settings = next(part.settings for part in self.script.parts if part.name == who)
        arguments = [self.link, *self.stage.arguments, "--nickname", who, "--home", str(trainer.home.path)]
        module = "peer" if settings.lie is None else "peer.lab.hostile"
        arguments[:0] = [] if settings.lie is None else [settings.lie]
        inside = beside(settings.clock_off_s, self.stage.inside(self._host(who), who))
        log = self.breakages.log(who, trainer.log)
        child = await processes.start(who, module, arguments, log, self.threads, inside)
        self.lives.setdefault(who, []).append(Life(child))  # from here on it ends with us
        await asyncio.to_thread(self.stage.started, who, settings)
        self.watch.views[who] = replace(self.watch.views[who], begun=False, last="starting")
        self.starting[who] = time.monotonic() + STARTING_S

    async def start_bootstrap(self, name: str, beside: str = "") -> Child:
        """Or another, once it has died; ``beside`` is the link of those that are there before it."""
        home = self.plan.bootstrap.with_name(name)
        self.link_file(name).unlink(missing_ok=True)  # of its last process, which may have had other addresses
        arguments = [str(self.plan.run), *self.stage.arguments, "--home", str(home)]
        arguments += ["--beside", beside] if beside else []
        inside = self.stage.inside(name, name)
        child = await processes.start(name, "bootstrap", arguments, home / "output.log", 1, inside)
        self.bootstraps.setdefault(name, []).append(child)
        return child

    def link_file(self, name: str) -> Path:
        return self.plan.bootstrap.with_name(name) / "join-link.txt"

    def _host(self, who: str) -> str:
        return next((part.host for part in self.script.parts if part.name == who), who)

    @property
    def running(self) -> dict[str, Child]:
        """Who is there, bootstraps too."""
        found = {name: lives[-1].child for name, lives in self.lives.items()}
        found |= {name: children[-1] for name, children in self.bootstraps.items()}
        return {name: child for name, child in found.items() if not child.ended.done()}

    @property
    def is_waiting(self) -> bool:
        """Somebody comes and is not there yet: the script's clock stands still."""
        now, running = time.monotonic(), self.running
        self.starting = {
            who: until
            for who, until in self.starting.items()
            if who in running and now < until and not self._has_come(who)
        }
        return bool(self.starting)

    def _has_come(self, who: str) -> bool:
        """Who starts trains; a bootstrap that starts again has told its link, by which others join from now on."""
        if who != BOOTSTRAP:
            return self.watch.views[who].begun
        link = self.link_file(who).read_text(encoding="utf-8").strip() if self.link_file(who).exists() else ""
        if link and len(self.script.bootstraps) == 1:  # where there are several, the old link names the others too
            self.link = link
        return bool(link)

    @property
    def trainers(self) -> list[Child]:
        return [life.child for lives in self.lives.values() for life in lives]

    @property
    def all_bootstraps(self) -> list[Child]:
        return [child for children in self.bootstraps.values() for child in children]

    @property
    def running_trainers(self) -> list[Child]:
        return [child for name, child in self.running.items() if name not in self.bootstraps]

    @property
    def somebody_finished(self) -> bool:
        """A peer has ended by itself and well."""
        return any(life.child.status == 0 and not life.ended_by_us for lives in self.lives.values() for life in lives)

    def troubles(self, silence_s: float) -> list[str]:
        """Why it makes no sense to go on, if so."""
        found = [
            f"{name} ended with status {life.child.status}; {said(life.child)}"
            for name, lives in self.lives.items()
            for life in lives
            if life.child.status and not life.ended_by_us
        ]
        for name, children in self.bootstraps.items():
            killed = sum(done.who == name and done.do == Do.KILL for done in self.done)
            ended = [child for child in children if child.ended.done()]
            if len(ended) > killed:
                found.append(f"the {name} ended with status {ended[-1].status}; {said(ended[-1])}")
        if silence_s > SILENCE_S:
            found.append(f"no peer has noted anything for {silence_s:.0f} s")
        return found

    def mend_all(self) -> None:
        """Whoever sleeps wakes, and whatever is broken works again: now everybody may save."""
        for who in list(self.naps):
            self.naps.pop(who).end()
            self.stage.sleeps(self._host(who), False)
        self.breakages.mend()


async def conduct(
    plan: Plan, script: Script, stage: Stage, seconds: float | None, threads: int, watch: Watch
) -> Course:
    """Act the script out. ``seconds``: after second 0, when everybody who is still there saves and leaves."""
    conductor = Conductor(plan, script, stage, threads, watch)
    try:
        return await _conducted(conductor, seconds)
    finally:
        conductor.breakages.close()


async def _conducted(conductor: Conductor, seconds: float | None) -> Course:
    watch = conductor.watch
    began: float | None = None
    cut_short = False
    try:
        conductor.breakages.prepare(conductor.script.acts, {each.name: each.home.path for each in conductor.plan.peers})
        troubles = await _begin(conductor)
        if not troubles:
            began = time.monotonic()
            watch.say("everybody trains: second 0")
            troubles, cut_short = await _until_over(conductor, seconds)
        conductor.mend_all()
        await processes.stop(conductor.trainers, SAVE_GRACE_S)  # before the bootstrap: they say goodbye to it
        watch.refresh()
        wall_s = 0.0 if began is None else time.monotonic() - began
        await processes.stop(conductor.all_bootstraps, SAVE_GRACE_S)
    except BaseException:
        conductor.mend_all()
        await processes.stop([*conductor.trainers, *conductor.all_bootstraps], ABANDON_GRACE_S)
        raise
    lives = {
        name: [Ended(life.child.ended.result(), life.ended_by_us) for life in lives]
        for name, lives in conductor.lives.items()
    }
    last = {name: those[-1].child.process.pid for name, those in conductor.lives.items()}
    last |= {name: those[-1].process.pid for name, those in conductor.bootstraps.items()}
    samples = {name: conductor.pulse.samples.get(pid, []) for name, pid in last.items()}
    peaks = {name: conductor.pulse.peaks[pid] for name, pid in last.items() if pid in conductor.pulse.peaks}
    return Course(lives, conductor.done, conductor.missed, troubles, cut_short, wall_s, samples, peaks)


async def _begin(conductor: Conductor) -> list[str]:
    """The bootstrap and who is there from the beginning, until all of them train; returns what went wrong."""
    for name in conductor.script.bootstraps:
        bootstrap = await conductor.start_bootstrap(name, conductor.link)
        link = await join_link(conductor.link_file(name), bootstrap)
        if link is None:
            return [f"the {name} printed no join link; {said(bootstrap)}"]
        conductor.link = link
    watch, first = conductor.watch, conductor.script.first
    watch.say(f"the bootstrap is up; starting {', '.join(first)}")
    for who in first:
        await conductor.start(who)
    while not all(watch.views[who].begun for who in first):  # troubles() notices where that never comes
        if troubles := await _tick(conductor):
            return troubles
    return []


async def _until_over(conductor: Conductor, seconds: float | None) -> tuple[list[str], bool]:
    """Follow the script until nobody is left or the time is up: what went wrong, and whether it was time.

    Its clock stands still while somebody starts, which takes no time in a simulation.
    """
    pending = deque(conductor.script.acts)
    clock_s, looked_at = 0.0, time.monotonic()
    while True:
        if any(view.fraction >= 1.0 for view in conductor.watch.views.values()):  # churn ends before the run's end does
            pending = deque(act for act in pending if act.who not in conductor.script.churning)
        while pending and pending[0].at_s <= clock_s and not conductor.is_waiting:
            await conductor.act(pending.popleft())
        if troubles := await _tick(conductor):
            return troubles, False
        elapsed_s, looked_at = time.monotonic() - looked_at, time.monotonic()
        if not conductor.is_waiting:
            clock_s += elapsed_s
        if seconds is not None and clock_s >= seconds:
            conductor.watch.say(f"{seconds:g} s are over; everybody saves and leaves")
            _miss(conductor, pending)
            return [], True
        peers = conductor.running_trainers
        somebody_comes = any(act.do is Do.START and act.who != BOOTSTRAP for act in pending)
        if not peers and (conductor.somebody_finished or not somebody_comes):
            _miss(conductor, pending)
            return [], False


def _miss(conductor: Conductor, pending: deque[Act]) -> None:
    conductor.missed += [f"{told(act.who, act.do)} at {act.at_s:g} s: all was over" for act in pending]


async def _tick(conductor: Conductor) -> list[str]:
    """A moment later: what went wrong in it."""
    await asyncio.sleep(TICK_S)
    conductor.watch.refresh()
    conductor.pulse.beat(time.monotonic(), [child.process.pid for child in conductor.running.values()])
    return conductor.troubles(time.monotonic() - conductor.watch.heard_at)
