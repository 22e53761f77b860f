"""Results of older code that today's code yields as well: shown on one run of each kind, and taken for the others.

A run is deterministic, so a change that touches no number leaves every headline as it is, to the last digit. Of the
stale cells that are of one kind (one recipe, codec, learner, ... and one older code) the cheapest and the dearest are
run again. Where both headlines come out equal, all of that kind are results of today's code too; else all stay stale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench.evidence.headline import headline
from bench.evidence.plan import Job, State, core_seconds
from bench.evidence.pool import Outcome
from bench.evidence.run import Campaign, Workers

OF_THE_MACHINE = frozenset({"events_per_s"})
"""Figures that say how fast a machine was, and differ every time."""

NUMBERS = frozenset(
    {"seed", "split", "tokens_per_peer", "points", "learning_rate", "inner_steps", "count", "step_s"}
    | {"up_mbit_s", "down_mbit_s"}
)
"""Fields of a scenario that choose no other piece of code. Not among them: shares of failures, exchanges a step and
partners; and of the momentum a kind has whether it is 0."""


def confirm(campaign: Campaign, pool: Workers) -> None:
    """Run two stale cells of each kind; where both come out equal, mark the whole kind as results of today's code."""
    found = kinds(campaign.jobs())
    waiting = [(place, sample) for place, jobs in enumerate(found) for sample in _samples(jobs)]
    open_samples = [len(_samples(jobs)) for jobs in found]
    under_way: dict[int, tuple[int, Job]] = {}
    refuted: set[int] = set()
    serial = 0
    while waiting or pool.is_busy:
        while waiting and pool.has_room:
            place, sample = waiting.pop(0)
            if place in refuted:
                continue
            serial += 1
            under_way[serial] = place, sample
            assert sample.scenario is not None
            pool.start(serial, sample.scenario)
        if not pool.is_busy:
            return
        outcome = pool.next()
        place, sample = under_way.pop(outcome.key)
        open_samples[place] -= 1
        if place in refuted:
            continue
        if (fault := _fault(sample, outcome)) is not None:
            refuted.add(place)
            campaign.say(f"{sample.cell.name}: {fault}; {len(found[place])} cells of its kind stay stale")
        elif open_samples[place] == 0:
            _mark(campaign, found[place])
            campaign.say(f"{sample.cell.name}: the same to the last digit; {len(found[place])} cells of its kind done")


def kinds(jobs: Sequence[Job]) -> list[Sequence[Job]]:
    """The stale jobs, those of one kind and one older code together."""
    found: dict[tuple[str, str], list[Job]] = {}
    for job in jobs:
        if job.state is State.STALE and job.scenario is not None and job.record is not None:
            found.setdefault((kind(job.scenario), job.record.code), []).append(job)
    return list(found.values())


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


def _samples(jobs: Sequence[Job]) -> list[Job]:
    """The cheapest and the dearest; one where there is but one."""
    ranked = sorted(jobs, key=lambda job: core_seconds(job.cell))
    return [ranked[0]] if len(ranked) == 1 else [ranked[0], ranked[-1]]


def _fault(sample: Job, outcome: Outcome) -> str | None:
    """Why this run does not vouch for its kind; None when it does."""
    assert sample.record is not None
    if outcome.report is None:
        return outcome.failure or "no report"
    found, before = headline(outcome.report), _lasting(sample.record.headline)
    same = before.keys() <= found.keys() and all(found[name] == before[name] for name in before)
    return None if before and same else "other numbers than before"


def _mark(campaign: Campaign, jobs: Sequence[Job]) -> None:
    for job in jobs:
        assert job.record is not None
        campaign.store.keep(replace(job.record, confirmed=(*job.record.confirmed, campaign.code)))


def _lasting(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: figure for name, figure in figures.items() if name not in OF_THE_MACHINE}
