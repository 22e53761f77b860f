"""A peer that notes what is left of the leader's rank when it builds the next one.

Takes the arguments of ``python -m peer``.
"""

from __future__ import annotations

import weakref

from p2ptrain.cli import run_command
from peer.cli import peer
from peer.team.generations import Team

begin = Team._begin
parts: dict[str, weakref.ref[object]] = {}


def noting(team: Team) -> None:
    if parts:
        left = [name for name, part in parts.items() if part() is not None]
        team._notebook.note("left of the old rank", parts=left)
    begin(team)
    rank = team.rank
    flat = rank.task.stage_model.flat
    kept = {
        "learner": rank.learner,
        "task": rank.task,
        "model": flat.module,
        "weights": flat.theta,
        "shard": rank.shard,
    }
    parts.update({name: weakref.ref(part) for name, part in kept.items()})


if __name__ == "__main__":
    Team._begin = noting
    run_command(peer, name="forgetful")
