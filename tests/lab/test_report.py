"""Figures from what peers left, and limits held against them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.sim.reality import RealGroup, parse
from peer import lines
from peer.lab.left import TOLD, Exchange, Left, read_left
from peer.lab.pulse import FEWEST, FIGURES, growth
from peer.lab.report import compared, figure, figures_of, finite, grown, judged, spoiled
from peer.lab.script import Do, Part

GROUP = RealGroup(count=1, step_s=1.0)
SUMMARY = {
    "val_loss_first": 5.0,
    "val_loss_last": 2.0,
    "tokens": 100,
    "half_commits": 1,
    "blocked_fraction": 0.02,
    "longest_stall_inner_steps": 0.5,
    "finished": True,
    "why": "the swarm agrees",
}


def exchange(began: float, partner: str) -> dict[str, Any]:
    return {"kind": "exchanged", "time": began + 1.0, "seconds": 1.0, "peer": partner}


def left(name: str, *notes: dict[str, Any], summary: dict[str, Any] | None = None) -> Left:
    return Left(Part(name, name, GROUP, name), f"id of {name}", notes, summary)


def course(lives: dict[str, list[dict[str, Any]]], done: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    rest = {"missed": [], "troubles": [], "cut_short": False, "wall_s": 9.0, "samples": {}}
    return {"lives": lives, "done": done or [], **rest}


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
    seats = {"peers": {"seat-1": {"caught_up": 1}, "seat-1.2": {"caught_up": 2}}}
    assert figure(seats, "peers.seat-1.caught_up") == 1
    assert figure(seats, "peers.seat-1.2.caught_up") == 2  # who came in its place
    assert figure(seats, "peers.seat-1.3.caught_up") is None


def test_a_home_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    part = Part("anna", "anna", GROUP, "anna")
    assert read_left(part, "id", tmp_path / "nowhere") == Left(part, "id", [], None)
    (tmp_path / "events.jsonl").write_text('{"kind": "found"}\n{"kind": "exch')
    (tmp_path / "summary.json").write_text("torn")
    found = read_left(part, "id", tmp_path)
    assert found.count("found") == 1
    assert found.summary is None


def test_times_of_a_wrong_clock_are_put_right(tmp_path: Path) -> None:
    part = Part("anna", "anna", RealGroup(count=1, step_s=1.0, clock_off_s=3600), "anna")
    (tmp_path / "events.jsonl").write_text('{"kind": "exchanged", "time": 3605.0, "seconds": 1.0}\n{"kind": "found"}\n')
    assert read_left(part, "id", tmp_path).exchanges() == [Exchange(4.0, 5.0, "", 0.0, False)]


def test_the_longest_stall_is_that_of_whoever_was_held_up_most() -> None:
    anna = left("anna", summary={**SUMMARY, "longest_stall_inner_steps": 2.5})
    bert = left("bert", summary={**SUMMARY, "longest_stall_inner_steps": None})  # it made one inner step
    cleo = left("cleo", summary={**SUMMARY, "longest_stall_inner_steps": 9.0})  # it did not stay
    found = figures(course({"anna": [WELL], "bert": [WELL], "cleo": [KILLED]}), anna, bert, cleo)
    assert found["longest_stall"] == found["groups"]["anna"]["longest_stall"] == 2.5
    assert found["groups"]["bert"]["longest_stall"] is None
    assert found["peers"]["cleo"]["longest_stall"] == 9.0


def test_liars_count_in_no_figure_of_honest_peers() -> None:
    liar = Left(
        Part("liar", "liar", RealGroup(count=1, step_s=1.0, lie="flipped"), "liar"),
        "id of liar",
        [{"kind": "caught up", "time": 9.0}, {"kind": "resumed"}, {"kind": "broke protocol"}],
        {
            **SUMMARY,
            "val_loss_last": 99.0,
            "blocked_fraction": 0.9,
            "longest_stall_inner_steps": 70.0,
            "half_commits": 7,
        },
    )
    happened = course(
        {"anna": [WELL], "liar": [KILLED, WELL]}, [{"at_s": 1, "time": 8.0, "do": Do.START.value, "who": "liar"}]
    )
    samples = {"liar": [(100 + number, 50, 20, 10) for number in range(FEWEST)]}
    found = figures({**happened, "samples": samples}, left("anna", summary=SUMMARY), liar)
    assert found["half_commits"] == 1
    assert found["offences"] == found["newcomers"] == 0
    assert found["peers"]["liar"]["offences"] == 1
    assert found["caught_up"] == found["newcomers_caught_up"] == found["resumed"] == found["restarts"] == 0
    assert found["memory_growth"] is None
    assert found["stayed"] == found["learned"] == 1
    assert found["worst_loss"] == found["mean_loss"] == 2.0
    assert (found["blocked_share"], found["longest_stall"]) == (0.02, 0.5)
    assert set(found["groups"]) == {"anna"}
    assert found["peers"]["liar"]["loss"] == 99.0


def test_newcomers_that_caught_up_are_those_who_came_in_mid_run() -> None:
    done = [{"at_s": 1, "time": 10.0, "do": Do.START.value, "who": name} for name in ("bert", "cleo")]
    found = figures(
        course({"anna": [WELL], "bert": [WELL], "cleo": [KILLED, WELL]}, done),
        left("anna", {"kind": "caught up", "time": 5.0}),  # it was there from the beginning, and a little late
        left("bert", {"kind": "caught up", "time": 12.0}),
        left("cleo", {"kind": "caught up", "time": 4.0}),  # before it was killed
    )
    assert found["caught_up"] == 3
    assert found["newcomers_caught_up"] == 1


def test_groups_have_their_means() -> None:
    pair = [Left(Part(f"home-{n}", "home", GROUP, f"home-{n}"), f"id-{n}", [], None) for n in (1, 2)]
    pair[0] = replace(pair[0], notes=[exchange(1, "id-2")] * 4, summary=SUMMARY)
    pair[1] = replace(pair[1], notes=[exchange(1, "id-1")] * 2, summary={**SUMMARY, "val_loss_last": 3.0})
    found = figures(course({"home-1": [WELL], "home-2": [WELL]}), *pair)["groups"]["home"]
    assert found["stayed"] == 2
    assert found["loss"] == 2.5
    assert found["exchanges_made"] == 3


def test_figures_are_compared_where_both_are_there() -> None:
    disturbed = {"loss": 2.2, "gone": 1, "none": None, "yes": True, "groups": {"home": {"tokens": 90}}, "zero": 1}
    calm = {"loss": 2.0, "none": 1, "yes": True, "groups": {"home": {"tokens": 100}, "other": {}}, "zero": 0}
    assert compared(disturbed, calm) == {"loss": 1.1, "groups": {"home": {"tokens": 0.9}}}


def test_what_grows_after_it_has_settled() -> None:
    steady = [(100, 50, 20, 10)] * FEWEST
    settling = [(1, 1, 1, 1)] * (FEWEST // 2) + steady
    leaking = [(100 + number, 50, 20, 10) for number in range(2 * FEWEST)]
    assert growth(steady[1:]) == {}  # too few to tell
    assert growth(settling) == dict.fromkeys(FIGURES, 0.0)
    found = growth(leaking)
    assert found["memory_growth"] > 0.4
    assert found["daemon_memory_growth"] == found["descriptor_growth"] == 0
    one_more = [(100, 50, 12 + (number > FEWEST), 10) for number in range(2 * FEWEST)]
    assert growth(one_more)["descriptor_growth"] == 1  # a number: one of twelve says nothing


def test_growth_is_the_largest_of_those_who_stayed() -> None:
    samples = {name: [(100, 50, 20, 10)] * FEWEST for name in ("anna", "bert")}
    samples["bert"] = [(100 + number, 50, 20, 10) for number in range(FEWEST)]
    lives = {"anna": [WELL], "bert": [KILLED]}
    found = figures({**course(lives), "samples": samples}, left("anna", summary=SUMMARY), left("bert"))
    assert found["memory_growth"] == 0
    found = figures({**course({**lives, "bert": [WELL]}), "samples": samples}, left("anna"), left("bert"))
    assert found["memory_growth"] > 0.1


def test_how_far_apart_they_are_at_the_end() -> None:
    notes = [{**exchange(n, "id of bert"), "distance": d} for n, d in enumerate([9.0, 9.0, *[0.2] * 6, *[0.4] * 4])]
    found = figures(
        course({"anna": [WELL], "bert": [WELL], "cleo": [KILLED]}),
        left("anna", *notes),
        left("bert", *notes[:1]),
        left("cleo", {**exchange(1, "x"), "distance": 99.0}),
    )
    assert found["peers"]["anna"]["last_distance"] == 0.2
    assert found["last_distance"] == 9.0
    assert figures(course({"anna": [WELL]}), left("anna"))["last_distance"] is None


def test_a_loss_that_is_no_number_is_the_worst_and_json_all_the_same(tiny: dict[str, Any]) -> None:
    happened = course({"anna": [WELL], "bert": [WELL]})
    nan = {**SUMMARY, "val_loss_last": float("nan")}
    found = figures(happened, left("anna", summary=SUMMARY), left("bert", summary=nan))
    scenario = parse({**tiny, "limits": {"worst_loss": {"at_most": 9}}})
    verdict = judged("it", "local", scenario, found, happened)
    assert "worst_loss: there is no such figure, where at most 9 was to be" in verdict.faults
    assert '"worst_loss": null' in json.dumps(finite(verdict.document()), allow_nan=False)


def test_what_could_not_be_compared_with_is_all_that_is_told() -> None:
    verdict = spoiled("it", "local", {"stayed": 1}, {**course({}), "troubles": ["the bootstrap ended"]})
    assert not verdict.passed
    assert verdict.faults == ["undisturbed: the bootstrap ended"]
    assert verdict.limits == {}


def test_the_final_gossip_is_no_training() -> None:
    notes = [exchange(1.0, "x"), exchange(2.0, "x"), {"kind": "trained", "time": 4.0}, exchange(5.0, "x")]
    found = figures(course({"anna": [WELL]}), left("anna", *notes, summary=SUMMARY))
    assert found["fewest_exchanges"] == found["fewest_exchanges_afterwards"] == 2


def test_exchanges_through_a_relay() -> None:
    notes = [exchange(1.0, "x"), {**exchange(2.0, "y"), "relay": "the bootstrap"}]
    assert figures(course({"anna": [WELL]}), left("anna", *notes))["relayed_exchanges"] == 1


def test_newcomers() -> None:
    done = [{"at_s": 1, "time": 10.0, "do": Do.START.value, "who": name} for name in ("bert", "cleo")]
    done += [{"at_s": 9, "time": 150.0, "do": Do.START.value, "who": "dora"}]
    everybody = [
        left("anna", {"kind": "progress", "time": 160.0}, summary=SUMMARY),
        left("bert", {"kind": "caught up", "time": 12.0}, summary={**SUMMARY, "val_loss_last": 3.0}),
        left("cleo", {"kind": "progress", "time": 20.0}),
        left("dora"),  # too late to have done anything
    ]
    lives = {"anna": [WELL], "bert": [WELL], "cleo": [KILLED], "dora": [WELL]}
    found = figures(course(lives, done), *everybody)
    assert found["newcomers"] == 3
    assert found["newcomers_caught_up"] == 1
    assert found["newcomers_caught_up_share"] == 0.5
    assert found["newcomers_loss"] == 1.5
    nobody = figures(course({"anna": [WELL]}), left("anna", summary=SUMMARY))
    assert nobody["newcomers_caught_up_share"] is nobody["newcomers_loss"] is None


def test_what_happened_to_somebody_after_the_last_act() -> None:
    done = [{"at_s": 1, "time": 10.0, "do": Do.THAW.value, "who": "anna"}]
    notes = [{"kind": "caught up", "time": 5.0}, {"kind": "saved", "time": 6.0}, {"kind": "caught up", "time": 11.0}]
    end = [{"kind": "stopping", "time": 20.0}, {"kind": "saved", "time": 21.0}]
    found = figures(course({"anna": [WELL]}, done), left("anna", *notes, *end))
    assert found["peers"]["anna"]["caught_up_afterwards"] == found["groups"]["anna"]["caught_up_afterwards"] == 1
    assert found["saved_afterwards"] == 0  # everybody saves when it leaves
    found = figures(course({"anna": [WELL]}, done), left("anna", *notes, {"kind": "saved", "time": 15.0}, *end))
    assert found["saved_afterwards"] == 1


def test_what_owners_were_told_is_counted_by_peers(tmp_path: Path) -> None:
    words = [
        lines.line("not saved", {"what": "a checkpoint", "why": "the disk is full"}),
        lines.line("p2pd died", {"why": "signal 9"}),
        lines.line("wrong clock", {"off_s": -3600.0, "nodes": 2}),
        lines.line("right clock", {}),
        lines.line("p2pd is back", {}),
    ]
    part = Part("anna", "anna", GROUP, "anna")
    for said in (words[:3], words[3:], words[:1]):
        (tmp_path / "output.log").write_text("\n".join(map(str, said)))
        expected = {name for name, word in zip(TOLD, words, strict=False) if word in said}
        assert read_left(part, "id", tmp_path).said == expected
    found = figures(course({"anna": [WELL]}), replace(left("anna"), said=frozenset({"told_not_saved"})), left("bert"))
    assert (found["told_not_saved"], found["told_daemon"], found["groups"]["anna"]["told_not_saved"]) == (1, 0, 1)


def test_bootstraps_are_watched_and_count_as_no_peer() -> None:
    samples = {"anna": [(100, 50, 20, 10)] * FEWEST, "bootstrap": [(100, 50 + n, 20, 10) for n in range(FEWEST)]}
    happened = {**course({"anna": [WELL]}), "samples": samples, "peaks": {"anna": 7, "bootstrap": 9}}
    found = figures(happened, left("anna", summary=SUMMARY))
    assert found["daemon_memory_growth"] == 0
    assert figure(found, "bootstraps.bootstrap.daemon_memory_growth") > 0.1  # type: ignore[operator]  # it is there
    assert found["peak_memory"] == 7
    assert grown(found)[0] == (
        "anna: memory 100 and at last 100, daemon memory 50 and at last 50, descriptors 20 and at last 20, "
        "daemon descriptors 10 and at last 10"
    )
    assert grown(figures(course({"anna": [WELL]}), left("anna"))) == []
