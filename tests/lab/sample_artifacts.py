"""Artifacts and run records made up for tests of figures."""

from __future__ import annotations

from typing import Any

from lab.artifacts import Artifacts
from lab.figures import figures_of
from lab.scenario import RealGroup
from lab.script import ScriptedPeer

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


def artifacts(
    name: str, *notes: dict[str, Any], summary: dict[str, Any] | None = None, lie: Any = None, router: Any = False
) -> Artifacts:
    group = GROUP.model_copy(update={"lie": lie, "router": router})
    return Artifacts(ScriptedPeer(name, name, group, name), f"id of {name}", notes, summary)


def record(lives: dict[str, list[dict[str, Any]]], done: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    rest = {"missed": [], "troubles": [], "cut_short": False, "wall_s": 9.0, "samples": {}}
    return {"lives": lives, "done": done or [], **rest}


WELL = {"status": 0, "ended_by_us": ""}
KILLED = {"status": -9, "ended_by_us": "is killed"}
CRASHED = {"status": 1, "ended_by_us": ""}


def figures(record: dict[str, Any], *everybody: Artifacts, sides: dict[str, Any] | None = None) -> dict[str, Any]:
    return figures_of(record, everybody, 0.1, sides or {})
