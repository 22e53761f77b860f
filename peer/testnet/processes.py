"""Children of a testnet: processes that write to a log, outlive no one, and are ended by their own ids alone.

When the testnet dies by SIGKILL they save and leave as if their owner had asked (``p2ptrain.base.launcher``).
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
"""The folder that this process's packages are in; in a clone also the laboratory's."""

Wrap = Callable[..., Sequence[str]]


@dataclass(frozen=True, slots=True)
class Child:
    """A process that we started."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    ended: asyncio.Task[int]
    """Done when the process is; its exit status, negative for the signal that ended it."""

    @property
    def status(self) -> int | None:
        """None while it runs."""
        return self.ended.result() if self.ended.done() else None

    def terminate(self) -> None:
        """Ask it to save and leave."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)


async def start(
    name: str, module: str, arguments: Sequence[str], log: Path, threads: int, inside: Wrap = lambda *command: command
) -> Child:
    """Run ``python -m module arguments`` with so many threads of torch; everything it prints goes to ``log``.

    Args:
        inside: the command that runs a command somewhere else, in the same process: on a host of the laboratory.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    # -P: a folder here that is called like a package of ours, such as a clone, is no package of ours.
    command = launched(*inside(sys.executable, "-P", "-m", module, *arguments))
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env=_environment(os.environ, threads),
        )
    return Child(name, process, log, asyncio.ensure_future(process.wait()))


async def stop(children: Collection[Child], grace_s: float) -> None:
    """End all of them: SIGTERM, and SIGKILL for those that are still there after the grace. Cancelled: at once."""
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
    """The end of what a process printed: where its error is."""
    try:
        text = log.read_bytes()[-8192:].decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])


def _environment(ours: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return our environment with the packages of this process, and threads for several processes on one machine."""
    packages = os.pathsep.join(filter(None, [ours.get("PYTHONPATH", ""), str(PACKAGES)]))
    limits = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return {**ours, **limits, "PYTHONPATH": packages, "PYTHONUNBUFFERED": "1"}
