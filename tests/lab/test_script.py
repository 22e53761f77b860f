"""Timelines as data: peers, acts, and random draws that depend on the seed."""

from __future__ import annotations

from typing import Any

import pytest

from lab.scenario import BOOTSTRAP, parse
from lab.script import MAX_PEERS_PER_HOST, Act, ActKind, Script, script_of
from lab.stages import hosts_on_side
from sim.errors import ScenarioError


def script(tiny: dict[str, Any], group: dict[str, Any] | None = None, **sections: Any) -> Script:
    """Return the script of the tiny scenario with these fields in its second group."""
    tiny["peers"][1] |= group or {}
    return script_of(parse({**tiny, **sections}))


def test_initial_peers_have_no_act(tiny: dict[str, Any]) -> None:
    plain = script(tiny)
    assert plain.first == ("home-1", "home-2", "office-1")
    assert plain.acts == ()
    assert plain.hosts_of("home") == ["home-1", "home-2"]
    assert list(plain.hosts) == ["home-1", "home-2", "office-1"]


def test_a_killed_peer_is_replaced_on_the_same_host(tiny: dict[str, Any]) -> None:
    killed = script(tiny, {"leaves_at_s": 5, "leaves": "killed", "returns_after_s": 3})
    assert killed.acts == (Act(5.0, ActKind.KILL, "office-1"), Act(8.0, ActKind.START, "office-1.2"))
    assert [part.host for part in killed.peers if part.group == "office"] == ["office-1", "office-1"]


def test_a_resumed_peer_is_the_same_peer(tiny: dict[str, Any]) -> None:
    left = script(tiny, {"leaves_at_s": 5, "returns_after_s": 3, "returns": "resumed"})
    assert left.acts == (Act(5.0, ActKind.STOP, "office-1"), Act(8.0, ActKind.START, "office-1"))
    assert len(left.peers) == 3


def test_a_late_peer_is_no_initial_peer(tiny: dict[str, Any]) -> None:
    late = script(tiny, {"arrives_at_s": 4, "arrives_over_s": 2})
    assert late.first == ("home-1", "home-2")
    [act] = late.acts
    assert act.kind is ActKind.START
    assert 4 < act.at_s < 6


def test_acts_are_in_order_and_a_peer_that_left_is_not_resumed(tiny: dict[str, Any]) -> None:
    acts = script(
        tiny,
        {"leaves_at_s": 12, "freezes": [{"at_s": 2, "for_s": 3}, {"at_s": 10, "for_s": 5}, {"at_s": 20, "for_s": 1}]},
        partitions=[{"at_s": 1, "for_s": 3, "sides": [["home"], ["office", BOOTSTRAP]]}],
        bootstrap={"dies_at_s": 7, "returns_after_s": 2},
    ).acts
    assert [(act.at_s, act.kind, act.who) for act in acts] == [
        (1, ActKind.PART, "0"),
        (2, ActKind.SUSPEND, "office-1"),
        (4, ActKind.HEAL, "0"),
        (5, ActKind.RESUME, "office-1"),
        (7, ActKind.KILL, BOOTSTRAP),
        (9, ActKind.START, BOOTSTRAP),
        (10, ActKind.SUSPEND, "office-1"),
        (12, ActKind.STOP, "office-1"),
    ]


def test_random_draws_depend_on_the_seed(tiny: dict[str, Any]) -> None:
    churn = {"stays_s": 5.0, "leaves": "killed", "returns_after_s": 1}
    first = script(tiny, churn)
    assert first == script(tiny, churn)
    tiny["run"]["seed"] = 2
    assert first != script(tiny, churn)
    assert all(act.at_s <= 31 for act in first.acts)  # run.seconds, after which nobody joins


def test_churn_without_an_end_is_bounded(tiny: dict[str, Any]) -> None:
    del tiny["run"]["seconds"]
    endless = script(tiny, {"stays_s": 0.01, "leaves": "killed", "returns_after_s": 0})
    assert len([part for part in endless.peers if part.group == "office"]) == MAX_PEERS_PER_HOST


@pytest.mark.parametrize(
    ("side", "hosts"),
    [(["home"], ["home-1", "home-2"]), (["office", BOOTSTRAP], ["office-1", BOOTSTRAP])],
)
def test_hosts_on_a_side(tiny: dict[str, Any], side: list[str], hosts: list[str]) -> None:
    assert hosts_on_side(side, script(tiny).hosts_of) == hosts


def test_troubles_begin_and_end_while_the_peer_runs(tiny: dict[str, Any]) -> None:
    troubles = [
        {"what": "disk_full", "at_s": 1, "for_s": 2},
        {"what": "read_only", "at_s": 2, "for_s": 20},
        {"what": "no_descriptors", "at_s": 4},
        {"what": "daemon_dies", "at_s": 5},
        {"what": "daemon_dies", "at_s": 20},
    ]
    acts = script(tiny, {"leaves_at_s": 12, "troubles": troubles}).acts
    assert [(act.at_s, act.kind) for act in acts] == [
        (1, ActKind.FILL),
        (2, ActKind.LOCK),
        (3, ActKind.DRAIN),
        (4, ActKind.EXHAUST),
        (5, ActKind.LOSE_DAEMON),
        (12, ActKind.STOP),
    ]
    assert {act.who for act in acts} == {"office-1"}


def test_networks_and_clocks_change(tiny: dict[str, Any]) -> None:
    troubles = [
        {"what": "new_address", "at_s": 1},
        {"what": "no_route", "at_s": 2, "for_s": 10},
        {"what": "clock_jumps", "at_s": 3, "by_s": -86_400},
        {"what": "new_network", "at_s": 4},
    ]
    acts = script(tiny, {"troubles": troubles}).acts
    assert [(act.at_s, act.kind, act.by_s) for act in acts] == [
        (1, ActKind.READDRESS, 0.0),
        (2, ActKind.UNROUTE, 0.0),
        (3, ActKind.JUMP, -86_400.0),
        (4, ActKind.MOVE, 0.0),
        (12, ActKind.REROUTE, 0.0),
    ]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"troubles": [{"what": "clock_jumps", "at_s": 1}]}, "by_s: give it for clock_jumps alone"),
        ({"troubles": [{"what": "no_route", "at_s": 1, "by_s": 1}]}, "by_s: give it for clock_jumps alone"),
        ({"troubles": [{"what": "new_network", "at_s": 1}], "home": True}, "a line of its own with IPv4 alone"),
        ({"troubles": [{"what": "mappings_lost", "at_s": 1}]}, "mappings_lost needs a router"),
        ({"troubles": [{"what": "new_address", "at_s": 1, "for_s": 2}]}, "nothing ends new_address"),
    ],
)
def test_impossible_changes_are_refused(tiny: dict[str, Any], change: dict[str, Any], fault: str) -> None:
    with pytest.raises(ScenarioError, match=fault):
        script(tiny, change)


def test_a_present_peer_is_banned_once(tiny: dict[str, Any]) -> None:
    acts = script(tiny, {"banned_at_s": 3, "leaves_at_s": 12}, admission="invite").acts
    assert acts == (Act(3.0, ActKind.BAN, "office-1"), Act(12.0, ActKind.STOP, "office-1"))
    assert script(tiny, {"banned_at_s": 13}, admission="invite").acts == (Act(12.0, ActKind.STOP, "office-1"),)


def test_peers_of_a_churning_group_leave_in_turn(tiny: dict[str, Any]) -> None:
    churn = {"count": 2, "leaves_at_s": 5, "leaves_every_s": 10, "leaves": "killed", "returns_after_s": 0}
    churning = script(tiny, churn)
    assert churning.acts == (
        Act(5.0, ActKind.KILL, "office-1"),
        Act(5.0, ActKind.START, "office-1.2"),
        Act(15.0, ActKind.KILL, "office-2"),
        Act(15.0, ActKind.START, "office-2.2"),
        Act(25.0, ActKind.KILL, "office-1.2"),
        Act(25.0, ActKind.START, "office-1.3"),
    )
    assert churning.churning == {part.name for part in churning.peers if part.group == "office"}
    assert script(tiny, {"leaves_every_s": None}).churning == set()
