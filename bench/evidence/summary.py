"""Means, standard errors, and when one figure is better than another. Pure.

"Better" is by more than two standard errors of the difference, the two figures taken as independent. A figure of one
seed has no standard error, and so is neither better nor worse than any.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bench.evidence.layout import Entry, Experiment

CLEAR = 2.0
"""Standard errors of the difference that make one figure better than another."""

EXACT = 1e-9
"""Relative difference below which two computed figures are the same."""


LOSSES = ("loss", "averaged_loss", "disagreement")
"""What says nothing of a model that diverged."""

GUESSING = math.log(256)
"""Nats a byte for whoever holds all bytes for equally likely. A model that ends above that has diverged."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with how well it is known."""

    mean: float
    standard_error: float | None
    """None for a single run; 0 for what is computed and not measured."""
    seeds: tuple[int, ...] = ()
    """Empty for what is computed."""
    values: tuple[float, ...] = field(default=(), compare=False)
    """One for each seed."""

    def as_json(self) -> dict[str, Any]:
        error = None if self.standard_error is None else float(f"{self.standard_error:.3g}")
        return {"mean": float(f"{self.mean:.6g}"), "standard_error": error, "seeds": list(self.seeds)}

    @classmethod
    def of_json(cls, document: Mapping[str, Any]) -> Figure:
        values = tuple(document.get("values", ()))
        return cls(document["mean"], document["standard_error"], tuple(document["seeds"]), values)


@dataclass(frozen=True, slots=True)
class Summary:
    """One contender in one setting."""

    contender: str
    setting: Mapping[str, Any]
    figures: Mapping[str, Figure]
    failed: int = 0
    """Runs that ended in an error, or that diverged. Where there are any, there are no ``LOSSES``: a mean of those
    that survived would speak for the others."""
    broken: int = 0
    """Of these, the runs that ended in an error."""
    runs: int = 0


def figure_of(values: Mapping[int | None, float]) -> Figure:
    """From the values by seed; the seed None stands for a figure that was computed."""
    if None in values:
        return Figure(values[None], 0.0)
    numbers = list(values.values())
    error = statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else None
    seeds = tuple(sorted(seed for seed in values if seed is not None))
    return Figure(statistics.fmean(numbers), error, seeds, tuple(values[seed] for seed in seeds))


def paired(one: Figure, other: Figure) -> Figure | None:
    """The ratio of two figures seed by seed: where both have a seed in common, most of its luck cancels."""
    mine, theirs = (dict(zip(each.seeds, each.values, strict=False)) for each in (one, other))
    ratios: dict[int | None, float] = {seed: mine[seed] / theirs[seed] for seed in mine if seed in theirs}
    return figure_of(ratios) if len(ratios) > 1 else None


def better(one: Figure, other: Figure, best: Literal["low", "high"]) -> bool:
    """Whether ``one`` is better than ``other`` by more than two standard errors of their difference."""
    if one.standard_error is None or other.standard_error is None:
        return False
    gain = other.mean - one.mean if best == "low" else one.mean - other.mean
    limit = CLEAR * math.hypot(one.standard_error, other.standard_error)
    return gain > max(limit, EXACT * abs(other.mean))


def summaries(experiment: Experiment, entries: Sequence[Entry]) -> list[Summary]:
    """Each contender in each setting, with all figures, in the order of the entries."""
    whole = [entry for entry in entries if "failure" not in entry]
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in experiment.derive(whole):
        groups.setdefault((entry["contender"], key(entry["setting"])), []).append(entry)
    broken = [(entry["contender"], key(entry["setting"])) for entry in entries if "failure" in entry]
    return [_summary(place, groups.get(place, []), broken.count(place)) for place in dict.fromkeys([*groups, *broken])]


def _summary(place: tuple[str, str], group: Sequence[Entry], broken: int) -> Summary:
    values: dict[str, dict[int | None, float]] = {}
    diverged = 0
    for entry in group:
        headline = entry["headline"]
        speaks = entry["setting"].get("learner", "lm") == "lm"  # other learners' losses are no nats
        if "diverged" in headline or (speaks and headline.get("loss", 0.0) > GUESSING):
            diverged += 1
            headline = {name: number for name, number in headline.items() if name not in ("diverged", *LOSSES)}
        for name, number in headline.items():
            values.setdefault(name, {})[entry.get("seed")] = number
    failed = broken + diverged
    figures = {name: figure_of(each) for name, each in values.items() if not (failed and name in LOSSES)}
    return Summary(place[0], json.loads(place[1]), figures, failed, broken, broken + len(group))


def key(setting: Mapping[str, Any]) -> str:
    """A setting as a word that can be compared."""
    return json.dumps(setting, sort_keys=True)


def document(
    found: Mapping[str, Sequence[Summary]], experiments: Mapping[str, Experiment], tuning: Mapping[str, Any] | None
) -> dict[str, Any]:
    """``docs/results/summary.json``: for each experiment its rows with the figures that the experiment names."""
    made: dict[str, Any] = {"version": 1}
    made["tuning"] = {name: each["chosen"] for name, each in (tuning or {}).get("contenders", {}).items()}
    for name, experiment in experiments.items():
        made[name] = [_row(each, experiment) for each in found.get(name, ())]
    return made


def _row(summary: Summary, experiment: Experiment) -> dict[str, Any]:
    figures = {name: summary.figures[name].as_json() for name in experiment.figures if name in summary.figures}
    if (loss := summary.figures.get("loss")) is not None and "loss" in figures and len(loss.seeds) > 1:
        figures["loss"]["values"] = [float(f"{each:.6g}") for each in loss.values]
    row = {"contender": summary.contender, "setting": dict(summary.setting), "figures": figures}
    return {**row, "failed": summary.failed} if summary.failed else row
