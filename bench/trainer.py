"""Cost of gossip for a trainer with a core of its own.

A real learner trains a real language model while a real network exchanges its weights (``bench.couple``). Windows of
training with exchanges alternate with windows without any, so that other load hits both.
Two costs come out, in seconds of the trainer for each exchange:

- ``blocked``: what the trainer itself does for an exchange, taking the displacement in (``Learner.blocked_s``, less
  what showing took);
- ``lost``: the whole difference between the two kinds of window. It holds ``blocked`` and what the network thread takes
  from the trainer besides: the interpreter lock, memory bandwidth, caches.

A third is the same in both kinds of window, and is seconds of each inner phase: ``showing``, the copies of the fast
weights for partners, where the recipe mixes those.

**What is shortened.** A full inner step of llama-15m (16 sequences of 256 tokens) takes seconds on one core, and an
outer step minutes. Its windows use one sequence a step and few steps an outer step, so exchanges come far more often
than in a real run. The cost of an exchange depends on neither. The share of a real inner phase is that cost times the
preset's exchanges per outer step (those a peer starts, and as many that it answers), over H full inner steps, whose
time is measured too. The demo preset runs as it is.

    python -m bench.trainer        both presets, as JSON
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.couple import CPU, Couple, can_pin, couple, language_model_task, manifest_of, on_core
from p2ptrain.manifest import Manifest
from p2ptrain.train import accelerator

REQUIRED_SHARE = 0.02
ENDLESS_TOKENS = 10**9
"""More tokens than the windows use, so that the run does not end."""
WARM_UPS = 5
"""Windows before the measurement, at most: until the two have exchanged."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Size and number of the windows of a preset."""

    sequences_per_step: int
    inner_steps: int
    """H, in place of the preset's."""
    phases: int
    """Inner phases of a window; one outer step's exchanges are due at the start of each."""
    pairs: int


WINDOWS: Mapping[str, Windows] = {
    "llama-15m": Windows(sequences_per_step=1, inner_steps=8, phases=2, pairs=5),
    "demo": Windows(sequences_per_step=2, inner_steps=20, phases=8, pairs=6),
}


@dataclass(frozen=True, slots=True)
class TimedWindow:
    """Duration and cost of one window of training."""

    seconds: float
    blocked_s: float
    exchanges: int
    """Exchanges applied before the window ended. Those in progress are not counted, which overstates each cost."""


def measure(windows: Mapping[str, Windows] = WINDOWS) -> dict[str, Any]:
    """Return the costs of each preset."""
    return {name: measure_preset(name, each) for name, each in windows.items()}


def measure_preset(name: str, windows: Windows, device: torch.device = CPU) -> dict[str, Any]:
    original = manifest_of(name, {})
    is_short = windows.sequences_per_step != original.training.sequences_per_step
    full_step_s = _full_step_s(original, device) if is_short else None
    changes = {
        "training.sequences_per_step": windows.sequences_per_step,
        "outer.inner_steps": windows.inner_steps,
        "run.tokens": ENDLESS_TOKENS,
    }
    has_a_core = can_pin()
    with tempfile.TemporaryDirectory() as folder, couple(name, changes, Path(folder), device) as pair:
        for _ in range(WARM_UPS):
            _train(pair, windows, exchanging=True)
            if pair.taken_in:
                break
        both = [_alternate(pair, windows, number) for number in range(windows.pairs)]
        counters = pair.ours.core.counters
        return {
            **_costs(original, windows, both, full_step_s),
            "parameters": len(pair.ours.learner.task.theta),
            "sent_bytes_per_exchange": counters.sent_bytes / max(counters.exchanges_ok, 1),
            "exchanges_failed": counters.exchanges_failed,
            "trainer_has_a_core": has_a_core,
        }


def _alternate(pair: Couple, windows: Windows, number: int) -> tuple[TimedWindow, TimedWindow]:
    """Return one window with exchanges and one without; which comes first alternates."""
    if number % 2:
        quiet = _train(pair, windows, exchanging=False)
        return _train(pair, windows, exchanging=True), quiet
    busy = _train(pair, windows, exchanging=True)
    return busy, _train(pair, windows, exchanging=False)


def _train(pair: Couple, windows: Windows, exchanging: bool) -> TimedWindow:
    """Train one window, then wait for exchanges in progress outside of its time."""
    blocked_s, taken_in = pair.ours.learner.blocked_s, pair.taken_in
    begin = time.perf_counter()
    for _ in range(windows.phases):
        if exchanging:
            pair.exchange()
        for _ in range(windows.inner_steps):
            pair.advance()
    seconds = time.perf_counter() - begin
    window = TimedWindow(seconds, pair.ours.learner.blocked_s - blocked_s, pair.taken_in - taken_in)
    pair.settle()
    return window


def _full_step_s(manifest: Manifest, device: torch.device) -> float:
    """Return the seconds of one inner step of the preset: the shorter of two."""
    task = language_model_task(manifest, device)
    seconds = []
    with on_core(trainer=True):
        for _ in range(2):
            begin = time.perf_counter()
            task.inner_step(0.0)
            accelerator.synchronize(device)
            seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _costs(
    original: Manifest,
    windows: Windows,
    both: list[tuple[TimedWindow, TimedWindow]],  # with exchanges, without
    full_step_s: float | None,  # None: the windows' steps are the preset's
) -> dict[str, Any]:
    """Return the costs per exchange, and their shares of an inner phase of the preset."""
    exchanges = sum(busy.exchanges for busy, _ in both)
    if not exchanges:
        raise RuntimeError("no exchange came through: there is nothing to measure")
    per_window = exchanges / len(both)
    quiet_s = statistics.median(quiet.seconds for _, quiet in both)
    step_s = quiet_s / (windows.inner_steps * windows.phases)
    ratios = [busy.seconds / quiet.seconds for busy, quiet in both]
    shown_s = (
        statistics.median(quiet.blocked_s for _, quiet in both) / windows.phases
    )  # windows without exchanges only publish
    blocked_s = sum(busy.blocked_s - quiet.blocked_s for busy, quiet in both) / exchanges
    lost_s = (statistics.median(ratios) - 1) * quiet_s / per_window
    preset_step_s = step_s if full_step_s is None else full_step_s
    phase_s = original.outer.inner_steps * preset_step_s
    per_phase = 2 * original.outer.exchanges_per_step  # a peer starts so many and answers about as many
    return {
        "sequences_per_step": windows.sequences_per_step,
        "inner_steps": windows.inner_steps,
        "pairs": windows.pairs,
        "inner_step_s": step_s,
        "exchanges": exchanges,
        "exchanges_per_outer_step": per_window / windows.phases,
        "time_ratio": statistics.median(ratios),
        "time_ratios": ratios,
        "blocked_s_per_exchange": blocked_s,
        "lost_s_per_exchange": lost_s,
        "showing_s_per_phase": shown_s,
        "preset_inner_step_s": preset_step_s,
        "preset_inner_phase_s": phase_s,
        "preset_exchanges_per_outer_step": per_phase,
        "preset_blocked_share": (per_phase * blocked_s + shown_s) / phase_s,
        "preset_lost_share": (per_phase * lost_s + shown_s) / phase_s,
        "required_share": REQUIRED_SHARE,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(), indent=1) + "\n")
