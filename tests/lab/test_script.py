"""Timelines as data: who exists, what happens when, and that chance is the scenario's seed's."""

from __future__ import annotations

from typing import Any

import pytest

from lab.scenario import BOOTSTRAP, parse
from lab.script import MOST_OCCUPANTS, Act, Do, Script, written
from lab.stages import members


def script(tiny: dict[str, Any], group: dict[str, Any] | None = None, **sections: Any) -> Script:
    """Of the tiny scenario, with these fields in its second group."""
    tiny["peers"][1] |= group or {}
    return written(parse({**tiny, **sections}))


def test_who_is_there_from_the_beginning_has_no_act(tiny: dict[str, Any]) -> None:
    plain = script(tiny)
    assert plain.first == ("home-1", "home-2", "office-1")
    assert plain.acts == ()
    assert plain.seats("home") == ["home-1", "home-2"]
    assert list(plain.hosts) == ["home-1", "home-2", "office-1"]


def test_who_is_killed_is_replaced_on_the_same_computer(tiny: dict[str, Any]) -> None:
    killed = script(tiny, {"leaves_at_s": 5, "leaves": "killed", "returns_after_s": 3})
    assert killed.acts == (Act(5.0, Do.KILL, "office-1"), Act(8.0, Do.START, "office-1.2"))
    assert [part.host for part in killed.parts if part.group == "office"] == ["office-1", "office-1"]


def test_who_resumes_is_the_same_peer(tiny: dict[str, Any]) -> None:
    left = script(tiny, {"leaves_at_s": 5, "returns_after_s": 3, "returns": "resumed"})
    assert left.acts == (Act(5.0, Do.STOP, "office-1"), Act(8.0, Do.START, "office-1"))
    assert len(left.parts) == 3


def test_who_comes_late_is_not_there_from_the_beginning(tiny: dict[str, Any]) -> None:
    late = script(tiny, {"arrives_at_s": 4, "arrives_over_s": 2})
    assert late.first == ("home-1", "home-2")
    [act] = late.acts
    assert act.do is Do.START
    assert 4 < act.at_s < 6


def test_everything_is_in_order_and_nobody_is_woken_after_leaving(tiny: dict[str, Any]) -> None:
    acts = script(
        tiny,
        {"leaves_at_s": 12, "freezes": [{"at_s": 2, "for_s": 3}, {"at_s": 10, "for_s": 5}, {"at_s": 20, "for_s": 1}]},
        partitions=[{"at_s": 1, "for_s": 3, "sides": [["home"], ["office", BOOTSTRAP]]}],
        bootstrap={"dies_at_s": 7, "returns_after_s": 2},
    ).acts
    assert [(act.at_s, act.do, act.who) for act in acts] == [
        (1, Do.PART, "0"),
        (2, Do.FREEZE, "office-1"),
        (4, Do.HEAL, "0"),
        (5, Do.THAW, "office-1"),
        (7, Do.KILL, BOOTSTRAP),
        (9, Do.START, BOOTSTRAP),
        (10, Do.FREEZE, "office-1"),
        (12, Do.STOP, "office-1"),
    ]


def test_chance_is_the_seeds(tiny: dict[str, Any]) -> None:
    churn = {"stays_s": 5.0, "leaves": "killed", "returns_after_s": 1}
    first = script(tiny, churn)
    assert first == script(tiny, churn)
    tiny["run"]["seed"] = 2
    assert first != script(tiny, churn)
    assert all(act.at_s <= 31 for act in first.acts)  # run.seconds, and who would come after it


def test_churn_without_an_end_is_bounded(tiny: dict[str, Any]) -> None:
    del tiny["run"]["seconds"]
    endless = script(tiny, {"stays_s": 0.01, "leaves": "killed", "returns_after_s": 0})
    assert len([part for part in endless.parts if part.group == "office"]) == MOST_OCCUPANTS


@pytest.mark.parametrize(
    ("side", "hosts"),
    [(["home"], ["home-1", "home-2"]), (["office", BOOTSTRAP], ["office-1", BOOTSTRAP])],
)
def test_who_is_on_a_side(tiny: dict[str, Any], side: list[str], hosts: list[str]) -> None:
    assert members(side, script(tiny).seats) == hosts


def test_troubles_begin_and_end_while_somebody_is_there(tiny: dict[str, Any]) -> None:
    troubles = [
        {"what": "disk_full", "at_s": 1, "for_s": 2},
        {"what": "read_only", "at_s": 2, "for_s": 20},
        {"what": "no_descriptors", "at_s": 4},
        {"what": "daemon_dies", "at_s": 5},
        {"what": "daemon_dies", "at_s": 20},
    ]
    acts = script(tiny, {"leaves_at_s": 12, "troubles": troubles}).acts
    assert [(act.at_s, act.do) for act in acts] == [
        (1, Do.FILL),
        (2, Do.LOCK),
        (3, Do.DRAIN),
        (4, Do.EXHAUST),
        (5, Do.LOSE_DAEMON),
        (12, Do.STOP),
    ]
    assert {act.who for act in acts} == {"office-1"}


def test_who_is_banned_while_there_is_banned_once(tiny: dict[str, Any]) -> None:
    acts = script(tiny, {"banned_at_s": 3, "leaves_at_s": 12}, admission="invite").acts
    assert acts == (Act(3.0, Do.BAN, "office-1"), Act(12.0, Do.STOP, "office-1"))
    assert script(tiny, {"banned_at_s": 13}, admission="invite").acts == (Act(12.0, Do.STOP, "office-1"),)


def test_of_a_churning_group_one_goes_after_the_other_to_the_end(tiny: dict[str, Any]) -> None:
    churn = {"count": 2, "leaves_at_s": 5, "leaves_every_s": 10, "leaves": "killed", "returns_after_s": 0}
    churning = script(tiny, churn)
    assert churning.acts == (
        Act(5.0, Do.KILL, "office-1"),
        Act(5.0, Do.START, "office-1.2"),
        Act(15.0, Do.KILL, "office-2"),
        Act(15.0, Do.START, "office-2.2"),
        Act(25.0, Do.KILL, "office-1.2"),
        Act(25.0, Do.START, "office-1.3"),
    )
    assert churning.churning == {part.name for part in churning.parts if part.group == "office"}
    assert script(tiny, {"leaves_every_s": None}).churning == set()
