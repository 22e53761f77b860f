"""Numbers kept from a report."""

from __future__ import annotations

from typing import Any

import pytest
from evidence.made_up import simulate

from bench.evidence.cells import CENTRAL, Cell, Choice
from bench.evidence.contenders import SWARM_2
from bench.evidence.headline import headline, times_to
from bench.evidence.scenario import scenario

SCENARIO = scenario(Cell(experiment="R1", contender=SWARM_2, setting=CENTRAL, seed=1), Choice("swarm", 0.7, 0.6, 0.012))


def report(**changes: Any) -> dict[str, Any]:
    return {**simulate(SCENARIO), **changes}


def test_the_headline_by_hand() -> None:
    made = report()
    last = made["curve"][-1]
    found = headline(made)
    assert found["loss"] == pytest.approx(last["validation"], rel=1e-5)
    assert found["averaged_loss"] == pytest.approx(last["validation_of_mean"], rel=1e-5)
    assert found["bits_per_parameter"] == 32
    assert found["payload_bits_per_parameter"] == pytest.approx(0.98 * 32)
    assert found["exchanges_per_outer_step"] == 1
    assert (found["exchanges"], found["exchanges_failed"], found["exchanges_declined"]) == (300, 3, 10)
    assert "diverged" not in found


def test_a_run_that_diverged_says_so() -> None:
    found = headline(report(curve=[{**report()["curve"][-1], "validation": None}]))
    assert found["diverged"] == 1
    assert "loss" not in found


def test_the_fastest_and_the_slowest_are_judged_apart() -> None:
    found = headline(report())
    assert found["fast_seconds_to:2.0"] == found["seconds_to:2.0"] < found["slow_seconds_to:2.0"]
    even = headline(report(curve=[{**point, "groups": {}} for point in report()["curve"]]))
    assert even["slow_seconds_to:2.0"] == even["fast_seconds_to:2.0"] == found["seconds_to:2.0"]


def test_times_are_read_between_the_points() -> None:
    assert dict(times_to([(10.0, 3.5), (20.0, 2.5), (30.0, 2.5)])) == {
        3.0: pytest.approx(15.0),
        2.75: pytest.approx(17.5),
        2.5: pytest.approx(20.0),
    }
    assert dict(times_to([(10.0, 2.6)])) == {3.0: 10.0, 2.75: 10.0}
    assert dict(times_to([])) == {}


def test_a_loss_that_rises_again_was_still_reached() -> None:
    assert dict(times_to([(1.0, 3.2), (2.0, 2.9), (3.0, 3.3)]))[3.0] == pytest.approx(1 + 0.2 / 0.3)


def test_the_last_point_is_no_rung_as_it_is_judged_on_another_part() -> None:
    def point(time_s: float, loss: float) -> dict[str, Any]:
        return {**report()["curve"][-1], "time_s": time_s, "validation": loss, "groups": {}}

    found = headline(report(curve=[point(1.0, 2.9), point(2.0, 2.6), point(3.0, 2.4)]))
    assert {name for name in found if name.startswith("seconds_to:")} == {"seconds_to:3.0", "seconds_to:2.75"}
    assert found["loss"] == 2.4
    assert "seconds_to:3.0" not in headline(report(curve=[point(3.0, 2.9)]))
