"""Memory, seconds to the first step and first exchange, and bytes of a demo peer.

A bootstrap and two peers of preset ``demo`` run as processes on this machine. The first peer starts in an empty swarm
with an empty token cache; the second joins it and downloads weights if the first is far enough ahead. Seconds count
from the start of the process; most of them are imports.

Memory is the high-water mark of resident memory (VmHWM), of the peer's own process and of its p2pd, read until they
end, so that it covers start, training, exchanges, evaluation and saving.

    python -m bench.peer        as JSON
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from p2ptrain.manifest import create_run, sign_run
from peer.testnet import processes
from peer.testnet.processes import Child

TRAINING_S = 30.0
"""Time after the second peer's first exchange: enough for dozens of exchanges."""
DEADLINE_S = 180.0
"""Timeout of each wait."""
TICK_S = 0.1
STOP_GRACE_S = 60.0


@dataclass(slots=True)
class Watched:
    """Process of a peer, its home, and the peak memory of the process and its children."""

    child: Child
    home: Path
    started_at: float
    """Seconds since the epoch, as its event log counts."""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """Name of a process -> its high-water mark."""

    def look(self) -> None:
        """Read the high-water marks of live processes."""
        try:
            own = psutil.Process(self.child.process.pid)
            family = [("peer", own), *((each.name(), each) for each in own.children(recursive=True))]
            for name, process in family:
                if name not in ("peer", "p2pd"):  # the launcher, which is about to become p2pd
                    continue
                self.peak_bytes[name] = max(self.peak_bytes.get(name, 0), _high_water(process))
        except psutil.Error:  # it has ended
            return

    def notes(self, kind: str) -> list[Mapping[str, Any]]:
        """Return the notes of this kind in the event log."""
        try:
            lines = (self.home / "events.jsonl").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        return [note for line in lines if line.endswith("}") and (note := json.loads(line))["kind"] == kind]

    def seconds_to(self, kind: str) -> float:
        return float(self.notes(kind)[0]["time"]) - self.started_at


def measure(training_s: float = TRAINING_S) -> dict[str, Any]:
    """Return the figures of the module."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")  # the first peer builds its own token stream
        return asyncio.run(_measure(Path(folder), training_s))


async def _measure(folder: Path, training_s: float) -> dict[str, Any]:
    run = folder / "run"
    create_run(run, "demo")
    sign_run(run)
    children: list[Child] = []
    try:
        place = folder / "bootstrap"
        arguments = [str(run), "--local", "--home", str(place)]
        children.append(await processes.start("bootstrap", "bootstrap", arguments, folder / "bootstrap.log", 1))
        link_file = place / "join-link.txt"
        await _until(link_file.exists, children)
        link = link_file.read_text(encoding="utf-8").strip()
        first = await _peer("first", link, folder, children)
        await _until(lambda: bool(first.notes("first inner step")), children, first)
        second = await _peer("second", link, folder, children)
        await _until(lambda: bool(first.notes("exchanged") and second.notes("exchanged")), children, first, second)
        ends_at = time.monotonic() + training_s
        await _until(lambda: time.monotonic() >= ends_at, children, first, second)
        for each in (first, second):
            each.child.terminate()
        await _until(lambda: first.child.ended.done() and second.child.ended.done(), [], first, second)
    finally:
        await processes.stop(children, STOP_GRACE_S)
    joining = {
        "seconds_to_first_inner_step": round(second.seconds_to("first inner step"), 2),
        "seconds_to_first_exchange": round(second.seconds_to("exchanged"), 2),
        "pulled_weights": bool(second.notes("caught up")),
    }
    return {**_figures(first), "joining": joining}


def _figures(first: Watched) -> dict[str, Any]:
    summary = json.loads((first.home / "summary.json").read_bytes())
    exchanges = first.notes("exchanged")
    parameters = int(first.notes("started")[0]["parameters"])
    sent_bytes = sum(int(note["sent_bytes"]) for note in exchanges) / len(exchanges)
    return {
        "parameters": parameters,
        "peak_memory_mb": {name: round(peak / 1e6, 1) for name, peak in sorted(first.peak_bytes.items())},
        "empty_swarm": {"seconds_to_first_inner_step": round(first.seconds_to("first inner step"), 2)},
        "exchanges": len(exchanges),
        "exchanges_failed": summary["exchanges_failed"],
        "sent_bytes_per_exchange": sent_bytes,
        "sent_bytes_per_parameter": sent_bytes / parameters,
        "blocked_fraction": summary["blocked_fraction"],
    }


async def _peer(name: str, link: str, folder: Path, children: list[Child]) -> Watched:
    home = folder / name
    started_at = time.time()
    child = await processes.start(
        name, "peer", [link, "--local", "--home", str(home), "--nickname", name], folder / f"{name}.log", 1
    )
    children.append(child)
    return Watched(child, home, started_at)


async def _until(is_so: Callable[[], bool], needed: list[Child], *watched: Watched) -> None:
    """Watch the processes until a condition holds. Raises RuntimeError on timeout or if a needed process ended."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        for each in watched:
            each.look()
        for child in needed:
            if child.ended.done():
                raise RuntimeError(f"{child.name} ended early:\n{processes.last_words(child.log)}")
        if time.monotonic() > deadline:
            said = "\n".join(f"{each.child.name}: {processes.last_words(each.child.log)}" for each in watched)
            raise RuntimeError(f"nothing happened for {DEADLINE_S:.0f} s\n{said}")
        await asyncio.sleep(TICK_S)


def _high_water(process: psutil.Process) -> int:
    """Return the high-water mark in bytes; without one (not Linux), the current resident memory."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return int(process.memory_info().rss)
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(), indent=1) + "\n")
