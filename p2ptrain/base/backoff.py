"""Backoff: growing pauses between retries."""

from __future__ import annotations

from collections.abc import Iterator


def backoff(first_s: float, last_s: float) -> Iterator[float]:
    """Yield pauses in seconds that double from the first up to the last, and then repeat the last."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, last_s)
