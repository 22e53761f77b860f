"""Child processes of a testnet: each writes to a log and ends with the testnet.

If the testnet is killed by SIGKILL, the children save and leave as on SIGTERM (``p2ptrain.base.launcher``).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.base.launcher import launched

PACKAGES = Path(__file__).resolve().parents[2]
"""Folder that contains this process's packages, in a clone also the laboratory."""

Wrap = Callable[..., Sequence[str]]


@dataclass(frozen=True, slots=True)
class Child:
    """A started process."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    ended: asyncio.Task[int]
    """Completes with the process; its exit status, or minus the signal that ended it."""

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs."""
        return self.ended.result() if self.ended.done() else None

    def terminate(self) -> None:
        """Ask it to save and leave."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)


async def start(
    name: str,
    module: str,
    arguments: Sequence[str],
    log: Path,
    threads: int,
    inside: Wrap = lambda *command: command,
    variables: Mapping[str, str] = {},
) -> Child:
    """Run ``python -m module arguments`` with ``threads`` threads of torch, its output appended to ``log``.

    Args:
        inside: wraps the command in one that runs it elsewhere in the same process, on a host of the laboratory.
        variables: of its environment, beside ours.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    # -P: a folder in the working directory that has the name of one of our packages must not shadow it.
    command = launched(*inside(sys.executable, "-P", "-m", module, *arguments), udp=True, **variables)
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env=environment(os.environ, threads),
        )
    return Child(name, process, log, asyncio.ensure_future(process.wait()))


async def stop(children: Collection[Child], grace_s: float) -> None:
    """End all children by SIGTERM, and after the grace by SIGKILL. Cancellation sends SIGKILL at once."""
    try:
        for child in children:
            child.terminate()
        if running := [child.ended for child in children if not child.ended.done()]:
            await asyncio.wait(running, timeout=grace_s)
    finally:
        for child in children:
            if child.process.returncode is None:
                child.process.kill()
    if children:
        await asyncio.wait([child.ended for child in children])


def last_words(log: Path, lines: int = 6) -> str:
    """Return the last lines of a process's output, where its error is."""
    try:
        text = log.read_bytes()[-8192:].decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])


def environment(ours: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return our environment with the path of our packages and the limit on threads."""
    packages = os.pathsep.join(filter(None, [ours.get("PYTHONPATH", ""), str(PACKAGES)]))
    limits = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return {**ours, **limits, "PYTHONPATH": packages, "PYTHONUNBUFFERED": "1"}
