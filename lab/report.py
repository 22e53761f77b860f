"""Report of a scenario: its figures (``lab.figures``) compared with its limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lab.scenario import Limit, RealScenario
from lab.script import describe

ALWAYS = {
    "unexpected_exits": Limit(at_most=0),
    "left_processes": Limit(at_most=0),
    "left_sockets": Limit(at_most=0),
    "left_namespaces": Limit(at_most=0),
}
"""Limits of every scenario."""


@dataclass(frozen=True, slots=True)
class ScenarioVerdict:
    """Report of one scenario."""

    scenario: str
    stage: str
    passed: bool
    figures: dict[str, Any]
    limits: dict[str, dict[str, Any]]
    """Each limit's bounds, the figure found, and whether it was kept."""
    faults: list[str]
    """Why the scenario did not pass."""
    course: list[str]
    """Events, in order."""

    def document(self) -> dict[str, Any]:
        return asdict(self)

    def with_faults(self, faults: Sequence[str]) -> ScenarioVerdict:
        """Return the verdict with more faults."""
        return replace(self, passed=self.passed and not faults, faults=[*self.faults, *faults])


def comparison_failed(title: str, stage: str, figures: Mapping[str, Any], record: Mapping[str, Any]) -> ScenarioVerdict:
    """Return the verdict if the undisturbed run failed, so that the scenario itself was not run."""
    troubles = [f"undisturbed: {trouble}" for trouble in record["troubles"]]
    return ScenarioVerdict(title, stage, False, {"peers": {}, "undisturbed": figures}, {}, troubles, _happened(record))


def not_run(title: str, stage: str, why: str) -> ScenarioVerdict:
    """Return the verdict of a scenario that could not be run or measured."""
    return ScenarioVerdict(title, stage, False, {"peers": {}}, {}, [why], [])


def verdict_of(
    title: str,
    stage: str,
    scenario: RealScenario,
    figures: Mapping[str, Any],
    record: Mapping[str, Any],
) -> ScenarioVerdict:
    """Compare the figures with the scenario's limits and those that always hold."""
    limits: dict[str, dict[str, Any]] = {}
    troubles = list(record["troubles"])
    for name, limit in {**ALWAYS, **scenario.limits}.items():
        found = figure(figures, name)
        kept = found is not None and limit.holds(found)
        limits[name] = {**limit.model_dump(exclude_none=True), "found": found, "kept": kept}
        if not kept:
            bounds = ", ".join(f"{word.replace('_', ' ')} {bound:g}" for word, bound in _bounds(limit))
            shown = "no such figure" if found is None else f"{found:g}"
            troubles.append(f"{name}: {shown}; required: {bounds}")
    return ScenarioVerdict(title, stage, not troubles, dict(figures), limits, troubles, _happened(record))


def _happened(record: Mapping[str, Any]) -> list[str]:
    happened = [f"{act['at_s']:g} s: {describe(act['who'], act['do'])}" for act in record["done"]]
    return happened + [f"missed: {each}" for each in record["missed"]]


def growth_lines(figures: Mapping[str, Any]) -> list[str]:
    """Return a line for each watched process: its values from once settled to the end."""
    if figures.get("memory_growth") is None:  # no process was watched for long enough
        return []
    return [
        f"{name}: "
        + ", ".join(f"{seen.replace('_', ' ')} {first:,.0f} to {last:,.0f}" for seen, (first, last) in those.items())
        for name, those in figures["watched"].items()
    ]


def json_safe(tree: Any) -> Any:
    """Return a tree with null in place of numbers that JSON does not have."""
    if isinstance(tree, Mapping):
        return {str(name): json_safe(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [json_safe(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def figure(figures: Mapping[str, Any], name: str) -> float | None:
    """Return a number by its dotted name; True is 1. None if it does not exist or was not measured."""
    found = _leaf(figures, name)
    if not isinstance(found, int | float) or not math.isfinite(found):
        return None
    return float(found)


def _leaf(tree: Any, name: str) -> Any:
    """Return the value at a dotted name. Names of peers may contain dots (``seat-1-1.2``), so the longest match
    counts.
    """
    if not name or not isinstance(tree, Mapping):
        return tree if not name else None
    steps = name.split(".")
    for length in range(len(steps), 0, -1):
        if (key := ".".join(steps[:length])) in tree:
            return _leaf(tree[key], ".".join(steps[length:]))
    return None


def _bounds(limit: Limit) -> list[tuple[str, float]]:
    return list(limit.model_dump(exclude_none=True).items())
