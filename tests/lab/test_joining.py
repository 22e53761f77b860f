"""What newcomers took of others."""

from __future__ import annotations

from typing import Any

from lab.artifacts import Artifacts
from lab.joining import pulled, schedules
from lab.scenario import RealGroup
from lab.script import Part

GROUP = RealGroup(count=1, step_s=1.0)


def left(name: str, *notes: dict[str, Any]) -> Artifacts:
    return Artifacts(Part(name, name, GROUP, name), f"id of {name}", notes, None)


def trains(time: float, rate: float) -> dict[str, Any]:
    return {"kind": "progress", "time": time, "step": 1, "learning_rate": rate}


def test_a_pull_tells_who_was_lost_and_what_that_cost() -> None:
    note = {"kind": "took weights", "donors": 3, "pieces": 12, "broke_off": 1, "asked_again": 1}
    assert pulled(left("anna", note)) == {"donors": 3, "pieces": 12, "donors_lost": 1, "pieces_again": 1}
    assert set(pulled(left("anna")).values()) == {None}


def test_a_newcomer_whose_schedule_began_anew_is_told_though_it_reaches_the_end_as_well() -> None:
    swarm = [left(name, trains(10, 1.0), trains(20, 0.5), trains(30, 0.1)) for name in ("anna", "bert")]
    in_step = left("late", trains(19, 0.5), trains(29, 0.1), trains(31, 0.1))
    assert schedules([*swarm, in_step], {"late"}) == 1.0
    anew = left("late", trains(21, 1.0), trains(29, 0.9), trains(60, 0.1))
    assert schedules([*swarm, anew], {"late"}) == 9.0


def test_who_left_no_learning_rate_tells_nothing_of_a_schedule() -> None:
    told = left("anna", trains(10, 1.0))
    assert schedules([], {"late"}) is None
    assert schedules([told], {"late"}) is None
    assert schedules([told, left("late", {"kind": "progress", "time": 9.0})], {"late"}) is None
    assert schedules([told, left("late", trains(20, 1.0))], {"late"}) is None  # it came when the others had ended
