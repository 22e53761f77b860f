"""Table of laboratory reports: each limit, and what each run found. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.report import ALWAYS


@dataclass(frozen=True, slots=True)
class LabRun:
    """``report.json`` of a folder of scenarios."""

    commit: str
    reports: Sequence[Mapping[str, Any]]


def lines(runs: Sequence[LabRun]) -> list[str]:
    """Return the origin of each run, and a table with one row for each limit of each scenario."""
    described = [_described(number, run) for number, run in enumerate(runs, 1)]
    heads = " | ".join(f"run {number}" for number in range(1, len(runs) + 1))
    table = [f"| scenario | figure | asked for | {heads} |", f"|{'---|' * (3 + len(runs))}"]
    return [*described, "", *table, *_rows(runs)]


def _described(number: int, run: LabRun) -> str:
    passed = sum(each["passed"] for each in run.reports)
    first, last = run.reports[0], run.reports[-1]
    return (
        f"- run {number}: {passed} of {len(run.reports)} scenarios passed; {first['machine']}; "
        f"{first['date']} to {last['date']}; commit {run.commit}"
    )


def _rows(runs: Sequence[LabRun]) -> Iterator[str]:
    by_name = [{each["scenario"]: each for each in run.reports} for run in runs]
    for scenario in dict.fromkeys(name for run in by_name for name in run):
        acted = [run.get(scenario, {}) for run in by_name]
        yield _row(scenario, "passed", "", ["" if not each else ("yes" if each["passed"] else "NO") for each in acted])
        limits: dict[str, Any] = {}
        for each in acted:
            limits |= each.get("limits", {})
        for figure, limit in limits.items():
            found = [each.get("limits", {}).get(figure) for each in acted]
            if figure not in ALWAYS or not all(each is None or each["kept"] for each in found):
                yield _row("", figure, _asked(limit), [_found(each) for each in found])


def _row(scenario: str, figure: str, asked: str, found: Sequence[str]) -> str:
    return f"| {' | '.join((scenario, figure, asked, *found))} |"


def _asked(limit: Mapping[str, Any]) -> str:
    least, most = limit.get("at_least"), limit.get("at_most")
    if least is not None and least == most:
        return f"{least:g}"
    return ", ".join(f"{sign} {bound:g}" for sign, bound in ((">=", least), ("<=", most)) if bound is not None)


def _found(limit: Mapping[str, Any] | None) -> str:
    if limit is None:
        return ""
    found = "none" if limit["found"] is None else f"{limit['found']:.4g}"
    return found if limit["kept"] else f"**{found}, MISSED**"
