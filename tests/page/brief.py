"""A peer whose presence records last 10 s, not 75, and are renewed as much oftener: others notice its death earlier.

Takes the arguments of ``python -m peer``.
"""

from __future__ import annotations

from p2ptrain.cli import run_command
from p2ptrain.swarm import discovery
from peer import network
from peer.cli import peer

LIFETIME_S = 10.0
"""Lifetime of a record, in seconds."""
RENEWED_S = 3.0
"""Time after which a record is renewed, in seconds."""

if __name__ == "__main__":
    network.PRESENCE_LIFETIME_S = LIFETIME_S
    discovery.ANNOUNCE_PERIOD_S = RENEWED_S
    run_command(peer, name="brief")
