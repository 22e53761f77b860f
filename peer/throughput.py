"""A peer's current training speed."""

from __future__ import annotations

import time
from typing import NamedTuple

from p2ptrain.ports import Clock

WINDOW_S = 60.0
"""Seconds over which throughput is averaged: an outer step of most machines, and short enough to show throttling.
Guess: the duration of outer steps on volunteers' machines."""
BETWEEN_S = 1.0
"""Minimum seconds between two remembered inner steps, except the newest."""


class _Mark(NamedTuple):
    at: float
    tokens: int
    inner_steps: int


class Throughput:
    """Tokens per second over the last ``WINDOW_S``, without pauses. One thread writes, any thread may read.

    An unfinished inner step lowers the figure only once it takes longer than the average one, so the figure is steady
    if a step takes a minute and falls if the trainer hangs.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._marks: tuple[_Mark, ...] = ()
        """Marks, oldest first; replaced as a whole because other threads read them."""
        self._is_warm = False

    def rest(self) -> None:
        """Stop the measurement: the trainer is held, or training is over."""
        self._marks = ()

    def go_on(self, tokens: int) -> None:
        """Resume the measurement at ``tokens`` read so far."""
        if self._is_warm:
            self._marks = (_Mark(self._clock(), tokens, 0),)

    def inner_step_done(self, tokens: int) -> None:
        """Record an inner step and the tokens read so far. The first step warms up the device and is not timed."""
        self._is_warm = True
        if not self._marks:
            self.go_on(tokens)
            return
        now, marks = self._clock(), list(self._marks)
        count = marks[-1].inner_steps + 1
        if len(marks) > 1 and marks[-1].at - marks[-2].at < BETWEEN_S:
            marks.pop()
        marks.append(_Mark(now, tokens, count))
        while len(marks) > 2 and marks[1].at <= now - WINDOW_S:
            del marks[0]
        self._marks = tuple(marks)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second; 0.0 while held and until a step has been timed."""
        marks = self._marks
        if len(marks) < 2:
            return 0.0
        first, last = marks[0], marks[-1]
        trained_s = last.at - first.at
        usual_s = trained_s / (last.inner_steps - first.inner_steps)
        so_far_s = self._clock() - first.at - usual_s
        return (last.tokens - first.tokens) / max(trained_s, so_far_s, 1e-9)
