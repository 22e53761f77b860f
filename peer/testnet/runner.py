"""From the first process to the last: start everybody, watch, stop when it is over or when something went wrong.

Who closes what: every child that was started is in ``_Cast.children`` and ends before ``conduct`` returns, whatever
happens; cancelling ``conduct`` ends them too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peer.testnet import processes
from peer.testnet.plan import Plan, TrainerProcess
from peer.testnet.processes import Child
from peer.testnet.watch import Watch

TICK_S = 0.25
"""How often the event logs are looked at."""
LINK_DEADLINE_S = 90.0
"""For the bootstrap's join link. A guess: 3 s on two cores, nearly all of it imports."""
SILENCE_S = 600.0
"""A testnet none of whose trainers notes anything for so long hangs. A guess: a download may take minutes. Who makes
text into tokens, which may take an hour, says how far it is (``peer.assembly``)."""
SAVE_GRACE_S = 120.0
"""For a trainer that was asked to stop: an inner step, a held-out loss, a checkpoint. A guess; 3 s in the demo."""
LEAVE_GRACE_S = 20.0
"""The same when the owner interrupts: the loss may stay unknown."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How it all ended; ``report`` judges it."""

    statuses: dict[str, int]
    """Each trainer's exit status; negative: the signal that ended it."""
    troubles: tuple[str, ...]
    """What ended the testnet before its trainers did."""
    cut_short: bool
    """The trainers were asked to stop after ``--seconds``."""
    wall_s: float


@dataclass(frozen=True, slots=True)
class Means:
    """What the trainers get beside the run."""

    threads: int
    """Threads of torch in each process."""
    data: Path | None = None
    tokenizer: Path | None = None
    page: str = ""
    """Where the bootstrap shows the swarm; empty: nowhere."""

    def arguments(self) -> list[str]:
        data = [] if self.data is None else ["--data", str(self.data)]
        return data if self.tokenizer is None else [*data, "--tokenizer", str(self.tokenizer)]


@dataclass(slots=True)
class _Cast:
    """Everybody who was started so far."""

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
        seconds: of training, after which the trainers save and leave.
        afterwards: what is done while the bootstrap alone is still there, with its page; not after a trouble.
    """
    began = time.monotonic()
    cast = _Cast()
    try:
        troubles = await _start(plan, means, cast, watch)
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


async def _start(plan: Plan, means: Means, cast: _Cast, watch: Watch) -> list[str]:
    """Start everybody; returns what went wrong."""
    if plan.solo is not None:  # it needs no bootstrap: the two cores are busy from the first second
        cast.trainers["solo"] = await _trainer(plan.solo, [], means)
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
    for each in plan.peers:
        cast.trainers[each.name] = await _trainer(each, [link, "--local", "--nickname", each.name, *shared], means)
    return []


async def _trainer(trainer: TrainerProcess, arguments: Sequence[str], means: Means) -> Child:
    arguments = [*arguments, "--home", str(trainer.home.path), *means.arguments()]
    return await processes.start(trainer.name, "peer", arguments, trainer.log, means.threads)


def page_url(log: Path) -> str:
    """Where a bootstrap said that its page is."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.removeprefix("[page] ") for line in lines if line.startswith("[page] ")), "")


async def join_link(path: Path, bootstrap: Child) -> str | None:
    """The join link as soon as it is there; None when the bootstrap ends first or the deadline passes."""
    deadline = time.monotonic() + LINK_DEADLINE_S
    while not path.exists():
        if bootstrap.ended.done() or time.monotonic() > deadline:
            return None
        await asyncio.wait([bootstrap.ended], timeout=TICK_S)
    return path.read_text(encoding="utf-8").strip()


async def _until_over(cast: _Cast, seconds: float | None, watch: Watch) -> tuple[list[str], bool]:
    """Watch until all trainers ended, the time is up or something went wrong: the troubles, and whether it was time."""
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
            watch.say(f"{seconds:g} s of training are over; everybody saves and leaves")
            return [], True
    return [], False


def _troubles(cast: _Cast, silence_s: float) -> list[str]:
    """Why it makes no sense to go on, if so."""
    troubles = [
        f"{child.name} ended with status {child.status}; {said(child)}"
        for child in cast.trainers.values()
        if child.status
    ]
    if cast.bootstrap is not None and cast.bootstrap.status is not None:
        troubles.append(f"the bootstrap ended with status {cast.bootstrap.status}; {said(cast.bootstrap)}")
    if silence_s > SILENCE_S:
        troubles.append(f"no trainer has noted anything for {silence_s:.0f} s")
    return troubles


def said(child: Child) -> str:
    """The last that a process printed, for people."""
    words = processes.last_words(child.log)
    return f"the end of {child.log}:\n{words}" if words else f"{child.log} is empty"
