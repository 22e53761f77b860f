"""Means, standard errors, and when one figure is better than another. Pure."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.evidence.layout import Best, Entry, Experiment

CLEAR = 2.0
"""Standard errors of the difference that make one figure better than another."""

EXACT = 1e-9
"""Relative difference below which two computed figures are equal."""

LOSSES = ("loss", "averaged_loss", "disagreement")
"""Figures that mean nothing for a model that diverged."""

GUESSING = math.log(256)
"""Nats per byte of a uniform prediction. A model that ends above it has diverged."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean over seeds with its standard error."""

    mean: float
    standard_error: float | None
    """None for a single run; 0 for computed figures."""
    by_seed: Mapping[int, float] = field(default_factory=dict, compare=False)
    """Empty for computed figures."""


@dataclass(frozen=True, slots=True)
class CellSummary:
    """All runs of one contender in one setting."""

    contender: str
    setting: str
    """As ``key`` returns it."""
    figures: Mapping[str, Estimate]
    """Without ``LOSSES`` if any run failed or diverged: a mean of the other runs would be biased."""
    failed: int = 0
    diverged: int = 0
    runs: int = 0


def estimate(values: Mapping[int | None, float]) -> Estimate:
    """Return the mean of values by seed; the seed None marks a computed figure."""
    if None in values:
        return Estimate(values[None], 0.0)
    numbers = list(values.values())
    error = statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else None
    return Estimate(statistics.fmean(numbers), error, {seed: each for seed, each in values.items() if seed is not None})


def paired(one: Estimate, other: Estimate) -> Estimate | None:
    """Return the mean ratio over common seeds, which share most of their noise; None with fewer than two."""
    common = [seed for seed in one.by_seed if seed in other.by_seed]
    return estimate({seed: one.by_seed[seed] / other.by_seed[seed] for seed in common}) if len(common) > 1 else None


def better(one: Estimate, other: Estimate, best: Best) -> bool:
    """Return whether ``one`` is better by more than two standard errors of the difference.

    The two are treated as independent. A single run is neither better nor worse than anything.
    """
    if one.standard_error is None or other.standard_error is None:
        return False
    gain = other.mean - one.mean if best == "low" else one.mean - other.mean
    return gain > max(CLEAR * math.hypot(one.standard_error, other.standard_error), EXACT * abs(other.mean))


def key(setting: Mapping[str, Any]) -> str:
    """Return a setting as a string that can be compared."""
    return json.dumps(setting, sort_keys=True)


def summaries(experiment: Experiment, entries: Sequence[Entry]) -> list[CellSummary]:
    """Return one summary for each contender in each setting."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    failures: dict[tuple[str, str], int] = {}
    for entry in experiment.derive([each for each in entries if "failure" not in each]):
        groups.setdefault((entry["contender"], key(entry["setting"])), []).append(entry)
    for entry in (each for each in entries if "failure" in each):
        place = (entry["contender"], key(entry["setting"]))
        failures[place] = failures.get(place, 0) + 1
    return [_summary(place, groups.get(place, []), failures.get(place, 0)) for place in {**groups, **failures}]


def _summary(place: tuple[str, str], group: Sequence[Entry], failed: int) -> CellSummary:
    values: dict[str, dict[int | None, float]] = {}
    diverged = 0
    for entry in group:
        headline = entry["headline"]
        diverged += "diverged" in headline or headline.get("loss", 0.0) > GUESSING
        for name, number in headline.items():
            values.setdefault(name, {})[entry.get("seed")] = number
    unusable = (*LOSSES, "diverged") if failed or diverged else ()
    figures = {name: estimate(each) for name, each in values.items() if name not in unusable}
    return CellSummary(*place, figures, failed, diverged, failed + len(group))


def by_place(found: Sequence[CellSummary]) -> dict[tuple[str, str], CellSummary]:
    """Return the summaries by contender and setting."""
    return {(each.contender, each.setting): each for each in found}
