"""The part of a testnet that runs inside: make the stage, conduct, count what is left, write ``course.json``.

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

from lab.cell import hear_sigterm
from lab.containers import Containers
from lab.freezing import marked
from lab.run_record import RunRecord
from lab.runner import conduct
from lab.script import Script, written
from lab.stages import Loopback, Namespaces, Stage, StageName
from p2ptrain.base import files
from p2ptrain.base.errors import DeviceError
from p2ptrain.base.text import PLAIN_WIDTH
from p2ptrain.net.p2pd.socket_folder import sweep
from p2ptrain.sim.testbed_fields import RealScenario
from peer.testnet.plan import laid_out
from peer.testnet.watch import Watch

MARK = "P2PTRAIN_TESTNET"
"""A variable that every process of a testnet inherits, so that what is left can be told from others' processes."""
LEFT_GRACE_S = 10.0
"""For grandchildren whose parents have just ended. A guess."""


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What was still there after everybody had ended."""

    processes: int
    sockets: int
    namespaces: list[str]
    """Those that were made; whoever started us looks whether they are gone."""


def play(out: Path, scenario: RealScenario, stage_name: StageName, threads: int, page: str = "") -> None:
    """Act the scenario out in ``out``, which ``testnet.plan.lay_out`` prepared; writes ``out/course.json``.

    ``page``: what ``lab.window`` found.

    KeyboardInterrupt: the owner stopped it, and everybody has ended.
    """
    script = written(scenario)
    plan = laid_out(out, [part.name for part in script.parts])
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    with Watch(plan.trainers, console) as watch:

        async def interruptible() -> tuple[RunRecord, Leftovers]:
            task = asyncio.current_task()
            assert task is not None  # asyncio.run made it
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
            hear_sigterm()
            stage, there = _stage(stage_name, script, scenario, out, page), 0
            try:
                course = await conduct(plan, script, stage, scenario.run.seconds, threads, watch)
            except BaseException:
                stage.close()
                raise
            made = _namespaces()
            with _told(course):
                there = stage.left()
            with _told(course):
                stage.close()
            return course, Leftovers(await _left_running() + there, sockets_left(Path(tempfile.gettempdir())), made)

        try:
            course, left = asyncio.run(interruptible())
        except (asyncio.CancelledError, KeyboardInterrupt):
            watch.say("interrupted; everything is stopped")
            raise KeyboardInterrupt from None
    document = {"course": asdict(course), "left": asdict(left)}
    files.replace(out / "course.json", json.dumps(document, indent=1).encode())


@contextlib.contextmanager
def _told(course: RunRecord) -> Iterator[None]:
    """A stage that fails in the end does not take away what was seen on it."""
    try:
        yield
    except DeviceError as error:
        course.troubles.append(f"in the end: {error.problem}")


def _stage(name: StageName, script: Script, scenario: RealScenario, out: Path, page: str) -> Stage:
    if name == "local":
        return Loopback(page)
    if name == "docker":
        return Containers(script, out, os.environ.get(MARK, ""), page)
    return Namespaces(script, scenario.partitions, scenario.run.seed)


async def _left_running() -> int:
    """Processes of this testnet beside ourselves, once those that are just ending have."""
    mark = os.environ.get(MARK, "")
    for _ in range(round(LEFT_GRACE_S / 0.1)):
        if not marked(MARK, mark):
            return 0
        await asyncio.sleep(0.1)
    return len(marked(MARK, mark))


def sockets_left(folder: Path) -> int:
    """Sockets below the folder that the next start would not sweep away. (Those of killed processes it does.)"""
    sweep(folder)
    return sum(stat.S_ISSOCK(path.lstat().st_mode) for path in folder.rglob("*"))


def _namespaces() -> list[str]:
    """The network namespaces that our descriptors hold."""
    held = [_target(each) for each in Path("/proc/self/fd").iterdir()]
    return sorted({each for each in held if each.startswith("net:")})


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def course_of(out: Path) -> dict[str, Any]:
    """What ``play`` wrote. FileNotFoundError where it did not come that far."""
    document: dict[str, Any] = json.loads((out / "course.json").read_bytes())
    return document
