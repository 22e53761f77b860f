"""How soon a run ends, and how soon its peers reach losses, compared with one peer alone. Pure.

A peer's curve is the mean training loss of its inner phases over time, averaged over a window, because one is noisy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import mean
from typing import Any

from lab.artifacts import Artifacts

WINDOW = 5
"""Progress notes, one every two seconds, whose losses are averaged."""
RUNGS = 5
"""Losses at which times are compared, evenly spaced."""
HIGHEST = 0.1
"""Share of the lone peer's time at which the highest loss is read: before, the warm-up decides."""

Curve = Sequence[Sequence[float]]
"""Triples of seconds since the peer's first inner step, smoothed loss, and the peer's own tokens."""


def run_figures(everybody: Sequence[Artifacts]) -> dict[str, Any]:
    """Return the figures of how long a run took and how far it came; adversarial peers count here."""
    began = min((each.first("first inner step", 0.0) or math.inf for each in everybody), default=math.inf)
    ends = [each.trained_at() for each in everybody if math.isfinite(each.trained_at())]
    tokens = sum(int((each.summary or {}).get("tokens") or 0) for each in everybody)
    budget = max((each.most("progress", "run_tokens") or 0.0 for each in everybody), default=0.0)
    return {
        "training_s": max(ends) - began if ends and math.isfinite(began) else None,
        "ends_within_s": max(ends) - min(ends) if ends else None,
        "tokens_share": tokens / budget if budget else None,
    }


def training_cpu_s(artifacts: Artifacts) -> float | None:
    """Return the CPU seconds of the peer's process from its first inner step to the run's end; None if it restarted.

    Unlike seconds they do not depend on other programs.
    """
    notes = [*artifacts.of("first inner step"), *artifacts.of("trained")]
    used = [float(each["cpu_s"]) for each in notes if "cpu_s" in each]
    return used[1] - used[0] if len(used) == 2 else None


def curve(artifacts: Artifacts) -> list[tuple[float, float, float]]:
    """Return a peer's curve, over all its processes."""
    began = artifacts.first("first inner step", 0.0)
    notes = [(each, each.loss) for each in artifacts.progress() if each.loss is not None]
    if began is None:
        return []
    return [
        (note.time - began, mean(loss for _, loss in notes[max(0, place + 1 - WINDOW) : place + 1]), float(note.tokens))
        for place, (note, _) in enumerate(notes)
    ]


def told_shortened_s(artifacts: Artifacts) -> float:
    """Return the largest time by which the peer told its owner that it shortens the run; 0 if it never did."""
    told = (note.get("shortened_s") for note in artifacts.notes if note.get("kind") == "progress")
    return max((float(each) for each in told if each is not None), default=0.0)


def times_to_losses(figures: Mapping[str, Any], alone: Mapping[str, Any]) -> dict[str, Any]:
    """Return the time of each group's last peer to each of RUNGS losses over the lone peer's: mean and largest.

    ``work`` is the mean for own tokens instead of times, which other programs on the computer do not change. The
    losses lie between the lone peer's early one and the highest final one, so that everybody reaches them.

    Args:
        figures: of a run, with ``peers`` and ``groups``.
        alone: of a run of which the first peer is compared.
    """
    curves = {name: each["curve"] for name, each in figures["peers"].items() if each["stayed"] and each["curve"]}
    lone: Curve = next((each["curve"] for each in alone["peers"].values() if each.get("curve")), [])
    if not curves or not lone:
        return {}
    high = next(loss for seconds, loss, _ in lone if seconds >= HIGHEST * lone[-1][0])
    low = max(min(loss for _, loss, _ in each) for each in (lone, *curves.values()))
    if low >= high:
        return {}
    rungs = [high + (low - high) * step / RUNGS for step in range(1, RUNGS + 1)]
    found: dict[str, Any] = {}
    for group in figures["groups"]:
        own = [each for name, each in curves.items() if figures["peers"][name]["group"] == group]
        if own:
            times, works = (
                [max(_until(each, rung, column) for each in own) / _until(lone, rung, column) for rung in rungs]
                for column in (0, 2)
            )
            found[group] = {"mean": mean(times), "largest": max(times), "work": mean(works)}
    return found


def _until(curve: Curve, loss: float, column: int) -> float:
    """Return a column where a curve first falls to a loss, between its points; at its end if rounding hides that."""
    for before, after in pairwise(curve):
        if after[1] <= loss < before[1]:
            share = (before[1] - loss) / (before[1] - after[1])
            return before[column] + (after[column] - before[column]) * share
        if before[1] <= loss:
            return before[column]
    return curve[-1][column]
