"""What stands for a whole swarm: sums and medians of what its peers tell, decided by no few of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from p2ptrain.page import PeerRow
from p2ptrain.swarm import PeerState

SUMMED = {
    "tokens": (1.0, 1e6),
    "tokens_per_s": (1.0, 1e4),
    "exchanges": (0.5, 1e3),
    "failed": (0.5, 1e3),
    "sent_bytes": (1.0, 1e9),
    "received_bytes": (1.0, 1e9),
    "up": (1.0, 1.25e6),
    "down": (1.0, 1.25e6),
}
"""Figures of the swarm that are sums: the share of what peers tell that counts (both sides count an exchange), and what
counts of anybody, whatever the others have. A guess: what a peer comes to within minutes."""
MEDIANS = ("loss", "held_out", "disagreement", "blocked_share")
MOST_TIMES = 20.0
"""In a sum nobody counts for more than so many times the upper quartile, or one stranger's word would be all that is
seen. A guess: a data centre's card beside gamers' is within it."""


def summed(rows: Sequence[PeerRow], tokens_per_peer: int) -> tuple[dict[str, float], float]:
    """Figures of those who are here and tell, by name, and how far they are, in tokens per peer.

    Args:
        tokens_per_peer: the run's end; 0: not known.
    """
    figures: dict[str, float] = {}
    for name, (share, least) in SUMMED.items():
        if known := [getattr(row, name) for row in rows if getattr(row, name) is not None]:
            figures[name] = share * _bounded_sum(known, least)
    for name in MEDIANS:
        if known := [getattr(row, name) for row in rows if getattr(row, name) is not None]:
            figures[name] = median(known)
    # Who is still joining has come nowhere, and says nothing of the run.
    progress = median([row.progress for row in rows if row.state != PeerState.JOINING.value] or [0.0])
    if rows and tokens_per_peer:
        figures["fraction"] = min(progress / tokens_per_peer, 1.0)
    return figures, progress


def _bounded_sum(told: Sequence[float], least: float) -> float:
    """See ``MOST_TIMES``; ``least`` counts always. Of two the lower one is the quartile."""
    most = max(MOST_TIMES * sorted(told)[3 * (len(told) - 1) // 4], least)
    return sum(min(each, most) for each in told)
