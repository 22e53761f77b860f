"""A peer whose team notices a frozen rank within seconds. Takes the arguments of ``python -m peer``."""

from __future__ import annotations

import functools

from p2ptrain.cli import run_command
from peer import assembly
from peer.cli import peer
from peer.team.generations import Team

if __name__ == "__main__":
    assembly.Team = functools.partial(Team, timeout_s=6.0)
    run_command(peer, name="hasty")
