"""Probe for exchanges in progress, through the peer's ``status``."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from p2ptrain.base.errors import HomeError
from peer.owner.control_socket import ask

PROBE_INTERVAL_S = 0.05
"""Interval of probes. Guess: far shorter than an exchange on a slow link; the shortest exchange of lab runs would
settle it."""
PROBES = 8
"""Probes in a row that must find an exchange, so that the partner most likely takes part in it.

A peer that accepts an offer is in an exchange at once, but its answer takes time on a slow link; if it dies before
that, no exchange of the partner is broken."""
TIMEOUT_S = 30.0
"""Time within which an exchange must come. Guess: many outer steps of a scenario; gaps between exchanges of lab runs
would settle it."""


async def wait_for_exchange(home: Path, timeout_s: float = TIMEOUT_S) -> bool:
    """Wait until PROBES probes in a row find an exchange of the peer; return False if that takes too long."""
    until, found = time.monotonic() + timeout_s, 0
    while time.monotonic() < until:
        found = found + 1 if await asyncio.to_thread(_exchanges, home) else 0
        if found == PROBES:
            return True
        await asyncio.sleep(PROBE_INTERVAL_S)
    return False


def _exchanges(home: Path) -> int:
    """Return the number of exchanges in progress; 0 if the peer does not answer."""
    try:
        count = ask(home, command="status")["status"]["exchanges_under_way"]
    except (HomeError, KeyError, TypeError):
        return 0
    return int(count)
