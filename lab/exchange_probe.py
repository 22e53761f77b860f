"""Probe for exchanges in progress, through the peer's ``status``."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from p2ptrain.base.errors import HomeError
from peer.owner.control_socket import ask

LOOKS_S = 0.05
"""Interval of probes. Guess: far shorter than an exchange on a slow link; the shortest exchange of lab runs would
settle it."""
LOOKS = 8
"""Probes in a row that must find an exchange, so that the partner most likely takes part in it.

A peer that accepts an offer is in an exchange at once, but its answer takes time on a slow link; if it dies before
that, no exchange of the partner is broken."""
PATIENCE_S = 30.0
"""Time within which an exchange must come. Guess: many outer steps of a scenario; gaps between exchanges of lab runs
would settle it."""


async def amid_exchange(home: Path, patience_s: float = PATIENCE_S) -> bool:
    """Wait until LOOKS probes in a row find an exchange of the peer; return False if that takes too long."""
    until, found = time.monotonic() + patience_s, 0
    while time.monotonic() < until:
        found = found + 1 if await asyncio.to_thread(_exchanges, home) else 0
        if found == LOOKS:
            return True
        await asyncio.sleep(LOOKS_S)
    return False


def _exchanges(home: Path) -> int:
    """Return the number of exchanges in progress; 0 if the peer does not answer."""
    try:
        count = ask(home, command="status")["status"]["exchanges_under_way"]
    except (HomeError, KeyError, TypeError):
        return 0
    return int(count)
