"""Results of older code that today's code yields as well: shown on one run of each kind, and taken for the others.

A run is deterministic, so a change that touches no number leaves every headline as it is, to the last digit. Of the
stale cells that are of one kind (one recipe, codec, learner, ... and one older code) the cheapest is run again. Where
its headline comes out equal, all of that kind are results of today's code too; where it does not, all stay stale.
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
    {"seed", "split", "tokens_per_peer", "points", "learning_rate", "momentum", "inner_steps", "count", "step_s"}
    | {"up_mbit_s", "down_mbit_s", "failed_exchanges", "exchanges_per_step"}
)
"""Fields of a scenario that choose no other piece of code."""


def confirm(campaign: Campaign, pool: Workers) -> None:
    """Run one stale cell of each kind; where it comes out equal, mark its whole kind as results of today's code."""
    waiting = list(kinds(campaign.jobs()))
    under_way: dict[int, Sequence[Job]] = {}
    serial = 0
    while waiting or pool.is_busy:
        while waiting and pool.has_room:
            serial += 1
            under_way[serial] = waiting.pop(0)
            scenario = _cheapest(under_way[serial]).scenario
            assert scenario is not None
            pool.start(serial, scenario)
        outcome = pool.next()
        _take(campaign, under_way.pop(outcome.key), outcome)


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
        return sorted((name, _bare(each)) for name, each in value.items() if name not in NUMBERS)
    if isinstance(value, (list, tuple)):
        return [_bare(each) for each in value]
    return value


def _cheapest(jobs: Sequence[Job]) -> Job:
    return min(jobs, key=lambda job: core_seconds(job.cell))


def _take(campaign: Campaign, jobs: Sequence[Job], outcome: Outcome) -> None:
    sample = _cheapest(jobs)
    assert sample.record is not None
    if outcome.report is None:
        campaign.say(f"{sample.cell.name}: {outcome.failure}; {len(jobs)} cells of its kind stay stale")
        return
    if _lasting(headline(outcome.report)) != _lasting(sample.record.headline):
        campaign.say(f"{sample.cell.name}: other numbers than before; {len(jobs)} cells of its kind stay stale")
        return
    for job in jobs:
        assert job.record is not None
        campaign.store.keep(replace(job.record, confirmed=(*job.record.confirmed, campaign.code)))
    campaign.say(f"{sample.cell.name}: the same to the last digit; {len(jobs)} cells of its kind count as done")


def _lasting(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: figure for name, figure in figures.items() if name not in OF_THE_MACHINE}
