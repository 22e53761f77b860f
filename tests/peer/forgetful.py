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
    for name, part in {"learner": rank.learner, "model": rank.task.stage_model.flat, "shard": rank.shard}.items():
        parts[name] = weakref.ref(part)
    parts["weights"] = weakref.ref(rank.task.stage_model.flat.theta)


if __name__ == "__main__":
    Team._begin = noting
    run_command(peer, name="forgetful")
