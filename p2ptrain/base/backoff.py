"""Backoff: growing pauses between retries."""

from __future__ import annotations

from collections.abc import Iterator

PAUSE_S = (2.0, 30.0)
"""First and longest backoff in seconds between two rounds of requests for the manifest or a certificate. Guess: how
long bootstraps take to restart."""


def backoff(first_s: float, last_s: float) -> Iterator[float]:
    """Yield pauses in seconds that double from the first up to the last, and then repeat the last."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, last_s)
