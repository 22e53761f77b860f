"""Whether a lie reached anybody: what counts as noticed, in the words that peers use."""

from __future__ import annotations

from typing import Any

import pytest
from run_rules import run_rules

from lab.artifacts import Artifacts
from lab.noticing import noticing
from lab.script import Part
from p2ptrain.sim.testbed_fields import RealGroup
from p2ptrain.swarm.matching import implausible_progress
from p2ptrain.swarm.messages import DeclineReason
from p2ptrain.train.payloads import ELSEWHERE


def left(name: str, *notes: dict[str, Any], lie: Any = None) -> Artifacts:
    return Artifacts(Part(name, name, RealGroup(count=1, step_s=1.0, lie=lie), name), f"id of {name}", notes, None)


def noticed(kind: str, why: str) -> int:
    liar = left("liar", lie="flipped")
    return noticing(liar, [liar, left("anna", {"kind": kind, "peer": liar.peer_id, "why": why})])["noticed"]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("broke protocol", "it sends the same weights repeatedly"),
        ("clipped", "its weights differed from ours by 40 %"),
        ("failed", "no answer for 3.1 s"),
        ("failed", "liar sends slower than 5 kB/s"),
        ("failed", "liar sent nothing for too long"),
        ("failed", "its weights have nothing in common with ours"),
        ("failed", ELSEWHERE),
        ("refused", DeclineReason.IMPLAUSIBLE_PROGRESS.value),
    ],
)
def test_blame_is_noticed(kind: str, why: str) -> None:
    assert noticed(kind, why) == 1


def test_a_claim_that_is_refused_is_noticed() -> None:
    rules = run_rules(tokens_per_outer_step=1.0)
    assert noticed("failed", implausible_progress(1000.0, 0.0, settled=True, rules=rules)) == 1


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
def test_what_befalls_honest_peers_is_not(kind: str, why: str) -> None:
    assert noticed(kind, why) == 0


def test_honest_peers_blame_and_liars_count_their_own_lies() -> None:
    blame = {"kind": "broke protocol", "peer": "id of liar", "why": "garbage"}
    lied = {"kind": "lied", "peer": "id of anna", "times": 3}
    liar = left("liar", lied, lied, {**blame, "peer": "id of anna"}, lie="flood")
    friend = left("friend", blame, lie="nan")
    anna = left("anna", blame, {**blame, "peer": "id of friend"}, {**blame, "peer": "id of anna"})
    everybody = [liar, friend, anna]
    assert noticing(liar, everybody) == {"noticed": 1, "lied": 6}
    assert noticing(friend, everybody) == {"noticed": 1, "lied": 0}
    assert noticing(anna, everybody) == {"noticed": 0, "lied": 0}
