"""Results of older code that today's code yields as well: shown on short runs of each kind, and taken for all of it.

A run is deterministic, so a change that touches no number leaves every report as it is, to the last digit. Of the stale
cells that are of one kind (one recipe, codec, learner, ... and one older code) the cheapest and the dearest are run
with fewer steps, by the older code and by today's, here and now: so that another processor, with other roundings, does
not look like a change of code. Where both reports come out equal, all cells of that kind are results of today's code
too; else all of them stay stale. What a change does only after the first of sixteen parts of a run is not seen.

How long control messages and the directory's records are is let pass and said: it moves no weight, and payloads are
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from bench.evidence.cells import Choice
from bench.evidence.older import OlderCodeError
from bench.evidence.plan import Job, State, core_seconds, shortened
from bench.evidence.pool import Outcome
from bench.evidence.run import Campaign, Workers
from bench.evidence.store import Record

Elsewhere = Callable[[str, str], AbstractContextManager[Workers]]
"""Commit and numeric digest -> workers that run that code. Raises OlderCodeError."""

OF_THE_MACHINE = "cost"
"""The part of a report that differs every time."""

OVERHEAD = frozenset({"control", "directory", "total", "bits_per_parameter", "events"})
"""Parts of a report that also count control messages and the directory. Bytes of payloads and of weights have their own
names, and so do losses."""

NUMBERS = frozenset({"seed", "split", "tokens_per_peer", "points", "learning_rate", "count"})
"""Fields of a scenario that choose no other piece of code. Not among them: inner steps (with one of them a phase has no
middle, in which exchanges fall due), the seconds of a step and the speed of lines (they decide what is late and what
waits), shares of failures, exchanges a step and partners; and of the momentum a kind has whether it is 0."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Stale cells that one older code ran through the same code."""

    jobs: Sequence[Job]
    code: str
    """The last one that is known to yield them, of those whose commit is known."""
    commits: tuple[str, ...]
    """Where that code was measured, the newest first; not every one need be in this clone."""

    @property
    def samples(self) -> list[Job]:
        """The cheapest, and the dearest if it is dearer: runs of other sizes, not of other seeds."""
        ranked = sorted(self.jobs, key=lambda job: core_seconds(job.cell))
        ends = ranked[0], ranked[-1]
        return list(ends) if core_seconds(ends[0].cell) < core_seconds(ends[1].cell) else [ends[0]]


def confirm(campaign: Campaign, here: Workers, elsewhere: Elsewhere) -> None:
    """Run short forms of stale cells on older code and on today's; mark every kind whose reports come out equal."""
    by_code: dict[str, list[Kind]] = {}
    for found in kinds(campaign.jobs()):
        by_code.setdefault(found.code, []).append(found)
    for code, alike in by_code.items():
        samples = [(each, _short(job)) for each in alike for job in each.samples]
        scenarios = [scenario for _, scenario in samples]
        try:
            before = _before(elsewhere, alike[0].commits, code, scenarios)
        except OlderCodeError as error:
            campaign.say(f"{error}; {sum(len(each.jobs) for each in alike)} cells of that code stay stale")
            continue
        now = _outcomes(here, scenarios)
        faults: dict[int, str] = {}
        growths: dict[int, float] = {}
        for (each, _), older, newer in zip(samples, before, now, strict=True):
            if (fault := _fault(older, newer)) is not None:
                faults.setdefault(id(each), fault)
            else:
                growths[id(each)] = max(growths.get(id(each), 1.0), _growth(older, newer), key=lambda g: abs(g - 1.0))
        for each in alike:
            _conclude(campaign, each, faults.get(id(each)), growths.get(id(each), 1.0))


def kinds(jobs: Sequence[Job]) -> list[Kind]:
    """The stale jobs, those of one kind and one older code together."""
    records = [job.record for job in jobs if job.record is not None]
    commits: dict[str, tuple[str, ...]] = {}
    for each in sorted(records, key=lambda each: each.date, reverse=True):
        commits[each.code] = tuple(dict.fromkeys((*commits.get(each.code, ()), each.commit)))
    found: dict[tuple[str, str], list[Job]] = {}
    for job in jobs:
        if job.state is State.STALE and job.scenario is not None and job.record is not None:
            found.setdefault((kind(job.scenario), _basis(job.record, commits)), []).append(job)
    return [Kind(alike, code, commits[code]) for (_, code), alike in found.items()]


def _before(
    elsewhere: Elsewhere, commits: Sequence[str], code: str, scenarios: Sequence[Mapping[str, Any]]
) -> list[Outcome]:
    """Of all scenarios, in their order, on the newest of these commits that can be had. Raises OlderCodeError."""
    missing: OlderCodeError | None = None
    for commit in commits:
        try:
            with elsewhere(commit, code) as there:
                return _outcomes(there, scenarios)
        except OlderCodeError as error:
            missing = missing or error
    raise missing or OlderCodeError(f"no commit has the numeric digest {code}")


def _basis(record: Record, commits: Collection[str]) -> str:
    return next(code for code in (*reversed(record.confirmed), record.code) if code in commits)


def kind(scenario: Mapping[str, Any]) -> str:
    """What decides which code a scenario runs through: all of it but plain numbers."""
    return repr(_bare(scenario))


def _bare(value: Any) -> Any:
    if isinstance(value, Mapping):
        return sorted((name, _of_kind(name, each)) for name, each in value.items() if name not in NUMBERS)
    if isinstance(value, (list, tuple)):
        return [_bare(each) for each in value]
    return value


def _of_kind(name: str, value: Any) -> Any:
    return value == 0 if name == "momentum" else _bare(value)


def _short(job: Job) -> Mapping[str, Any]:
    assert job.scenario is not None
    outer = job.scenario["outer"]
    return shortened(job.cell, Choice(outer["recipe"], outer["learning_rate"], outer["momentum"]))


def _outcomes(workers: Workers, scenarios: Iterable[Mapping[str, Any]]) -> list[Outcome]:
    """Of all scenarios, in their order."""
    waiting = list(enumerate(scenarios))
    found: dict[int, Outcome] = {}
    while waiting or workers.is_busy:
        while waiting and workers.has_room:
            workers.start(*waiting.pop(0))
        outcome = workers.next()
        found[outcome.key] = outcome
    return [found[key] for key in sorted(found)]


def _fault(before: Outcome, now: Outcome) -> str | None:
    """Why this run does not vouch for its kind; None when it does."""
    if before.report is None or now.report is None:
        return next(each.failure or "no report" for each in (now, before) if each.report is None)
    older = {name: value for name, value in before.report.items() if name != OF_THE_MACHINE}
    return None if _holds(older, now.report) else "other numbers than before"


def _holds(before: Any, now: Any) -> bool:
    """Whether everything that the older report has is the same in the newer one, which may have more fields."""
    if isinstance(before, Mapping):
        return isinstance(now, Mapping) and all(
            name in OVERHEAD or (name in now and _holds(before[name], now[name])) for name in before
        )
    if isinstance(before, list):
        return isinstance(now, list) and len(before) == len(now) and all(map(_holds, before, now))
    return bool(before == now)


def _growth(before: Outcome, now: Outcome) -> float:
    """How many times as many bits a parameter today's code sends, control messages and directory included."""
    older, newer = (((each.report or {}).get("overall") or {}).get("bits_per_parameter") for each in (before, now))
    return newer / older if older and newer else 1.0


def _conclude(campaign: Campaign, found: Kind, fault: str | None, growth: float) -> None:
    name, count = found.jobs[0].cell.name, len(found.jobs)
    if fault is not None:
        campaign.say(f"{name}: {fault}; {count} cells of its kind stay stale")
        return
    for job in found.jobs:
        assert job.record is not None
        campaign.store.keep(replace(job.record, confirmed=(*job.record.confirmed, campaign.code)))
    but = "" if growth == 1.0 else f" but for control messages and directory, with which bits are {growth:.4f} times"
    campaign.say(f"{name}: the same to the last digit{but}; {count} cells of its kind done")
