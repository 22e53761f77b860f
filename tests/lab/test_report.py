"""Figures from what peers left, and limits held against them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.sim.reality import RealGroup, parse
from peer.lab.report import Left, figure, figures_of, judged, read_left
from peer.lab.script import Do, Part

GROUP = RealGroup(count=1, step_s=1.0)
SUMMARY = {
    "val_loss_first": 5.0,
    "val_loss_last": 2.0,
    "tokens": 100,
    "half_commits": 1,
    "blocked_fraction": 0.02,
    "finished": True,
    "why": "the swarm agrees",
}


def exchange(began: float, partner: str) -> dict[str, Any]:
    return {"kind": "exchanged", "time": began + 1.0, "seconds": 1.0, "peer": partner}


def left(name: str, *notes: dict[str, Any], summary: dict[str, Any] | None = None) -> Left:
    return Left(Part(name, name, GROUP, name), f"id of {name}", notes, summary)


def course(lives: dict[str, list[dict[str, Any]]], done: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"lives": lives, "done": done or [], "missed": [], "troubles": [], "cut_short": False, "wall_s": 9.0}


WELL = {"status": 0, "ended_by_us": ""}
KILLED = {"status": -9, "ended_by_us": "is killed"}
CRASHED = {"status": 1, "ended_by_us": ""}


def figures(course: dict[str, Any], *everybody: Left, sides: dict[str, Any] | None = None) -> dict[str, Any]:
    return figures_of(course, everybody, 0.1, sides or {})


def test_who_was_killed_did_not_stay_and_its_exchanges_count() -> None:
    found = figures(
        course({"anna": [WELL], "bert": [KILLED], "cleo": [KILLED, WELL]}),
        left("anna", exchange(1, "id of bert"), {"kind": "failed"}, summary=SUMMARY),
        left("bert", exchange(1, "id of anna")),
        left("cleo", {"kind": "caught up"}, summary={**SUMMARY, "val_loss_last": 3.0}),
    )
    assert found["stayed"] == found["finished"] == found["learned"] == 2
    assert found["exchanges_made"] == 2
    assert found["fewest_exchanges"] == 0  # cleo
    assert found["exchanges_failed"] == found["caught_up"] == found["restarts"] == 1
    assert found["unexpected_exits"] == 0
    assert found["tokens"] == 200
    assert found["worst_loss"] == 3.0
    assert found["peers"]["bert"]["exits"] == ["is killed"]
    assert found["peers"]["bert"]["loss"] is None


def test_a_crash_is_no_expected_exit() -> None:
    assert figures(course({"anna": [CRASHED]}), left("anna"))["unexpected_exits"] == 1


def test_a_loss_that_is_no_number_has_not_learned() -> None:
    found = figures(course({"anna": [WELL]}), left("anna", summary={**SUMMARY, "val_loss_last": None}))
    assert found["learned"] == 0
    assert found["worst_loss"] is None


def test_exchanges_after_the_last_act_are_those_that_began_then() -> None:
    done = [{"at_s": 1, "time": 10.0, "do": "is killed", "who": "bert"}]
    notes = [exchange(8.0, "id of bert"), exchange(9.5, "id of bert"), exchange(10.5, "id of bert")]
    found = figures(course({"anna": [WELL]}, done), left("anna", *notes, summary=SUMMARY))
    assert found["fewest_exchanges_afterwards"] == 1


def test_exchanges_across_a_partition() -> None:
    done = [
        {"at_s": 1, "time": 10.0, "do": Do.PART.value, "who": "0"},
        {"at_s": 2, "time": 20.0, "do": Do.HEAL.value, "who": "0"},
    ]
    times = (5.0, 9.5, 12.0, 19.5, 21.0, 22.0)  # before, over its beginning, amid, over its end, after, after
    anna = left("anna", *(exchange(time, "id of bert") for time in times), exchange(12.0, "id of cleo"))
    found = figures(
        course({"anna": [WELL]}, done), anna, left("bert"), left("cleo"), sides={"0": [["anna", "cleo"], ["bert"]]}
    )
    assert found["exchanges_across"] == 1
    assert found["exchanges_across_afterwards"] == 2


@pytest.mark.parametrize(
    ("limit", "fault"),
    [
        ({"stayed": {"at_least": 1}}, None),
        ({"peers.anna.exchanges_made": {"at_most": 0}}, None),
        ({"stayed": {"at_least": 2}}, "stayed: 1, where at least 2 was to be"),
        ({"stayd": {"at_least": 1}}, "stayd: there is no such figure, where at least 1 was to be"),
    ],
)
def test_limits(tiny: dict[str, Any], limit: dict[str, Any], fault: str | None) -> None:
    scenario = parse({**tiny, "limits": limit})
    happened = course({"anna": [WELL]})
    clean = {"left_processes": 0, "left_sockets": 0, "left_namespaces": 0}
    verdict = judged("it", "local", scenario, {**figures(happened, left("anna", summary=SUMMARY)), **clean}, happened)
    assert verdict.passed is (fault is None)
    assert verdict.faults == ([] if fault is None else [fault])
    json.dumps(verdict.document(), allow_nan=False)


def test_leftovers_and_troubles_fail_any_scenario(tiny: dict[str, Any]) -> None:
    happened = {**course({"anna": [WELL]}), "troubles": ["the bootstrap ended with status 7"]}
    dirty = {"left_processes": 2, "left_sockets": 0, "left_namespaces": 0}
    verdict = judged("it", "local", parse(tiny), {**figures(happened, left("anna")), **dirty}, happened)
    assert verdict.faults == ["the bootstrap ended with status 7", "left_processes: 2, where at most 0 was to be"]


def test_figures_by_dotted_name() -> None:
    tree = {"a": {"b": 3, "c": True, "d": None, "e": float("nan")}}
    assert [figure(tree, name) for name in ("a.b", "a.c", "a.d", "a.e", "a", "x.y")] == [3, 1, None, None, None, None]


def test_a_home_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    part = Part("anna", "anna", GROUP, "anna")
    assert read_left(part, "id", tmp_path / "nowhere") == Left(part, "id", [], None)
    (tmp_path / "events.jsonl").write_text('{"kind": "found"}\n{"kind": "exch')
    (tmp_path / "summary.json").write_text("torn")
    found = read_left(part, "id", tmp_path)
    assert found.count("found") == 1
    assert found.summary is None
