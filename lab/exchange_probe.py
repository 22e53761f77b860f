"""When a peer is amid an exchange: it says so itself, to whoever owns it (``p2ptrain status``)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from p2ptrain.base.errors import HomeError
from peer.owner.control_socket import ask

LOOKS_S = 0.05
"""Between two looks. A guess: far less than an exchange on a narrow line takes."""
LOOKS = 8
"""So many in a row find one: then its partner most likely knows of it. Whoever accepts an offer is amid an exchange
at once, and the answer takes its time on a narrow line; one that dies or sleeps meanwhile breaks off nothing for the
other."""
PATIENCE_S = 30.0
"""An exchange must come by then. A guess: many outer steps of a scenario."""


async def amid_exchange(home: Path, patience_s: float = PATIENCE_S) -> bool:
    """Wait until the peer in that home has been amid exchanges for some looks. False: it was not, for so long."""
    until, found = time.monotonic() + patience_s, 0
    while time.monotonic() < until:
        found = found + 1 if await asyncio.to_thread(_exchanges, home) else 0
        if found == LOOKS:
            return True
        await asyncio.sleep(LOOKS_S)
    return False


def _exchanges(home: Path) -> int:
    """How many are under way; none where it does not say."""
    try:
        count = ask(home, command="status")["status"]["exchanges_under_way"]
    except (HomeError, KeyError, TypeError):
        return 0
    return int(count)
