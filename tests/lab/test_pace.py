"""How soon runs end, and how soon their peers reach losses."""

from __future__ import annotations

from typing import Any

import pytest
from sample_artifacts import SUMMARY, artifacts

from lab.pace import curve, run_figures, times_to_losses, told_shortened_s, training_cpu_s


def progress(time: float, loss: float | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "kind": "progress",
        "time": time,
        "run_tokens": 200,
        "tokens": 7,
        **({} if loss is None else {"loss": loss}),
        **fields,
    }


def test_a_run_lasts_from_the_first_inner_step_to_the_last_end_and_liars_count() -> None:
    first, later = ({"kind": "first inner step", "time": time} for time in (10.0, 20.0))
    ends, later_ends = ({"kind": "trained", "time": time} for time in (50.0, 52.0))
    one = artifacts("one", first, progress(11.0), ends, summary=SUMMARY)
    liar = artifacts("liar", later, later_ends, summary=SUMMARY, lie="crowd")
    found = run_figures([one, liar, artifacts("never", summary={**SUMMARY, "tokens": None})])
    assert found == {"training_s": 42.0, "ends_within_s": 2.0, "tokens_share": 1.0}


def test_a_run_that_nobody_began_has_no_figures() -> None:
    assert run_figures([]) == {"training_s": None, "ends_within_s": None, "tokens_share": None}


def test_a_curve_is_smoothed_and_begins_with_the_first_inner_step() -> None:
    notes = [progress(12.0), *(progress(14.0 + 2 * place, loss) for place, loss in enumerate([6.0, 4.0, 2.0]))]
    one = artifacts("one", {"kind": "first inner step", "time": 10.0}, *notes)
    assert curve(one) == [(4.0, 6.0, 7.0), (6.0, 5.0, 7.0), (8.0, 4.0, 7.0)]
    assert curve(artifacts("never")) == []


def test_the_largest_time_that_an_owner_was_told_counts() -> None:
    notes = [progress(1.0, shortened_s=None), progress(2.0, shortened_s=30.0), progress(3.0, shortened_s=9.0)]
    assert told_shortened_s(artifacts("one", *notes)) == 30.0
    assert told_shortened_s(artifacts("one", progress(1.0))) == 0.0


def test_cpu_seconds_of_training_are_those_of_one_process() -> None:
    begun, ended = (
        {"kind": kind, "time": 1.0, "cpu_s": used} for kind, used in (("first inner step", 7.0), ("trained", 9.5))
    )
    assert training_cpu_s(artifacts("one", begun, ended)) == 2.5
    assert training_cpu_s(artifacts("resumed", begun, begun, ended)) is None
    assert training_cpu_s(artifacts("killed", begun)) is None


def figures(**curves: list[tuple[float, float, float]]) -> dict[str, Any]:
    peers = {name: {"group": name.split("_")[0], "stayed": True, "curve": each} for name, each in curves.items()}
    return {"peers": peers, "groups": dict.fromkeys(each["group"] for each in peers.values())}


def line(seconds: float, last: float = 2.0) -> list[tuple[float, float, float]]:
    return [(seconds * step / 10, 4.0 + (last - 4.0) * step / 10, 1000.0 * step) for step in range(11)]


def test_times_to_losses_are_compared_with_the_lone_peer_and_a_groups_last_peer_counts() -> None:
    found = times_to_losses(figures(fast=line(50.0), slow_1=line(80.0), slow_2=line(120.0)), figures(fast=line(100.0)))
    assert found["fast"] == {"mean": pytest.approx(0.5), "largest": pytest.approx(0.5), "work": pytest.approx(1.0)}
    assert found["slow"]["mean"] == pytest.approx(1.2)


def test_losses_that_somebody_never_reaches_are_left_out() -> None:
    found = times_to_losses(figures(fast=line(100.0), slow=line(100.0, last=3.0)), figures(fast=line(100.0)))
    assert found["fast"]["largest"] == pytest.approx(1.0)
    assert found["slow"]["largest"] == pytest.approx(2.0)


def test_nothing_is_compared_without_curves() -> None:
    assert times_to_losses(figures(fast=[]), figures(fast=line(9.0))) == {}
    assert times_to_losses(figures(fast=line(9.0)), figures(fast=[])) == {}
