"""Figures of broken exchanges and of blame, with the reasons in the peers' notes."""

from __future__ import annotations

from typing import Any

import pytest
from run_rules import run_rules
from sample_artifacts import KILLED, SUMMARY, WELL, artifacts, figures, record

from lab.figures import HEARD_S, blame, broken_exchanges
from lab.script import ActKind
from p2ptrain.base.errors import MISFIT
from p2ptrain.swarm.matching import implausible_progress
from p2ptrain.swarm.messages import DeclineReason
from p2ptrain.swarm.rules import ProgressBounds

DIES = 10.0


def failed(began: float, ended: float, partner: str = "id of bert") -> dict[str, Any]:
    return {"kind": "failed", "time": ended, "peer": partner, "why": "it said nothing", "seconds": ended - began}


def unanswered(time: float) -> dict[str, Any]:
    return {"kind": "failed", "time": time, "peer": "id of bert", "why": "failed to dial"}


def act(do: ActKind, who: str = "bert") -> dict[str, Any]:
    return {"at_s": 1, "time": DIES, "do": do.value, "who": who}


@pytest.mark.parametrize(
    ("note", "count"),
    [
        (failed(9.0, 15.0), 1),
        (failed(8.0, DIES - HEARD_S / 2), 1),  # its connections end before it counts as killed
        (failed(4.0, DIES - HEARD_S - 1), 0),  # an earlier one, with another cause
        (failed(11.0, 16.0), 0),  # with the peer that returned
        (failed(9.0, 15.0, "id of cleo"), 0),
        (unanswered(11.0), 0),
        ({"kind": "exchanged", "time": 11.0, "seconds": 2.0, "peer": "id of bert"}, 0),
    ],
)
def test_only_exchanges_in_progress_with_the_victim_count(note: dict[str, Any], count: int) -> None:
    anna = artifacts("anna", note)
    everybody = [anna, artifacts("bert"), artifacts("cleo")]
    for do in (ActKind.KILL, ActKind.SUSPEND):
        assert broken_exchanges(anna, everybody, [act(do)]) == count
    assert broken_exchanges(anna, everybody, [act(ActKind.START)]) == 0


def test_dials_to_a_dead_peer_fail_and_break_nothing() -> None:
    anna = artifacts("anna", failed(9.0, DIES), unanswered(12.0), unanswered(14.0), summary=SUMMARY)
    found = figures(record({"anna": [WELL], "bert": [KILLED]}, [act(ActKind.KILL)]), anna, artifacts("bert"))
    assert found["exchanges_failed"] == found["peers"]["anna"]["exchanges_failed"] == 3
    assert found["exchanges_broken"] == found["peers"]["anna"]["exchanges_broken"] == 1
    assert found["groups"]["anna"]["exchanges_broken"] == 1


def noticed(kind: str, why: str) -> int:
    liar = artifacts("liar", lie="flipped")
    return blame(liar, [liar, artifacts("anna", {"kind": kind, "peer": liar.peer_id, "why": why})])["noticed"]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("broke protocol", "it sends the same weights repeatedly"),
        ("clipped", "its weights differed from ours by 40 %"),
        ("failed", "no answer for 3.1 s"),
        ("failed", "liar sends slower than 5 kB/s"),
        ("failed", "liar sent nothing for too long"),
        ("failed", "its weights have nothing in common with ours"),
        ("failed", MISFIT),
        ("refused", DeclineReason.IMPLAUSIBLE_PROGRESS.value),
    ],
)
def test_blame_is_counted(kind: str, why: str) -> None:
    assert noticed(kind, why) == 1


def test_a_rejected_progress_claim_is_counted() -> None:
    rules = run_rules((8,), run_tokens=1000.0, tokens_per_outer_step=1.0)
    assert noticed("failed", implausible_progress(1000.0, 0.0, settled=True, bounds=ProgressBounds(rules))) == 1


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("exchanged", ""),
        ("found", ""),
        ("skipped", DeclineReason.BUSY.value),
        ("refused", DeclineReason.BUSY.value),
        ("refused", DeclineReason.CROSSING.value),
        ("failed", "the stream from liar ended"),
        ("failed", "failed to dial: failed to dial liar: all dials failed"),
        ("failed", "dialing liar took more than 10 s"),
    ],
)
def test_ordinary_failures_are_not_blame(kind: str, why: str) -> None:
    assert noticed(kind, why) == 0


def test_honest_peers_blame_and_adversaries_count_their_own_lies() -> None:
    note = {"kind": "broke protocol", "peer": "id of liar", "why": "garbage"}
    lied = {"kind": "lied", "peer": "id of anna", "times": 3}
    liar = artifacts("liar", lied, lied, {**note, "peer": "id of anna"}, lie="flood")
    friend = artifacts("friend", note, lie="nan")
    anna = artifacts("anna", note, {**note, "peer": "id of friend"}, {**note, "peer": "id of anna"})
    everybody = [liar, friend, anna]
    assert blame(liar, everybody) == {"noticed": 1, "lied": 6}
    assert blame(friend, everybody) == {"noticed": 1, "lied": 0}
    assert blame(anna, everybody) == {"noticed": 0, "lied": 0}
