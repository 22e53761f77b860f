"""Conductor: starts the peers and bootstraps and performs the script's acts.

Acts on one host run one after the other, acts on different hosts in parallel, because a stage may be slow. An act that
the stage cannot perform is recorded as missed, with its reason, and the testnet continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from lab import second_computer
from lab.breakage import BREAKAGE_ACTS, Breakages, kill_node, with_clock_error
from lab.exchange_probe import wait_for_exchange
from lab.resource_monitor import ResourceMonitor
from lab.run_record import Done
from lab.scenario import BOOTSTRAP, RealGroup
from lab.script import NETWORK_ACTS, Act, ActKind, Script, describe
from lab.stages import Stage, Suspension
from p2ptrain.admission import author
from p2ptrain.base.errors import DeviceError
from p2ptrain.manifest import JoinLink
from peer.testnet import processes
from peer.testnet.plan import Plan, TrainerProcess
from peer.testnet.processes import Child
from peer.testnet.runner import SILENCE_S, said
from peer.testnet.watch import Watch

START_TIMEOUT_S = 90.0
"""Longest that the script waits for a started peer to train. Guess: imports take 3 s, and 30 s on a busy machine; start
times of lab runs would settle it."""
INVITE_VALIDITY_S = 3600
"""Validity of an invite, longer than any scenario."""
END_TIMEOUT_S = 10.0
"""Time for a killed process to end. Guess: it takes milliseconds; the waits of lab runs would settle it."""


@dataclass(slots=True)
class SuspendedPeers:
    """Suspended peers by name, each with its host. Calls of the stage that may be slow run in threads."""

    stage: Stage
    _held: dict[str, tuple[str, Suspension]] = field(default_factory=dict)

    def __contains__(self, who: str) -> bool:
        return who in self._held

    async def begin(self, who: str, host: str, pid: int) -> None:
        """Suspend a peer and cut its host's link. Raises DeviceError if it keeps running."""
        self._held[who] = host, await asyncio.to_thread(self.stage.suspend, who, pid)
        self.stage.cut_link(host, True)

    async def end(self, who: str) -> None:
        """Resume a peer and its link. Raises DeviceError if it stays suspended."""
        host, suspension = self._held[who]
        await asyncio.to_thread(suspension.end)
        del self._held[who]
        self.stage.cut_link(host, False)

    async def forget(self, who: str) -> None:
        """Drop a killed peer and restore the link of its host, which another peer may use now."""
        if who in self._held:
            host, suspension = self._held.pop(who)
            with contextlib.suppress(DeviceError):
                await asyncio.to_thread(suspension.end)
            self.stage.cut_link(host, False)

    async def end_all(self) -> list[str]:
        """Resume all peers; return which could not be resumed, and why."""
        failed = []
        for who in list(self._held):
            try:
                await self.end(who)
            except DeviceError as error:
                failed.append(f"{describe(who, ActKind.RESUME)} at the end: {error.problem.rstrip('.')}")
        return failed


@dataclass(slots=True)
class TaskQueue:
    """Asynchronous work in order for each key, in parallel for different keys.

    Owns the tasks: wait for them with ``join`` or end them with ``cancel``.
    """

    _last: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def add(self, key: str, work: Callable[[], Awaitable[None]]) -> None:
        """Start work when all earlier work of the key is done. After a failure nothing more of that key runs."""
        self._last[key] = asyncio.ensure_future(_run_after(self._last.get(key), work))

    def check(self) -> None:
        """Raise the error of finished work, if any."""
        for key, task in list(self._last.items()):
            if task.done():
                del self._last[key]
                task.result()

    async def join(self) -> None:
        """Wait until all work is done. Raises the error of any of it."""
        while self._last:
            await asyncio.wait(self._last.values())
            self.check()

    async def cancel(self) -> None:
        """Cancel all work. Calls that run in a thread continue there."""
        tasks = list(self._last.values())
        self._last.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_after(before: asyncio.Task[None] | None, work: Callable[[], Awaitable[None]]) -> None:
    if before is not None:
        await before
    await work()


@dataclass(slots=True)
class PeerProcess:
    """One process of a peer."""

    child: Child
    ended_by_us: str = ""
    """``ActKind`` by which we ended the process before its run did; empty if we did not."""


@dataclass(slots=True)
class Conductor:
    """Processes that were started so far, and the outcome of the script's acts."""

    plan: Plan
    script: Script
    stage: Stage
    threads: int
    watch: Watch
    lives: dict[str, list[PeerProcess]] = field(default_factory=dict)
    bootstraps: dict[str, list[PeerProcess]] = field(default_factory=dict)
    """Processes of each bootstrap, by name."""
    ranks: dict[str, Child] = field(default_factory=dict)
    """Processes of the peers' second computers, by peer."""
    suspended: SuspendedPeers = field(init=False)
    breakages: Breakages = field(default_factory=Breakages)
    monitor: ResourceMonitor = field(default_factory=ResourceMonitor)
    queue: TaskQueue = field(default_factory=TaskQueue)
    """Acts in progress, by host."""
    done: list[Done] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    being_started: set[str] = field(default_factory=set)
    """Peers that the script is starting."""
    awaited: dict[str, float] = field(default_factory=dict)
    """Started peers for which the script waits, with the deadline on the monotonic clock."""
    unlimited: set[str] = field(default_factory=set)
    """Started peers whose CPU time is to be limited once they train."""
    not_ended: dict[str, str] = field(default_factory=dict)
    """Hosts whose last peer we could not end as planned, and why: no other peer starts in its place."""
    link: str = ""

    def __post_init__(self) -> None:
        self.suspended = SuspendedPeers(self.stage)

    def schedule(self, act: Act) -> None:
        """Queue an act behind earlier acts on the same host. The script continues meanwhile."""
        if act.kind is ActKind.START:
            self.being_started.add(act.who)
        self.queue.add(self._host(act.who), partial(self._perform, act))

    async def _perform(self, act: Act) -> None:
        """Perform an act and record it as done or missed."""
        self.watch.say(f"{act.at_s:g} s: {describe(act.who, act.kind)}")
        try:
            why_not = await self._attempt(act)
        except DeviceError as error:  # the stage can usually perform the next act
            why_not = error.problem.rstrip(".")
        finally:
            if act.kind is ActKind.START:
                self.being_started.discard(act.who)
        if why_not:
            self.missed.append(f"{describe(act.who, act.kind)}: {why_not}")
        else:
            self.done.append(Done(act.at_s, time.time(), act.kind, act.who))

    async def _attempt(self, act: Act) -> str:
        """Perform an act; return why it is not possible, or an empty string."""
        match act.kind:
            case ActKind.PART:
                self.stage.partition(act.who)
            case ActKind.HEAL:
                self.stage.heal(act.who)
            case ActKind.START:
                if why_not := self.not_ended.pop(self._host(act.who), ""):
                    return f"the previous peer {why_not}"
                if act.who in self.running:
                    return "it is still running"
                await self.start(act.who)
            case _:
                if act.who not in self.running:
                    if act.kind in (ActKind.KILL, ActKind.STOP):
                        self.not_ended[self._host(act.who)] = "had ended by itself"
                    return "it has already ended"
                return await self._perform_on(self.running[act.who], act)
        return ""

    async def _perform_on(self, child: Child, act: Act) -> str:
        """Perform an act on a running peer; return why it is not possible, or an empty string."""
        if self._needs_exchange(act) and not await wait_for_exchange(self._trainer(act.who).home.path):
            return "it was in no exchange"
        if act.kind in BREAKAGE_ACTS:
            self.breakages.perform(act, child.process.pid)
        elif act.kind in NETWORK_ACTS:
            self.stage.change_network(self._host(act.who), act.kind)
        elif act.kind is ActKind.SUSPEND:
            await self.suspended.begin(act.who, self._host(act.who), child.process.pid)
        elif act.kind is ActKind.BAN:
            author.revoke(self.plan.run, [self._trainer(act.who).peer_id], time.time())
        elif act.kind is not ActKind.RESUME:
            await self._end(child, act)
        elif act.who in self.suspended:
            await self.suspended.end(act.who)
        else:
            return "it was not asleep"
        return ""

    def _needs_exchange(self, act: Act) -> bool:
        """Return whether an act waits until the peer is in an exchange."""
        return (
            act.kind in (ActKind.KILL, ActKind.SUSPEND)
            and act.who in self.lives
            and self._settings(act.who).amid_exchange
        )

    async def _end(self, child: Child, act: Act) -> None:
        """Kill a process, or resume it and ask it to leave."""
        life = (self.lives | self.bootstraps)[act.who][-1]
        life.ended_by_us = act.kind  # set before it ends, so that it does not count as a crash
        try:
            if act.kind is ActKind.KILL:
                has_ranks = act.who in self.lives and self._settings(act.who).ranks > 1
                kill = kill_node if has_ranks else self.stage.kill
                await asyncio.to_thread(kill, act.who, child.process.pid)
            elif act.who in self.suspended:  # a suspended process does not receive SIGTERM
                await self.suspended.end(act.who)
        except DeviceError:
            life.ended_by_us = ""
            self.not_ended[self._host(act.who)] = "could not be ended"
            raise
        if act.kind is ActKind.KILL:
            await self.suspended.forget(act.who)
            await asyncio.wait([child.ended], timeout=END_TIMEOUT_S)  # before another process uses its home
        else:
            child.terminate()

    async def start(self, who: str) -> None:
        """Start a peer, or the bootstrap again."""
        if who == BOOTSTRAP:
            await self.start_bootstrap(who)
            self.awaited[who] = time.monotonic() + START_TIMEOUT_S
            return
        trainer, settings = self._trainer(who), self._settings(who)
        if settings.copies:
            await asyncio.to_thread(_copy_home, self._trainer(f"{settings.copies}-1").home.path, trainer.home.path)
        arguments = [
            self._invitation(settings),
            *self.stage.arguments,
            "--nickname",
            who,
            "--home",
            str(trainer.home.path),
        ]
        arguments += ["--devices", settings.devices] if settings.ranks > 1 else []
        arguments += second_computer.leading() if settings.computers > 1 else []
        module = "peer" if settings.lie is None else "lab.hostile"
        arguments[:0] = [] if settings.lie is None else [settings.lie]
        arguments += ["--share"] if self.stage.page and settings.lie is None else []
        inside = with_clock_error(settings.clock_off_s, self.stage.inside(self._host(who), who))
        module, first = self.breakages.program(who, module)
        self.stage.limit(self._host(who), None)  # what a start takes says nothing about how a slow computer trains
        log = self.breakages.log(who, trainer.log)
        of_its_own = self.plan.signed.manifest.corpus.kind == "shards"  # else all have the shards that one fetched
        variables = {"XDG_CACHE_HOME": str(trainer.home.path / "cache")} if of_its_own else {}
        child = await processes.start(who, module, [*first, *arguments], log, self.threads, inside, variables)
        if settings.computers > 1 and who not in self.ranks:
            other = self.stage.second(self._host(who)).inside
            self.ranks[who] = await second_computer.start_rank(who, trainer.home.path, log, self.threads, other)
        ends_by_itself = ActKind.COPY if settings.copies else "" if settings.invited else ActKind.TURN_AWAY
        life = PeerProcess(child, ends_by_itself)
        self.lives.setdefault(who, []).append(life)  # from here on the runner ends it
        try:
            await asyncio.to_thread(self.stage.started, who, settings)
        except DeviceError:  # without its link it would be another kind of peer
            self.lives[who][-1].ended_by_us = ActKind.STOP
            child.terminate()
            raise
        self.watch.views[who] = replace(self.watch.views[who], begun=False, catches_up=False)
        self.awaited[who] = time.monotonic() + START_TIMEOUT_S
        if settings.cores is not None:
            self.unlimited.add(who)

    def limit_begun(self) -> None:
        """Limit the CPU time of peers that have begun to train."""
        for who in [who for who in self.unlimited if self.watch.views[who].begun]:
            self.unlimited.discard(who)
            self.stage.limit(self._host(who), self._settings(who).cores)

    def _invitation(self, settings: RealGroup) -> str:
        """Return the link by which a peer of this group joins."""
        if self.plan.signed.manifest.admission.policy == "open" or not settings.invited:
            return self.link
        invited, _ = author.invite(self.plan.run, JoinLink.parse(self.link), INVITE_VALIDITY_S, 1, time.time())
        return str(invited)

    async def start_bootstrap(self, name: str, beside: str = "") -> Child:
        """Start a bootstrap; ``beside`` is the link of the bootstraps started before it."""
        home = self.plan.bootstrap.with_name(name)
        self.link_file(name).unlink(missing_ok=True)  # the last process may have had other addresses
        arguments = [str(self.plan.run), *self.stage.arguments, "--home", str(home)]
        arguments += ["--beside", beside] if beside else []
        arguments += self.stage.page if name == BOOTSTRAP else []
        inside = self.stage.inside(name, name)
        child = await processes.start(name, "bootstrap", arguments, home / "output.log", 1, inside)
        self.bootstraps.setdefault(name, []).append(PeerProcess(child))
        return child

    def link_file(self, name: str) -> Path:
        return self.plan.bootstrap.with_name(name) / "join-link.txt"

    def _trainer(self, who: str) -> TrainerProcess:
        return next(each for each in self.plan.peers if each.name == who)

    def _settings(self, who: str) -> RealGroup:
        return next(peer.settings for peer in self.script.peers if peer.name == who)

    def _host(self, who: str) -> str:
        return next((peer.host for peer in self.script.peers if peer.name == who), who)

    @property
    def running(self) -> dict[str, Child]:
        """Running peers and bootstraps."""
        found = {name: lives[-1].child for name, lives in (self.lives | self.bootstraps).items()}
        return {name: child for name, child in found.items() if not child.ended.done()}

    @property
    def is_waiting(self) -> bool:
        """Whether a peer is still starting, so that the script's clock stands still."""
        now, running = time.monotonic(), self.running
        self.awaited = {
            who: until
            for who, until in self.awaited.items()
            if who in running and now < until and not self._has_arrived(who)
        }
        return bool(self.being_started or self.awaited)

    def _has_arrived(self, who: str) -> bool:
        """Return whether a started peer trains, or takes weights if the scenario awaits that.

        A restarted bootstrap has arrived once it has written its link, which later peers join by.
        """
        if who != BOOTSTRAP:
            view = self.watch.views[who]
            return view.begun or (view.catches_up and self._settings(who).awaited == "weights")
        link = self.link_file(who).read_text(encoding="utf-8").strip() if self.link_file(who).exists() else ""
        if link and len(self.script.bootstraps) == 1:  # with several bootstraps the old link names the others, too
            self.link = link
        return bool(link)

    @property
    def trainers(self) -> list[Child]:
        return [life.child for lives in self.lives.values() for life in lives]

    @property
    def all_bootstraps(self) -> list[Child]:
        return [life.child for lives in self.bootstraps.values() for life in lives]

    @property
    def running_trainers(self) -> list[Child]:
        return [child for name, child in self.running.items() if name not in self.bootstraps]

    @property
    def any_finished(self) -> bool:
        """Whether a peer has finished the run by itself."""
        return any(life.child.status == 0 and not life.ended_by_us for lives in self.lives.values() for life in lives)

    def troubles(self, silence_s: float) -> list[str]:
        """Return reasons to end the testnet early."""
        found = [
            f"{name} ended with status {life.child.status}; {said(life.child)}"
            for name, lives in self.lives.items()
            for life in lives
            if life.child.status and not life.ended_by_us
        ]
        found += [
            f"the {name} ended with status {life.child.status}; {said(life.child)}"
            for name, lives in self.bootstraps.items()
            for life in lives
            if life.child.ended.done() and not life.ended_by_us
        ]
        if silence_s > SILENCE_S:
            found.append(f"no peer has logged anything for {silence_s:.0f} s")
        return found

    async def restore_all(self) -> None:
        """Resume all peers and end all failures, so that every peer can save."""
        self.missed += await self.suspended.end_all()
        self.breakages.repair()


def _copy_home(source: Path, home: Path) -> None:
    """Copy the home of a running peer over another, without its log, which the figures read."""
    ours = shutil.ignore_patterns("lock", "control.sock", "events.jsonl", "summary.json", "output.log")
    shutil.copytree(source, home, ignore=ours, dirs_exist_ok=True)
