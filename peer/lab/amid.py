"""When a peer is amid an exchange: it says so itself, to whoever owns it (``p2ptrain status``)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from p2ptrain.errors import HomeError
from peer.owner.door import ask

LOOKS_S = 0.05
"""Between two looks. A guess: far less than an exchange on a narrow line takes."""
PATIENCE_S = 30.0
"""An exchange must come by then. A guess: many outer steps of a scenario."""


async def amid_exchange(home: Path, patience_s: float = PATIENCE_S) -> bool:
    """Wait until the peer in that home is amid an exchange. False: it was amid none for so long."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        if await asyncio.to_thread(_exchanges, home):
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
