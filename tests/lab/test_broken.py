"""Exchanges that somebody's death or sleep broke off, and calls to the dead, which are none."""

from __future__ import annotations

from typing import Any

import pytest
from leavings import KILLED, SUMMARY, WELL, course, figures, left

from lab.broken import HEARD_S, broken_off
from lab.script import Do

DIES = 10.0


def failed(began: float, ended: float, partner: str = "id of bert") -> dict[str, Any]:
    return {"kind": "failed", "time": ended, "peer": partner, "why": "it said nothing", "seconds": ended - began}


def unanswered(time: float) -> dict[str, Any]:
    return {"kind": "failed", "time": time, "peer": "id of bert", "why": "failed to dial"}


def act(do: Do, who: str = "bert") -> dict[str, Any]:
    return {"at_s": 1, "time": DIES, "do": do.value, "who": who}


@pytest.mark.parametrize(
    ("note", "count"),
    [
        (failed(9.0, 15.0), 1),
        (failed(8.0, DIES - HEARD_S / 2), 1),  # its connections end before it counts as killed
        (failed(4.0, DIES - HEARD_S - 1), 0),  # for another reason, before
        (failed(11.0, 16.0), 0),  # with who came back
        (failed(9.0, 15.0, "id of cleo"), 0),
        (unanswered(11.0), 0),
        ({"kind": "exchanged", "time": 11.0, "seconds": 2.0, "peer": "id of bert"}, 0),
    ],
)
def test_only_what_was_under_way_with_whom_it_happened_to(note: dict[str, Any], count: int) -> None:
    anna = left("anna", note)
    everybody = [anna, left("bert"), left("cleo")]
    for do in (Do.KILL, Do.FREEZE):
        assert broken_off(anna, everybody, [act(do)]) == count
    assert broken_off(anna, everybody, [act(Do.START)]) == 0


def test_calls_to_the_dead_fail_and_break_nothing() -> None:
    anna = left("anna", failed(9.0, DIES), unanswered(12.0), unanswered(14.0), summary=SUMMARY)
    found = figures(course({"anna": [WELL], "bert": [KILLED]}, [act(Do.KILL)]), anna, left("bert"))
    assert found["exchanges_failed"] == found["peers"]["anna"]["exchanges_failed"] == 3
    assert found["exchanges_broken"] == found["peers"]["anna"]["exchanges_broken"] == 1
    assert found["groups"]["anna"]["exchanges_broken"] == 1
