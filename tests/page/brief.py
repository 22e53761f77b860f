"""A peer whose presence records last 25 s, not 75: if it is killed, others notice earlier.

Takes the arguments of ``python -m peer``.
"""

from __future__ import annotations

from p2ptrain.cli import run_command
from peer import network
from peer.cli import peer

LIFETIME_S = 25.0
"""Lifetime of a record, in seconds: more than the 20 s after which records are renewed."""

if __name__ == "__main__":
    network.PRESENCE_LIFETIME_S = LIFETIME_S
    run_command(peer, name="brief")
