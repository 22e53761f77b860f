"""Inside of a testnet: makes the stage, runs the script, counts leftovers, writes ``course.json``.

In stage ``namespaces`` this is the init of a cell (``lab.cell``), started as ``python -m lab``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from lab.cell import unblock_sigterm
from lab.containers import Containers
from lab.run_record import RunRecord
from lab.runner import run_script
from lab.scenario import RealScenario
from lab.script import Script, script_of
from lab.stages import Loopback, Namespaces, Stage, StageName
from lab.suspension import processes_with
from p2ptrain.base import files
from p2ptrain.base.errors import DeviceError
from p2ptrain.base.text import PLAIN_WIDTH
from p2ptrain.manifest import load_run
from p2ptrain.net.p2pd.socket_folder import sweep
from peer.testnet.plan import Plan, trainer
from peer.testnet.watch import Watch

MARK = "P2PTRAIN_TESTNET"
"""Variable that all processes of a testnet inherit, so that leftovers can be distinguished from other processes."""
LEFT_GRACE_S = 10.0
"""Time for grandchildren to end after their parents. Guess: the longest wait of lab runs would settle it."""


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What still existed after all processes should have ended."""

    processes: int
    sockets: int
    namespaces: list[str]
    """Network namespaces that were made; the outside process checks whether they are gone."""


def run_inside(out: Path, scenario: RealScenario, stage_name: StageName, threads: int, page: str = "") -> None:
    """Run the scenario in ``out``, which ``testnet.plan.lay_out`` prepared, and write ``out/course.json``.

    Raises KeyboardInterrupt after an interrupt, once all processes have ended.

    Args:
        page: result of ``lab.stages.page_argument``.
    """
    script = script_of(scenario)
    plan = laid_out(out, script)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    watch = Watch(plan.trainers, console)

    async def interruptible() -> tuple[RunRecord, Leftovers]:
        task = asyncio.current_task()
        assert task is not None  # asyncio.run creates it
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        unblock_sigterm()
        stage, there = _stage(stage_name, script, scenario, out, page), 0
        try:
            record = await run_script(plan, script, stage, scenario.run.seconds, threads, watch)
        except BaseException:
            stage.close()
            raise
        made = _namespaces()
        with _recording_troubles(record):
            there = stage.count_left()
        with _recording_troubles(record):
            stage.close()
        return record, Leftovers(await _count_running() + there, sockets_left(Path(tempfile.gettempdir())), made)

    try:
        record, left = asyncio.run(interruptible())
    except (asyncio.CancelledError, KeyboardInterrupt):
        watch.say("interrupted; all processes have ended")
        raise KeyboardInterrupt from None
    document = {"course": asdict(record), "left": asdict(left)}
    files.replace(out / "course.json", json.dumps(document, indent=1).encode())


def laid_out(out: Path, script: Script) -> Plan:
    """Return the plan that ``testnet.plan.lay_out`` created there for the peers of a script."""
    return Plan(out, load_run(out / "run"), tuple(trainer(out, peer.name) for peer in script.peers))


@contextlib.contextmanager
def _recording_troubles(record: RunRecord) -> Iterator[None]:
    """Record a DeviceError of the block as a trouble, so that the run record is kept."""
    try:
        yield
    except DeviceError as error:
        record.troubles.append(f"at the end: {error.problem}")


def _stage(name: StageName, script: Script, scenario: RealScenario, out: Path, page: str) -> Stage:
    if name == "local":
        return Loopback(page)
    if name == "docker":
        return Containers(script, out, os.environ.get(MARK, ""), page)
    return Namespaces(script, scenario.partitions, scenario.run.seed, scenario.bootstrap.up_mbit_s)


async def _count_running() -> int:
    """Return the number of processes of this testnet besides this one, after waiting for those that are ending."""
    mark = os.environ.get(MARK, "")
    for _ in range(round(LEFT_GRACE_S / 0.1)):
        if not processes_with(MARK, mark):
            return 0
        await asyncio.sleep(0.1)
    return len(processes_with(MARK, mark))


def sockets_left(folder: Path) -> int:
    """Count sockets below a folder that the next start would not remove. It removes those of killed processes."""
    sweep(folder)
    return sum(stat.S_ISSOCK(path.lstat().st_mode) for path in folder.rglob("*"))


def _namespaces() -> list[str]:
    """Return the network namespaces that our descriptors hold."""
    held = [_target(each) for each in Path("/proc/self/fd").iterdir()]
    return sorted({each for each in held if each.startswith("net:")})


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def read_run(out: Path) -> dict[str, Any]:
    """Read what ``run_inside`` wrote. Raises FileNotFoundError if it did not come that far."""
    document: dict[str, Any] = json.loads((out / "course.json").read_bytes())
    return document
