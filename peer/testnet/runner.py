"""Start the processes of a testnet, watch them, and stop them at the end or after a fault.

Every started child ends before ``conduct`` returns, also on an error or cancellation.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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

BOOTSTRAP = "the bootstrap"


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
class Options:
    """Options apart from the run."""

    threads: int
    """Threads of torch in each process."""
    seconds: float | None = None
    """Training time after which the trainers save and leave; None: until the run ends."""
    weights: Path | None = None
    page: str | None = None
    """Address at which the bootstrap shows the swarm; None for none."""
    devices: str | None = None
    """Devices of the first peer; None: one, as for the others."""


async def conduct(plan: Plan, options: Options, watch: Watch) -> Ending:
    """Run the testnet to its end. SIGTERM acts as Ctrl+C."""
    task = asyncio.current_task()
    assert task is not None  # asyncio.run made it
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    began, children, cut_short = time.monotonic(), dict[str, Child](), False
    try:
        troubles = await _start(plan, options, children, watch)
        if not troubles:
            troubles, cut_short = await _until_over(children, options.seconds, watch)
        trainers = {name: child for name, child in children.items() if name != BOOTSTRAP}
        await processes.stop(trainers.values(), SAVE_GRACE_S)
        watch.refresh()
        statuses = {name: child.ended.result() for name, child in trainers.items()}
        return Ending(statuses, tuple(troubles), cut_short, time.monotonic() - began)
    finally:
        await processes.stop(children.values(), LEAVE_GRACE_S)


async def _start(plan: Plan, options: Options, children: dict[str, Child], watch: Watch) -> list[str]:
    """Start all processes into ``children``; return troubles."""
    weights = [] if options.weights is None else ["--weights", str(options.weights)]
    page = [] if options.page is None else ["--page", options.page]
    is_short = options.seconds is not None and options.seconds < COMPILE_WORTH_S
    # At once: with the low priority of other compilers it would end after the testnet.
    variables = {} if is_short or compile_mode("auto", os.environ) == "off" else {COMPILE_VARIABLE: "on"}

    async def start(trainer: TrainerProcess, *arguments: str) -> None:
        words = [*arguments, "--home", str(trainer.home.path), *weights]
        children[trainer.name] = await processes.start(
            trainer.name, "peer", words, trainer.log, options.threads, variables=variables
        )

    if plan.solo is not None:  # it needs no bootstrap and can start first
        text = ["--mirror", str(plan.shards)] if plan.shards.exists() else []
        await start(plan.solo, *text)
    arguments = [str(plan.run), "--local", "--home", str(plan.bootstrap), *page]
    log = plan.bootstrap / "output.log"
    bootstrap = children[BOOTSTRAP] = await processes.start("bootstrap", "bootstrap", arguments, log, 1)
    link = await join_link(plan.bootstrap / "join-link.txt", bootstrap)
    if link is None:
        return [f"the bootstrap printed no join link; {said(bootstrap)}"]
    watch.say(f"the bootstrap is up; starting {len(plan.peers)} peers")
    share = ["--share"] if page else []
    if page:
        watch.say(f"watch them at {page_url(log)}")
    for each in plan.peers:
        devices = ["--devices", options.devices] if options.devices is not None and each is plan.peers[0] else []
        await start(each, link, "--local", "--nickname", each.name, *share, *devices)
    return []


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


async def _until_over(children: Mapping[str, Child], seconds: float | None, watch: Watch) -> tuple[list[str], bool]:
    """Watch until all trainers have ended, time is up or there is trouble. Returns troubles, and if time was up."""
    training_since: float | None = None
    trainers = [child.ended for name, child in children.items() if name != BOOTSTRAP]
    while running := [ended for ended in trainers if not ended.done()]:
        await asyncio.wait(running, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
        watch.refresh()
        now = time.monotonic()
        troubles = [
            f"{name} ended with status {child.status}; {said(child)}"
            for name, child in children.items()
            if child.status or (child.status is not None and name == BOOTSTRAP)
        ]
        if now - watch.heard_at > SILENCE_S:
            troubles.append(f"no trainer has written to its event log for {now - watch.heard_at:.0f} s")
        if troubles:
            return troubles, False
        if training_since is None and watch.all_begun:
            training_since = now
        if seconds is not None and training_since is not None and now - training_since >= seconds:
            watch.say(f"{seconds:g} s of training are over; all peers save and leave")
            return [], True
    return [], False


def said(child: Child) -> str:
    """Return the last output of a process, for people to read."""
    words = processes.last_words(child.log)
    return f"the end of {child.log}:\n{words}" if words else f"{child.log} is empty"
