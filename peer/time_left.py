"""The swarm's throughput, the time to the run's end, and by how much this computer shortens it.

Progress estimates the tokens of all peers, so it grows at the swarm's throughput: own training raises it as if all
peers were as fast as this one, and exchanges correct that, raising slow peers and lowering fast ones.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from p2ptrain.ports import Clock

WINDOW_S = 300.0
"""Seconds over which the effect of exchanges is averaged. With two exchanges per outer step of a minute the standard
deviation of the swarm's throughput is then at most .11 of it, over 60 s .45 (our simulation, eight peers)."""
SHORTEST_S = 60.0
"""Minimum seconds over which it is averaged, so that the first exchange does not decide."""
BETWEEN_S = 5.0
"""Minimum seconds between two remembered values."""


class ExchangeDrift:
    """Tokens per second by which exchanges move the progress. One thread writes, any thread may read."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._marks: tuple[tuple[float, float], ...] = ()
        """Times and sums of displacements, oldest first; replaced as a whole because other threads read them."""

    def rest(self) -> None:
        """Stop the measurement: the trainer is held, or training is over."""
        self._marks = ()

    def record(self, displacement: float) -> None:
        """Record the sum of all displacements so far, in tokens."""
        now, marks = self._clock(), list(self._marks)
        if len(marks) > 1 and marks[-1][0] - marks[-2][0] < BETWEEN_S:
            marks.pop()
        marks.append((now, displacement))
        while len(marks) > 2 and marks[1][0] <= now - WINDOW_S:
            del marks[0]
        self._marks = tuple(marks)

    @property
    def tokens_per_s(self) -> float:
        """Mean of about the last ``WINDOW_S``; negative in a peer faster than the others."""
        marks = self._marks
        if not marks:
            return 0.0
        return (marks[-1][1] - marks[0][1]) / max(marks[-1][0] - marks[0][0], SHORTEST_S)


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
