"""Swarm-wide figures: sums and medians of what peers report, which a few peers cannot dominate. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from p2ptrain.page.view import PeerRow
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
"""Figures that are summed: the factor of the sum (both sides count an exchange), and the value of one peer that always
counts in full. Guess: measure what a peer reaches within minutes."""
MEDIANS = ("loss", "held_out", "disagreement", "blocked_share")
MAX_TIMES = 20.0
"""Most that one peer counts in a sum, in multiples of the upper quartile, so that one report cannot dominate. Guess:
measure the ratio of throughputs; data centre and gaming GPUs should be within it."""


def summed(rows: Sequence[PeerRow], run_tokens: int, total_peers: int) -> tuple[dict[str, float], float]:
    """Return the swarm's figures by name and its median progress.

    Args:
        run_tokens: tokens of all peers at the run's end.
        total_peers: number of peers of which ``rows`` are a sample. Those that do not report are assumed to be as fast
            as the others.
    """
    figures: dict[str, float] = {}
    for name, (share, least) in SUMMED.items():
        if known := [getattr(row, name) for row in rows if getattr(row, name) is not None]:
            figures[name] = share * _bounded_sum(known, least)
    for name in MEDIANS:
        if known := [getattr(row, name) for row in rows if getattr(row, name) is not None]:
            figures[name] = median(known)
    # A joining peer has no progress yet.
    progress = median([row.progress for row in rows if row.state != PeerState.JOINING.value] or [0.0])
    if rows:
        figures["fraction"] = min(progress / run_tokens, 1.0)
    if speed := figures.get("tokens_per_s"):
        reporting = sum(row.tokens_per_s is not None for row in rows)
        figures["swarm_tokens_per_s"] = speed * total_peers / reporting
        figures["remaining_s"] = max(run_tokens - progress, 0.0) / figures["swarm_tokens_per_s"]
    return figures, progress


def _bounded_sum(values: Sequence[float], least: float) -> float:
    """Return the sum with each value bounded by ``MAX_TIMES`` the upper quartile, or by ``least`` if that is more."""
    most = max(MAX_TIMES * sorted(values)[3 * (len(values) - 1) // 4], least)
    return sum(min(each, most) for each in values)
