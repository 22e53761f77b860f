"""Limits compared with figures, and reports."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sample_artifacts import SUMMARY, WELL, artifacts, figures, record

from lab.report import comparison_failed, figure, json_safe, verdict_of
from lab.scenario import parse


@pytest.mark.parametrize(
    ("limit", "fault"),
    [
        ({"stayed": {"at_least": 1}}, None),
        ({"peers.anna.exchanges_made": {"at_most": 0}}, None),
        ({"stayed": {"at_least": 2}}, "stayed: 1; required: at least 2"),
        ({"stayd": {"at_least": 1}}, "stayd: no such figure; required: at least 1"),
    ],
)
def test_limits(tiny: dict[str, Any], limit: dict[str, Any], fault: str | None) -> None:
    scenario = parse({**tiny, "limits": limit})
    happened = record({"anna": [WELL]})
    clean = {"left_processes": 0, "left_sockets": 0, "left_namespaces": 0}
    verdict = verdict_of(
        "it", "local", scenario, {**figures(happened, artifacts("anna", summary=SUMMARY)), **clean}, happened
    )
    assert verdict.passed is (fault is None)
    assert verdict.faults == ([] if fault is None else [fault])
    json.dumps(verdict.document(), allow_nan=False)


def test_leftovers_and_troubles_fail_any_scenario(tiny: dict[str, Any]) -> None:
    happened = {**record({"anna": [WELL]}), "troubles": ["the bootstrap ended with status 7"]}
    dirty = {"left_processes": 2, "left_sockets": 0, "left_namespaces": 0}
    verdict = verdict_of("it", "local", parse(tiny), {**figures(happened, artifacts("anna")), **dirty}, happened)
    assert verdict.faults == ["the bootstrap ended with status 7", "left_processes: 2; required: at most 0"]


def test_figures_by_dotted_name() -> None:
    tree = {"a": {"b": 3, "c": True, "d": None, "e": float("nan")}}
    assert [figure(tree, name) for name in ("a.b", "a.c", "a.d", "a.e", "a", "x.y")] == [3, 1, None, None, None, None]
    seats = {"peers": {"seat-1": {"caught_up": 1}, "seat-1.2": {"caught_up": 2}}}
    assert figure(seats, "peers.seat-1.caught_up") == 1
    assert figure(seats, "peers.seat-1.2.caught_up") == 2  # of the peer that replaced it
    assert figure(seats, "peers.seat-1.3.caught_up") is None


def test_a_nan_loss_is_the_worst_and_null_in_json(tiny: dict[str, Any]) -> None:
    happened = record({"anna": [WELL], "bert": [WELL]})
    nan = {**SUMMARY, "val_loss_last": float("nan")}
    found = figures(happened, artifacts("anna", summary=SUMMARY), artifacts("bert", summary=nan))
    scenario = parse({**tiny, "limits": {"worst_loss": {"at_most": 9}}})
    verdict = verdict_of("it", "local", scenario, found, happened)
    assert "worst_loss: no such figure; required: at most 9" in verdict.faults
    assert '"worst_loss": null' in json.dumps(json_safe(verdict.document()), allow_nan=False)


def test_a_failed_undisturbed_run_is_the_only_fault() -> None:
    verdict = comparison_failed("it", "local", {"stayed": 1}, {**record({}), "troubles": ["the bootstrap ended"]})
    assert not verdict.passed
    assert verdict.faults == ["undisturbed: the bootstrap ended"]
    assert verdict.limits == {}
