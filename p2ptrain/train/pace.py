"""Times of a task's inner steps: whether it trains now, and how long the run will take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from p2ptrain.ports import Clock

REST_S = 5.0
"""Seconds without an inner step after which a task rests. Guess: exchanges that block a trainer."""
SHORTEST_S = 30.0
"""Minimum seconds of training from which the rest is estimated."""


class Pace:
    """The trainer thread calls ``step``; other methods are safe from any thread.

    Args:
        run_tokens: progress at the run's end.
    """

    def __init__(self, run_tokens: int, clock: Clock = time.monotonic) -> None:
        self._run_tokens = run_tokens
        self._clock = clock
        self._is_in_step = False
        self._ended: float | None = None
        self._first: tuple[float, float] | None = None
        """Time and progress of the first step since the last rest."""
        self._last: tuple[float, float] | None = None

    @contextmanager
    def step(self, progress: float) -> Iterator[None]:
        """Note that the body is an inner step that begins at this progress."""
        now = self._clock()
        if self._first is None or self._ended is None or now - self._ended > REST_S:
            self._first = now, progress
        self._last, self._is_in_step = (now, progress), True
        try:
            yield
        finally:
            self._ended, self._is_in_step = self._clock(), False

    def is_training(self) -> bool:
        """Return whether an inner step is under way or ended a moment ago."""
        ended = self._ended
        return self._is_in_step or (ended is not None and self._clock() - ended <= REST_S)

    def remaining_s(self) -> float | None:
        """Return the seconds to the run's end at the current speed; None while that is unknown."""
        first, last = self._first, self._last
        if first is None or last is None or last[0] - first[0] < SHORTEST_S or last[1] <= first[1]:
            return None
        return (self._run_tokens - last[1]) * (last[0] - first[0]) / (last[1] - first[1])
