"""Figures from artifacts, and their comparison."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sample_artifacts import CRASHED, GROUP, KILLED, SUMMARY, WELL, artifacts, exchange, figures, record

from lab.artifacts import Artifacts
from lab.figures import compared
from lab.report import figure, growth_lines
from lab.resource_monitor import FEWEST, FIGURES, growth
from lab.scenario import RealGroup
from lab.script import ActKind, ScriptedPeer


def test_a_killed_peer_did_not_stay_but_its_exchanges_count() -> None:
    found = figures(
        record({"anna": [WELL], "bert": [KILLED], "cleo": [KILLED, WELL]}),
        artifacts("anna", exchange(1, "id of bert"), {"kind": "failed"}, summary=SUMMARY),
        artifacts("bert", exchange(1, "id of anna")),
        artifacts("cleo", {"kind": "caught up"}, summary={**SUMMARY, "val_loss_last": 3.0}),
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


def test_a_crash_is_an_unexpected_exit() -> None:
    assert figures(record({"anna": [CRASHED]}), artifacts("anna"))["unexpected_exits"] == 1


def test_a_nan_loss_has_not_learned() -> None:
    found = figures(record({"anna": [WELL]}), artifacts("anna", summary={**SUMMARY, "val_loss_last": None}))
    assert found["learned"] == 0
    assert found["worst_loss"] is None


def test_exchanges_after_the_last_act_are_those_that_began_then() -> None:
    done = [{"at_s": 1, "time": 10.0, "do": "is killed", "who": "bert"}]
    notes = [exchange(8.0, "id of bert"), exchange(9.5, "id of bert"), exchange(10.5, "id of bert")]
    found = figures(record({"anna": [WELL]}, done), artifacts("anna", *notes, summary=SUMMARY))
    assert found["fewest_exchanges_afterwards"] == 1


def test_exchanges_across_a_partition() -> None:
    done = [
        {"at_s": 1, "time": 10.0, "do": ActKind.PART.value, "who": "0"},
        {"at_s": 2, "time": 20.0, "do": ActKind.HEAL.value, "who": "0"},
    ]
    times = (5.0, 9.5, 12.0, 19.5, 21.0, 22.0)  # before, across its start, within, across its end, after, after
    anna = artifacts("anna", *(exchange(time, "id of bert") for time in times), exchange(12.0, "id of cleo"))
    found = figures(
        record({"anna": [WELL]}, done),
        anna,
        artifacts("bert"),
        artifacts("cleo"),
        sides={"0": [["anna", "cleo"], ["bert"]]},
    )
    assert found["exchanges_across"] == 1
    assert found["exchanges_across_afterwards"] == 2


def test_the_longest_stall_is_the_largest_of_all_peers() -> None:
    anna = artifacts("anna", summary={**SUMMARY, "longest_stall_inner_steps": 2.5})
    bert = artifacts("bert", summary={**SUMMARY, "longest_stall_inner_steps": None})  # it made one inner step
    cleo = artifacts("cleo", summary={**SUMMARY, "longest_stall_inner_steps": 9.0})  # it did not stay until the end
    found = figures(record({"anna": [WELL], "bert": [WELL], "cleo": [KILLED]}), anna, bert, cleo)
    assert found["longest_stall"] == found["groups"]["anna"]["longest_stall"] == 2.5
    assert found["groups"]["bert"]["longest_stall"] is None
    assert found["peers"]["cleo"]["longest_stall"] == 9.0


def test_adversaries_count_in_no_figure_of_honest_peers() -> None:
    liar = Artifacts(
        ScriptedPeer("liar", "liar", RealGroup(count=1, step_s=1.0, lie="flipped"), "liar"),
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
    happened = record(
        {"anna": [WELL], "liar": [KILLED, WELL]}, [{"at_s": 1, "time": 8.0, "do": ActKind.START.value, "who": "liar"}]
    )
    samples = {"liar": [(100 + number, 50, 20, 10) for number in range(FEWEST)]}
    found = figures({**happened, "samples": samples}, artifacts("anna", summary=SUMMARY), liar)
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


def test_newcomers_are_peers_started_after_second_0() -> None:
    done = [{"at_s": 1, "time": 10.0, "do": ActKind.START.value, "who": name} for name in ("bert", "cleo")]
    found = figures(
        record({"anna": [WELL], "bert": [WELL], "cleo": [KILLED, WELL]}, done),
        artifacts("anna", {"kind": "caught up", "time": 5.0}),  # there from the start, and a little late
        artifacts("bert", {"kind": "caught up", "time": 12.0}),
        artifacts("cleo", {"kind": "caught up", "time": 4.0}),  # before it was killed
    )
    assert found["caught_up"] == 3
    assert found["newcomers_caught_up"] == 1


def test_groups_have_their_means() -> None:
    pair = [Artifacts(ScriptedPeer(f"home-{n}", "home", GROUP, f"home-{n}"), f"id-{n}", [], None) for n in (1, 2)]
    pair[0] = replace(pair[0], notes=[exchange(1, "id-2")] * 4, summary=SUMMARY)
    pair[1] = replace(pair[1], notes=[exchange(1, "id-1")] * 2, summary={**SUMMARY, "val_loss_last": 3.0})
    found = figures(record({"home-1": [WELL], "home-2": [WELL]}), *pair)["groups"]["home"]
    assert found["stayed"] == 2
    assert found["loss"] == 2.5
    assert found["exchanges_made"] == 3


def test_figures_are_compared_where_both_are_there() -> None:
    disturbed = {"loss": 2.2, "gone": 1, "none": None, "yes": True, "groups": {"home": {"tokens": 90}}, "zero": 1}
    calm = {"loss": 2.0, "none": 1, "yes": True, "groups": {"home": {"tokens": 100}, "other": {}}, "zero": 0}
    assert compared(disturbed, calm) == {"loss": 1.1, "groups": {"home": {"tokens": 0.9}}}


def test_growth_counts_after_settling() -> None:
    steady = [(100, 50, 20, 10)] * FEWEST
    settling = [(1, 1, 1, 1)] * (FEWEST // 2) + steady
    leaking = [(100 + number, 50, 20, 10) for number in range(2 * FEWEST)]
    assert growth(steady[1:]) == {}  # too few for a trend
    assert growth(settling) == dict.fromkeys(FIGURES, 0.0)
    found = growth(leaking)
    assert found["memory_growth"] > 0.4
    assert found["daemon_memory_growth"] == found["descriptor_growth"] == 0
    one_more = [(100, 50, 12 + (number > FEWEST), 10) for number in range(2 * FEWEST)]
    assert growth(one_more)["descriptor_growth"] == 1  # a number, since one in twelve is not a trend


def test_growth_is_the_largest_of_the_peers_that_stayed() -> None:
    samples = {name: [(100, 50, 20, 10)] * FEWEST for name in ("anna", "bert")}
    samples["bert"] = [(100 + number, 50, 20, 10) for number in range(FEWEST)]
    lives = {"anna": [WELL], "bert": [KILLED]}
    found = figures({**record(lives), "samples": samples}, artifacts("anna", summary=SUMMARY), artifacts("bert"))
    assert found["memory_growth"] == 0
    found = figures({**record({**lives, "bert": [WELL]}), "samples": samples}, artifacts("anna"), artifacts("bert"))
    assert found["memory_growth"] > 0.1


def test_last_distance() -> None:
    notes = [{**exchange(n, "id of bert"), "distance": d} for n, d in enumerate([9.0, 9.0, *[0.2] * 6, *[0.4] * 4])]
    found = figures(
        record({"anna": [WELL], "bert": [WELL], "cleo": [KILLED]}),
        artifacts("anna", *notes),
        artifacts("bert", *notes[:1]),
        artifacts("cleo", {**exchange(1, "x"), "distance": 99.0}),
    )
    assert found["peers"]["anna"]["last_distance"] == 0.2
    assert found["last_distance"] == 9.0
    assert figures(record({"anna": [WELL]}), artifacts("anna"))["last_distance"] is None


def test_the_final_gossip_does_not_count_as_training() -> None:
    notes = [exchange(1.0, "x"), exchange(2.0, "x"), {"kind": "trained", "time": 4.0}, exchange(5.0, "x")]
    found = figures(record({"anna": [WELL]}), artifacts("anna", *notes, summary=SUMMARY))
    assert found["fewest_exchanges"] == found["fewest_exchanges_afterwards"] == 2


@pytest.mark.parametrize(
    ("later", "share"),
    [({"punched": True}, 1.0), ({"relay": "the bootstrap"}, 0.0), ({}, 0.0)],
    ids=["direct", "still relayed", "in one home"],
)
def test_a_pair_behind_routers_is_direct_after_five_seconds(later: dict[str, Any], share: float) -> None:
    early = {**exchange(1.0, "id of bert"), "relay": "the bootstrap"}
    everybody = [
        artifacts("anna", early, {**exchange(7.0, "id of bert"), **later}, router="keep"),
        artifacts("bert", router="other"),
        artifacts("cleo", {**exchange(9.0, "id of bert"), "relay": "the bootstrap"}, router="symmetric"),
    ]
    found = figures(record({each.peer.name: [WELL] for each in everybody}), *everybody)
    assert (found["punchable_pairs"], found["punched_share"]) == (1, share)


def test_bytes_of_the_bootstraps_lines_are_per_exchange() -> None:
    notes = [exchange(1.0, "x"), exchange(2.0, "y")]
    ran = {**record({"anna": [WELL]}), "line_bytes": {"bootstrap-1": 300, "bootstrap-2": 100}}
    assert figures(ran, artifacts("anna", *notes))["bootstrap_bytes_per_exchange"] == 200
    ran["line_bytes"] = {"bootstrap-1": None}
    assert figures(ran, artifacts("anna", *notes))["bootstrap_bytes_per_exchange"] is None


def test_exchanges_through_a_relay() -> None:
    notes = [exchange(1.0, "x"), {**exchange(2.0, "y"), "relay": "the bootstrap"}]
    assert figures(record({"anna": [WELL]}), artifacts("anna", *notes))["relayed_exchanges"] == 1


def test_exchanges_between_routers_are_counted_by_both_peers() -> None:
    def one(name: str, router: bool, *partners: str) -> Artifacts:
        found = artifacts(name, *(exchange(2.0, f"id of {partner}") for partner in partners))
        return replace(
            found, peer=replace(found.peer, settings=found.peer.settings.model_copy(update={"router": router}))
        )

    everybody = one("anna", True, "bert", "cleo"), one("bert", True, "anna", "cleo"), one("cleo", False, "anna", "bert")
    lives = {name: [WELL] for name in ("anna", "bert", "cleo")}
    assert figures(record(lives), *everybody)["exchanges_between_routers"] == 2


def test_newcomers() -> None:
    done = [{"at_s": 1, "time": 10.0, "do": ActKind.START.value, "who": name} for name in ("bert", "cleo")]
    done += [{"at_s": 9, "time": 150.0, "do": ActKind.START.value, "who": "dora"}]
    everybody = [
        artifacts("anna", {"kind": "progress", "time": 160.0}, summary=SUMMARY),
        artifacts("bert", {"kind": "caught up", "time": 12.0}, summary={**SUMMARY, "val_loss_last": 3.0}),
        artifacts("cleo", {"kind": "progress", "time": 20.0}),
        artifacts("dora"),  # too late to do anything
    ]
    lives = {"anna": [WELL], "bert": [WELL], "cleo": [KILLED], "dora": [WELL]}
    found = figures(record(lives, done), *everybody)
    assert found["newcomers"] == 3
    assert found["newcomers_caught_up"] == 1
    assert found["newcomers_caught_up_share"] == 0.5
    assert found["newcomers_loss"] == 1.5
    nobody = figures(record({"anna": [WELL]}), artifacts("anna", summary=SUMMARY))
    assert nobody["newcomers_caught_up_share"] is nobody["newcomers_loss"] is None


def test_figures_after_the_last_act() -> None:
    done = [{"at_s": 1, "time": 10.0, "do": ActKind.RESUME.value, "who": "anna"}]
    notes = [{"kind": "caught up", "time": 5.0}, {"kind": "saved", "time": 6.0}, {"kind": "caught up", "time": 11.0}]
    end = [{"kind": "stopping", "time": 20.0}, {"kind": "saved", "time": 21.0}]
    found = figures(record({"anna": [WELL]}, done), artifacts("anna", *notes, *end))
    assert found["peers"]["anna"]["caught_up_afterwards"] == found["groups"]["anna"]["caught_up_afterwards"] == 1
    assert found["saved_afterwards"] == 0  # all peers save when they leave
    found = figures(record({"anna": [WELL]}, done), artifacts("anna", *notes, {"kind": "saved", "time": 15.0}, *end))
    assert found["saved_afterwards"] == 1


def test_bootstraps_are_watched_but_are_no_peers() -> None:
    samples = {"anna": [(100, 50, 20, 10)] * FEWEST, "bootstrap": [(100, 50 + n, 20, 10) for n in range(FEWEST)]}
    happened = {**record({"anna": [WELL]}), "samples": samples, "peaks": {"anna": 7, "bootstrap": 9}}
    found = figures(happened, artifacts("anna", summary=SUMMARY))
    assert found["daemon_memory_growth"] == 0
    assert figure(found, "bootstraps.bootstrap.daemon_memory_growth") > 0.1  # type: ignore[operator]  # it is there
    assert found["peak_memory"] == 7
    assert growth_lines(found)[0] == (
        "anna: memory 100 to 100, daemon memory 50 to 50, descriptors 20 to 20, daemon descriptors 10 to 10"
    )
    assert growth_lines(figures(record({"anna": [WELL]}), artifacts("anna"))) == []


def progress(time: float, step: int, tokens: int = 0) -> dict[str, Any]:
    return {"kind": "progress", "time": time, "step": step, "tokens": tokens}


def test_exchanges_per_outer_step_is_the_smallest_of_all_peers() -> None:
    anna = artifacts("anna", progress(0.5, 2), exchange(1, "x"), exchange(2, "x"), exchange(3, "x"), progress(9, 4))
    bert = artifacts("bert", progress(0.5, 0), exchange(1, "x"), progress(9, 2))
    cleo = artifacts("cleo", progress(0.5, 0), progress(9, 9))
    dora = artifacts("dora", exchange(1, "x"))  # without notes of outer steps
    lives = {"anna": [WELL], "bert": [WELL], "cleo": [KILLED], "dora": [WELL]}
    found = figures(record(lives), anna, bert, cleo, dora)
    assert found["exchanges_per_outer_step"] == found["groups"]["bert"]["exchanges_per_outer_step"] == 0.5
    assert found["peers"]["anna"]["exchanges_per_outer_step"] == 1.5
    assert found["groups"]["dora"]["exchanges_per_outer_step"] is None


def test_fewest_tokens_between_the_first_and_the_last_act() -> None:
    done = [{"at_s": 1, "time": time, "do": ActKind.FILL.value, "who": "anna"} for time in (10.0, 15.0, 30.0)]
    anna = artifacts(
        "anna", progress(9, 1, 100), progress(31, 5, 700), progress(40, 7, 900)
    )  # no disk space for its log in between
    bert = artifacts("bert", progress(9, 1, 100), progress(20, 4, 500), progress(29, 4, 500))  # it ended then
    cleo = artifacts("cleo", progress(9, 1, 100), progress(31, 1, 100))
    dora = artifacts(
        "dora", progress(9, 1, 500), progress(14, 2, 700), progress(20, 1, 0), progress(33, 4, 300)
    )  # killed
    lives = {"anna": [WELL], "bert": [WELL], "cleo": [KILLED], "dora": [KILLED, WELL]}
    found = figures(record(lives, done), anna, bert, cleo, dora, artifacts("emil"))
    assert [found["peers"][name]["tokens_meanwhile"] for name in (*lives, "emil")] == [600, 400, 0, 500, 0]
    assert found["fewest_tokens_meanwhile"] == 400
    assert found["slowest_pace_meanwhile"] == 400 / 600
    calm = figures(record({"anna": [WELL]}), anna)
    assert [calm[name] for name in ("fewest_tokens_meanwhile", "slowest_pace_meanwhile")] == [None, None]


def test_figures_of_partitions_are_there() -> None:
    done = [
        {"at_s": 1, "time": 10.0, "do": ActKind.PART.value, "who": "0"},
        {"at_s": 2, "time": 20.0, "do": ActKind.HEAL.value, "who": "0"},
    ]
    anna = artifacts("anna", progress(5, 1), exchange(12, "id of cleo"), progress(24, 3), exchange(25, "id of bert"))
    lives = {"anna": [WELL], "bert": [WELL], "cleo": [WELL]}
    sides = {"0": [["anna", "cleo"], ["bert"]]}
    found = figures(record(lives, done), anna, artifacts("bert"), artifacts("cleo"), sides=sides)
    assert found["exchanges_within"] == 1
    assert found["outer_steps_to_contact"] == 2
    untouched = figures(record(lives), anna)
    assert untouched["exchanges_within"] is untouched["outer_steps_to_contact"] is None
