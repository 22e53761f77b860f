"""How fast a peer trains just now."""

from __future__ import annotations

import time
from typing import NamedTuple

from p2ptrain.ports import Clock

WINDOW_S = 60.0
"""Over which speed is told. A guess: long enough for an outer step of most, short enough to see a machine throttle."""
BETWEEN_S = 1.0
"""Two inner steps that are remembered are so far apart, but for the newest."""


class _Mark(NamedTuple):
    at: float
    tokens: int
    inner_steps: int


class Throughput:
    """Tokens a second in the last minute, pauses of the owner left out. One thread trains, any may ask.

    An inner step that is under way counts against it only once it takes longer than those before it: so it is steady
    where one takes a minute, and falls where the trainer hangs.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._marks: tuple[_Mark, ...] = ()
        """Oldest first; replaced as a whole, as another thread may be reading."""
        self._is_warm = False

    def rest(self) -> None:
        """The owner lets the trainer rest, or training is over."""
        self._marks = ()

    def go_on(self, tokens: int) -> None:
        """After a rest; so many tokens have been read so far."""
        if self._is_warm:
            self._marks = (_Mark(self._clock(), tokens, 0),)

    def inner_step_done(self, tokens: int) -> None:
        """So many tokens have been read by now. The first step warms the device up, and is not timed."""
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
        """0.0 while resting, and until a step has been timed."""
        marks = self._marks
        if len(marks) < 2:
            return 0.0
        first, last = marks[0], marks[-1]
        trained_s = last.at - first.at
        usual_s = trained_s / (last.inner_steps - first.inner_steps)
        so_far_s = self._clock() - first.at - usual_s
        return (last.tokens - first.tokens) / max(trained_s, so_far_s, 1e-9)
