"""Backoff: growing pauses between retries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from p2ptrain.base.bounded import BoundedDict

Key = TypeVar("Key")

PAUSE_S = (2.0, 30.0)
"""First and longest backoff in seconds between two rounds of requests for the manifest or a certificate. Guess: how
long bootstraps take to restart."""


def backoff(first_s: float, last_s: float) -> Iterator[float]:
    """Yield pauses in seconds that double from the first up to the last, and then repeat the last."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, last_s)


class Backoffs(Generic[Key]):
    """Pauses after failures, by key: of the ``most`` keys that failed last.

    Args:
        pauses_s: first and longest pause in seconds; they double.
    """

    def __init__(self, pauses_s: tuple[float, float], most: int) -> None:
        self._pauses_s = pauses_s
        self._failed: BoundedDict[Key, tuple[float, Iterator[float]]] = BoundedDict(most)

    def until(self, key: Key) -> float:
        """Return when the last pause ends, or has ended; minus infinity if the key has not failed."""
        return self._failed[key][0] if key in self._failed else float("-inf")

    def fail(self, key: Key, now: float, pauses_s: tuple[float, float] | None = None, least_s: float = 0.0) -> None:
        """Begin a pause of at least ``least_s``. ``pauses_s`` counts at the first failure."""
        _, pauses = self._failed.get(key) or (0.0, backoff(*(pauses_s or self._pauses_s)))
        self._failed[key] = now + max(next(pauses), least_s), pauses

    def forget(self, key: Key) -> None:
        """Forget a key that has succeeded."""
        self._failed.pop(key, None)

    def clear(self) -> None:
        self._failed.clear()
