"""How late the network thread runs while this process trains, and what lets it run sooner.

A training thread computes inner steps of a preset with as many threads as torch chooses, as a peer does, while a
network thread sleeps ``TICK_S`` at a time. Its lateness is the time past the end of each sleep. Variants alternate
within each round, so that other load hits all of them:

- ``as is``: what a peer does;
- ``switch``: the interpreter hands its lock over after a tenth of the default interval;
- ``thread fewer``: torch uses one thread fewer;
- ``nice``: the training threads run at a lower priority than the network thread (Linux).

    python -m bench.latency [--busy N] [--rounds N]      as JSON
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

import click
import torch

from bench.couple import language_model_task, manifest_of
from bench.network_thread import NetworkThread
from lab.busy import KINDS

TICK_S = 0.01
WINDOW_S = 4.0
NICE = 5
VARIANTS = ("as is", "switch", "thread fewer", "nice")


async def _lateness(until: float) -> list[float]:
    """Return the lateness of each sleep, in seconds, sorted."""
    late = []
    while (begin := time.monotonic()) < until:
        await asyncio.sleep(TICK_S)
        late.append(time.monotonic() - begin - TICK_S)
    return sorted(late)


def window(preset_name: str, variant: str) -> dict[str, float]:
    """Return lateness (ms; median, 99th percentile, largest) and inner steps per second of one window."""
    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    steps, stop = 0, threading.Event()

    def train() -> None:
        nonlocal steps
        if variant == "nice":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + NICE)
        torch.set_num_threads(max(1, threads - 1) if variant == "thread fewer" else threads)
        task = language_model_task(manifest_of(preset_name, {}))  # OpenMP's threads are created here, and inherit
        task.inner_step(0.0)
        ready.set()
        while not stop.is_set():
            task.inner_step(0.0)
            steps += 1

    if variant == "switch":
        sys.setswitchinterval(interval / 10)
    ready = threading.Event()
    trainer = threading.Thread(target=train)
    try:
        with NetworkThread() as network:
            trainer.start()
            ready.wait()
            steps = 0
            late = network.call(_lateness(time.monotonic() + WINDOW_S))
            made = steps
    finally:
        stop.set()
        trainer.join()
        sys.setswitchinterval(interval)
        torch.set_num_threads(threads)
    at = {"median_ms": 0.5, "p99_ms": 0.99, "largest_ms": 1.0}
    figures = {name: round(1000 * late[min(len(late) - 1, int(share * len(late)))], 2) for name, share in at.items()}
    return {**figures, "steps_per_s": round(made / WINDOW_S, 2)}


@click.command()
@click.option("--preset", "preset_name", default="demo", show_default=True)
@click.option("--busy", default=0, show_default=True, help="Programs of lab.busy beside it.")
@click.option("--rounds", default=3, show_default=True)
def main(preset_name: str, busy: int, rounds: int) -> None:
    """Print the figures of each variant and round as JSON."""
    beside = [subprocess.Popen([sys.executable, "-m", "lab.busy", KINDS[n % len(KINDS)]]) for n in range(busy)]
    try:
        figures: dict[str, list[Any]] = {variant: [] for variant in VARIANTS}
        for _ in range(rounds):
            for variant in VARIANTS:
                figures[variant].append(window(preset_name, variant))
        click.echo(
            json.dumps({"preset": preset_name, "busy": busy, "threads": torch.get_num_threads(), **figures}, indent=1)
        )
    finally:
        for each in beside:
            each.terminate()
            each.wait()


if __name__ == "__main__":
    main()
