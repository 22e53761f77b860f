"""Share of the uplink that exchanges used."""

from __future__ import annotations

from typing import Any

import pytest

from lab.artifacts import Artifacts
from lab.figures import figures_of
from lab.scenario import RealGroup
from lab.script import ScriptedPeer

NARROW = RealGroup(count=1, step_s=1.0, up_mbit_s=2)
WELL = [{"status": 0, "ended_by_us": ""}]


def artifacts(name: str, group: RealGroup, *notes: dict[str, Any], outer_steps: int = 1) -> Artifacts:
    return Artifacts(ScriptedPeer(name, name, group, name), f"id of {name}", notes, {"outer_steps": outer_steps})


def exchange(began: float, ended: float, sent_bytes: int) -> dict[str, Any]:
    return {"kind": "exchanged", "time": ended, "seconds": ended - began, "peer": "a", "sent_bytes": sent_bytes}


def at(time: float, kind: str) -> dict[str, Any]:
    return {"kind": kind, "time": time}


def figures(*everybody: Artifacts) -> dict[str, Any]:
    lives = {each.peer.name: WELL for each in everybody}
    record = {"lives": lives, "done": [], "missed": [], "troubles": [], "wall_s": 9.0, "samples": {}}
    return figures_of(record, everybody, None, {})


def test_the_share_of_the_uplink_counts_from_the_first_exchange_to_the_end_of_training() -> None:
    made = exchange(10.0, 12.0, 250_000), exchange(15.0, 16.0, 500_000)  # 6 Mbit, where the line carries 20
    still = artifacts("anna", NARROW, at(1.0, "found"), *made, at(20.0, "progress"))
    assert still.uplink_share() == pytest.approx(0.3)
    ended = artifacts("bert", NARROW, *made, at(16.0, "trained"), exchange(16.5, 18.0, 250_000))  # the final gossip's
    assert ended.uplink_share() == pytest.approx(0.5)
    assert figures(still, ended)["uplink_share"] == pytest.approx(0.3)  # the smallest of all peers


def test_without_a_rate_or_an_exchange_there_is_no_share() -> None:
    free = artifacts("anna", RealGroup(count=1, step_s=1.0), exchange(10.0, 12.0, 250_000), at(20.0, "progress"))
    idle = artifacts("bert", NARROW, at(20.0, "progress"))
    assert (free.uplink_share(), idle.uplink_share()) == (None, None)
    assert figures(free, idle)["uplink_share"] is None
