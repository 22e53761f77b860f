"""How fast this computer and all peers together train, and by how much this computer shortens the run.

Progress estimates the tokens of all peers, so it grows at the swarm's throughput: own training raises it as if all
peers were as fast as this one, and exchanges correct that, raising slow peers and lowering fast ones.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

from p2ptrain.ports import Clock

THROUGHPUT_WINDOW_S = 60.0
"""Seconds over which throughput is averaged: an outer step of most machines, and short enough to show throttling.
Guess: the duration of outer steps on volunteers' machines."""
DRIFT_WINDOW_S = 300.0
"""Seconds over which the effect of exchanges is averaged. With two exchanges per outer step of a minute the standard
deviation of the swarm's throughput is then at most .11 of it, over 60 s .45 (our simulation, eight peers)."""
SHORTEST_DRIFT_S = 60.0
"""Minimum seconds over which it is averaged, so that the first exchange does not decide."""
REMEMBERED = 60
"""Values of a window that are remembered, beside the newest."""


class _Mark(NamedTuple):
    at: float
    value: float
    number: int
    """Values recorded before this one."""


class _SlidingWindow:
    """The first and the last value within so many seconds. One thread writes, any thread may read."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._seconds = seconds
        self.clock = clock
        self.marks: tuple[_Mark, ...] = ()
        """Oldest first; replaced as a whole because other threads read them."""

    def clear(self) -> None:
        self.marks = ()

    def record(self, value: float) -> None:
        now, marks = self.clock(), list(self.marks)
        number = marks[-1].number + 1 if marks else 0
        if len(marks) > 1 and marks[-1].at - marks[-2].at < self._seconds / REMEMBERED:
            marks.pop()
        marks.append(_Mark(now, value, number))
        while len(marks) > 2 and marks[1].at <= now - self._seconds:
            del marks[0]
        self.marks = tuple(marks)


class Throughput:
    """Tokens per second over the last ``THROUGHPUT_WINDOW_S``, without pauses. One thread writes, any may read.

    An unfinished inner step lowers the figure only once it takes longer than the average one, so the figure is steady
    if a step takes a minute and falls if the trainer hangs.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._window = _SlidingWindow(THROUGHPUT_WINDOW_S, clock)
        self._is_warm = False

    def rest(self) -> None:
        """Stop the measurement: the trainer is held, or training is over."""
        self._window.clear()

    def go_on(self, tokens: int) -> None:
        """Resume the measurement at ``tokens`` read so far."""
        if self._is_warm:
            self._window.clear()
            self._window.record(tokens)

    def inner_step_done(self, tokens: int) -> None:
        """Record an inner step and the tokens read so far. The first step warms up the device and is not timed."""
        self._is_warm = True
        self._window.record(tokens)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second; 0.0 while held and until a step has been timed."""
        marks = self._window.marks
        if len(marks) < 2:
            return 0.0
        first, last = marks[0], marks[-1]
        trained_s = last.at - first.at
        usual_s = trained_s / (last.number - first.number)
        so_far_s = self._window.clock() - first.at - usual_s
        return (last.value - first.value) / max(trained_s, so_far_s, 1e-9)


class ExchangeDrift:
    """Tokens per second by which exchanges move the progress. One thread writes, any thread may read."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._window = _SlidingWindow(DRIFT_WINDOW_S, clock)

    def rest(self) -> None:
        """Stop the measurement: the trainer is held, or training is over."""
        self._window.clear()

    def record(self, displacement: float) -> None:
        """Record the sum of all displacements so far, in tokens."""
        self._window.record(displacement)

    @property
    def tokens_per_s(self) -> float:
        """Mean of about the last ``DRIFT_WINDOW_S``; negative in a peer faster than the others."""
        marks = self._window.marks
        if not marks:
            return 0.0
        return (marks[-1].value - marks[0].value) / max(marks[-1].at - marks[0].at, SHORTEST_DRIFT_S)


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """Throughput of all peers and what follows from it."""

    swarm_tokens_per_s: float
    remaining_s: float
    """Seconds to the run's end."""
    shortened_s: float | None
    """Seconds that the run would take longer without this computer; None if no other peer trains."""


def time_left(tokens: float, own: float, peers: float, drift: float) -> TimeLeft | None:
    """Return the time in which all peers train ``tokens``; None while this computer's speed is unknown.

    Args:
        own: tokens per second of this computer.
        peers: number of peers that train, this one included.
        drift: tokens per second by which exchanges move the progress.
    """
    if own <= 0:
        return None
    others = max(own * (peers - 1) + drift, 0.0) if peers > 1 else 0.0
    remaining_s = tokens / (own + others)
    return TimeLeft(own + others, remaining_s, tokens / others - remaining_s if others else None)
