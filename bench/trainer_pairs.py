"""Compare two checkouts: short testnets of two peers by each in turn, and what a peer costs, one JSON line a run.

``python -m bench.trainer_pairs PRESET SECONDS PAIRS NAME=FOLDER NAME=FOLDER`` on an idle machine; each folder has its
own ``.venv``. ``--compile`` compiles the pass; without it both train eagerly.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import psutil

PEER = "peer-1"
"""The peer whose memory, first step and exchanges are measured."""
LOOK_S = 1.0


def main(preset: str, seconds: str, pairs: str, *arms: str, compiles: bool = False) -> None:
    folders = [arm.split("=", 1) for arm in arms]
    for number in range(int(pairs)):
        for name, folder in folders if number % 2 == 0 else folders[::-1]:
            out = Path("out/pairs").absolute() / f"{preset}-{name}-{number}"
            row = {"arm": name, **measure(preset, seconds, Path(folder), out, compiles)}
            click.echo(json.dumps(row))


def measure(preset: str, seconds: str, checkout: Path, out: Path, compiles: bool) -> dict[str, Any]:
    """Run one testnet by a checkout; return figures of its peers."""
    command = (str(checkout / ".venv/bin/p2ptrain"), "testnet", "--preset", preset, "--peers", "2", "--no-solo")
    environment = {**os.environ, "P2PTRAIN_COMPILE": "auto" if compiles else "off"}
    process = subprocess.Popen(
        (*command, "--seconds", seconds, "--out", str(out)),
        cwd=checkout,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    memory, began_at = 0.0, float("inf")
    while process.poll() is None:
        for peer in _peers(process.pid):
            memory, began_at = max(memory, _memory_mb(peer)), min(began_at, peer.create_time())
        time.sleep(LOOK_S)
    peers = json.loads((out / "summary.json").read_text())["peers"]
    notes = [json.loads(line) for line in (out / PEER / "events.jsonl").read_text().splitlines()]
    exchanges = [1e3 * note["seconds"] for note in notes if note["kind"] == "exchanged"]
    first = next(note for note in notes if note["kind"] == "first inner step")
    return {
        "tokens_per_s": round(sum(peer["tokens_per_s"] for peer in peers)),
        "blocked": round(statistics.mean(peer["blocked_fraction"] for peer in peers), 4),
        "memory_mb": round(memory),
        "first_step_s": round(first["time"] - began_at, 2),
        "exchange_ms": round(statistics.median(exchanges), 1) if exchanges else None,
        "exchanges": sum(peer["exchanges_ok"] for peer in peers),
        "loss": [round(peer["val_loss_last"], 4) for peer in peers],
    }


def _peers(testnet: int) -> Iterator[psutil.Process]:
    """Return the process of the measured peer, once it has begun."""
    try:
        for child in psutil.Process(testnet).children():
            command = child.cmdline()
            if "peer" in command and any(each.endswith(PEER) for each in command):
                yield child
    except psutil.Error:
        return


def _memory_mb(peer: psutil.Process) -> float:
    """Return the proportional memory of a peer and its children, without p2pd."""
    total = 0
    try:
        for process in (peer, *peer.children(recursive=True)):
            if "p2pd" in process.name():
                continue
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    except (OSError, psutil.Error):
        return 0.0  # one ended meanwhile
    return total / 1024


if __name__ == "__main__":
    given = [each for each in sys.argv[1:] if each != "--compile"]
    if len(given) != 5:
        sys.exit(__doc__)
    main(*given, compiles="--compile" in sys.argv)
