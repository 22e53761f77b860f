"""Start the processes of a testnet, watch them, and stop them at the end or after a fault.

Every started child is in ``_Cast.children`` and ends before ``conduct`` returns, also on an error or cancellation.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from p2ptrain.base.imports import command_imports
from peer.owner.settings import COMPILE_VARIABLE, compile_mode
from peer.testnet import processes
from peer.testnet.plan import Plan, TrainerProcess
from peer.testnet.processes import Child
from peer.testnet.watch import Watch

TICK_S = 0.25
"""Interval between two looks at the event logs."""
LINK_DEADLINE_S = 90.0
"""Deadline for the bootstrap's join link; 3 s on two cores, mostly imports. Guess: measure a loaded machine."""
SILENCE_S = 600.0
"""Silence of all event logs after which a testnet counts as hung. Downloads are silent for minutes. Guess: measure the
longest download."""
SAVE_GRACE_S = 120.0
"""Time for a trainer to stop: an inner step, a held-out loss, a checkpoint; 3 s in the demo. Guess: measure large
models."""
COMPILE_WORTH_S = 300.0
"""Least length of a testnet that is limited in time for which its peers compile. The demo's step takes 40 s of an idle
core and saves a quarter of the time."""
LEAVE_GRACE_S = 20.0
"""Time for a trainer to stop after Ctrl+C, where the final loss may stay unknown."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a testnet, from which ``report`` derives the verdict."""

    statuses: dict[str, int]
    """Exit status of each trainer, or minus the signal that ended it."""
    troubles: tuple[str, ...]
    """Faults that ended the testnet early."""
    cut_short: bool
    """Whether ``--seconds`` ended it."""
    wall_s: float


@dataclass(frozen=True, slots=True)
class Means:
    """Options of the trainers apart from the run."""

    threads: int
    """Threads of torch in each process."""
    weights: Path | None = None
    page: str = ""
    """Address at which the bootstrap shows the swarm; empty for none."""
    devices: str = ""
    """Devices of the first peer; empty: one, as for the others."""
    stages: int | None = None
    """Pipeline stages of the first peer; None: as the peer chooses."""

    def arguments(self) -> list[str]:
        return [] if self.weights is None else ["--weights", str(self.weights)]


@dataclass(slots=True)
class _Cast:
    """The processes started so far."""

    bootstrap: Child | None = None
    trainers: dict[str, Child] = field(default_factory=dict)

    @property
    def children(self) -> list[Child]:
        return [*self.trainers.values(), *([self.bootstrap] if self.bootstrap else [])]


async def conduct(
    plan: Plan,
    means: Means,
    seconds: float | None,
    watch: Watch,
    afterwards: Callable[[Ending], Awaitable[None]] | None = None,
) -> Ending:
    """Run the testnet to its end.

    Args:
        seconds: training time after which the trainers save and leave; None: until the run ends.
        afterwards: called when only the bootstrap, with its page, still runs; not called after a trouble.
    """
    began = time.monotonic()
    cast = _Cast()
    try:
        troubles = await _start(plan, means, cast, watch, _compiling(seconds, watch))
        cut_short = False
        if not troubles:
            troubles, cut_short = await _until_over(cast, seconds, watch)
        await processes.stop(list(cast.trainers.values()), SAVE_GRACE_S)
        watch.refresh()
        statuses = {name: child.ended.result() for name, child in cast.trainers.items()}
        ending = Ending(statuses, tuple(troubles), cut_short, time.monotonic() - began)
        if afterwards is not None and not troubles:
            await afterwards(ending)
    finally:
        await processes.stop(cast.children, LEAVE_GRACE_S)
    return ending


def _compiling(seconds: float | None, watch: Watch) -> dict[str, str]:
    """Return variables of the trainers' environment that let the first one compile the step, for all of them."""
    if compile_mode("auto", os.environ) == "off" or (seconds is not None and seconds < COMPILE_WORTH_S):
        return {}
    with command_imports():
        from p2ptrain.train.compiling import compiler_program

    if compiler_program(os.environ) is None:
        watch.say("there is no C++ compiler, which would make training faster; p2ptrain doctor says how to install one")
        return {}
    return {COMPILE_VARIABLE: "on"}  # at once: with the low priority it would end after the testnet


async def _start(plan: Plan, means: Means, cast: _Cast, watch: Watch, variables: Mapping[str, str]) -> list[str]:
    if plan.solo is not None:  # it needs no bootstrap and can start first
        text = ["--mirror", str(plan.shards)] if plan.shards.exists() else []
        cast.trainers["solo"] = await _trainer(plan.solo, text, means, variables)
    arguments = [str(plan.run), "--local", "--home", str(plan.bootstrap)]
    arguments += ["--page", means.page] if means.page else []
    cast.bootstrap = await processes.start("bootstrap", "bootstrap", arguments, plan.bootstrap / "output.log", 1)
    link = await join_link(plan.bootstrap / "join-link.txt", cast.bootstrap)
    if link is None:
        if cast.bootstrap.ended.done():
            return [f"the bootstrap ended; {said(cast.bootstrap)}"]
        return [f"the bootstrap printed no join link within {LINK_DEADLINE_S:.0f} s; {said(cast.bootstrap)}"]
    watch.say(f"the bootstrap is up; starting {len(plan.peers)} peers")
    if means.page:
        watch.say(f"watch them at {page_url(plan.bootstrap / 'output.log')}")
    shared = ["--share"] if means.page else []
    for number, each in enumerate(plan.peers):
        several = ["--devices", means.devices] if means.devices and number == 0 else []
        several += ["--stages", str(means.stages)] if means.stages is not None and number == 0 else []
        arguments = [link, "--local", "--nickname", each.name, *shared, *several]
        cast.trainers[each.name] = await _trainer(each, arguments, means, variables)
    return []


async def _trainer(
    trainer: TrainerProcess, arguments: Sequence[str], means: Means, variables: Mapping[str, str]
) -> Child:
    arguments = [*arguments, "--home", str(trainer.home.path), *means.arguments()]
    return await processes.start(trainer.name, "peer", arguments, trainer.log, means.threads, variables=variables)


def page_url(log: Path) -> str:
    """Return the address of a bootstrap's page, from its output; empty if there is none."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.removeprefix("[page] ") for line in lines if line.startswith("[page] ")), "")


async def join_link(path: Path, bootstrap: Child) -> str | None:
    """Wait for the join link. Returns None if the bootstrap ends first or the deadline passes."""
    deadline = time.monotonic() + LINK_DEADLINE_S
    while not path.exists():
        if bootstrap.ended.done() or time.monotonic() > deadline:
            return None
        await asyncio.wait([bootstrap.ended], timeout=TICK_S)
    return path.read_text(encoding="utf-8").strip()


async def _until_over(cast: _Cast, seconds: float | None, watch: Watch) -> tuple[list[str], bool]:
    """Watch until all trainers have ended, time is up or there is trouble. Returns troubles, and if time was up."""
    training_since: float | None = None
    while running := [child.ended for child in cast.trainers.values() if not child.ended.done()]:
        await asyncio.wait(running, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
        watch.refresh()
        now = time.monotonic()
        if troubles := _troubles(cast, now - watch.heard_at):
            return troubles, False
        if training_since is None and watch.all_begun:
            training_since = now
        if seconds is not None and training_since is not None and now - training_since >= seconds:
            watch.say(f"{seconds:g} s of training are over; all peers save and leave")
            return [], True
    return [], False


def _troubles(cast: _Cast, silence_s: float) -> list[str]:
    troubles = [
        f"{child.name} ended with status {child.status}; {said(child)}"
        for child in cast.trainers.values()
        if child.status
    ]
    if cast.bootstrap is not None and cast.bootstrap.status is not None:
        troubles.append(f"the bootstrap ended with status {cast.bootstrap.status}; {said(cast.bootstrap)}")
    if silence_s > SILENCE_S:
        troubles.append(f"no trainer has written to its event log for {silence_s:.0f} s")
    return troubles


def said(child: Child) -> str:
    """Return the last output of a process, for people to read."""
    words = processes.last_words(child.log)
    return f"the end of {child.log}:\n{words}" if words else f"{child.log} is empty"
