"""Deadlines for partners, learnt from completed exchanges, and the duration of this peer's own outer steps.

A deadline is ``median + 8 MAD`` of the durations of completed attempts, per byte for payloads (median absolute
deviation; outliers do not move it). Before anything completed a start value counts. Of both sides' payload deadlines
the longer one counts, within bounds. A missed deadline doubles all later ones until an exchange completes; otherwise a
network that became slow would fail every exchange forever. A user sets none of these.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from dataclasses import dataclass
from statistics import median

REMEMBERED = 64  # one hour at one exchange a minute. Guess: compare windows on recorded durations
SPREADS = 8.0  # MADs above the median. Guess: count false timeouts under heavy-tailed exchange durations
SHARING = 4.0  # exchanges that may share a connection (rules.MAX_EXCHANGES) and did not when the few samples were taken
FIRST_REPLY_S = 10.0  # before anything is measured
REPLY_BOUNDS_S = (2.0, 30.0)  # a busy two-core machine answered after 1 s
PROMPT_BOUNDS_S = (0.2, 1.0)  # an intercontinental round trip, and a busy machine
FIRST_RATE = 125_000.0  # bytes/s before anything is measured: 1 Mbit/s, the slowest supported home upload
PAYLOAD_BOUNDS_S = (5.0, 900.0)  # the upper one grows with the payload: twice its duration at FIRST_RATE
TOLERANCE = 4.0  # times our own patience that a partner may ask for. Guess: measure patience at 100 and at 2 Mbit/s
UNNOTICED_S = 1.0  # shorter holds do not count. Guess: measure delays on a busy machine
MAX_PATIENCE = 16.0  # largest multiple after missed deadlines


class Deadlines:
    """Measured reply times and transfer rates of one peer's exchanges with all partners."""

    def __init__(self) -> None:
        self._replies = _Samples()
        self._per_byte = _Samples()
        self._patience = 1.0

    def replied(self, seconds: float) -> None:
        self._replies.add(seconds)

    def transferred(self, size_bytes: int, seconds: float) -> None:
        self._per_byte.add(seconds / max(size_bytes, 1))
        self._patience = 1.0

    def missed(self) -> None:
        self._patience = min(2 * self._patience, MAX_PATIENCE)

    def reply_s(self) -> float:
        estimate = self._replies.bound() if self._replies else FIRST_REPLY_S
        return _clamp(self._patience * estimate, *REPLY_BOUNDS_S)

    def prompt_reply_s(self) -> float:
        """Return the time after which an answer counts as unusually late."""
        return _clamp(4 * self._replies.median(), *PROMPT_BOUNDS_S) if self._replies else PROMPT_BOUNDS_S[1]

    def seconds_per_byte(self) -> float:
        """Return the patience per payload byte that partners are told."""
        per_byte = 1.0 / FIRST_RATE
        if self._per_byte:
            per_byte = max(self._per_byte.bound(), SHARING * self._per_byte.median())
        return self._patience * per_byte

    def payload_s(self, size_bytes: int, theirs: float = 0.0) -> float:
        """Return how long to wait for a payload of this size both ways, acknowledgements included.

        ``theirs``, the partner's ``seconds_per_byte``, counts up to the larger of ``TOLERANCE`` times our own and what
        a shared connection of ``FIRST_RATE`` takes. So we wait for slow partners, and they cannot choose how long they
        hold us.
        """
        shortest, longest = PAYLOAD_BOUNDS_S
        ours = self.seconds_per_byte()
        per_byte = max(ours, min(theirs, max(TOLERANCE * ours, SHARING / FIRST_RATE)))
        return _clamp(per_byte * size_bytes, shortest, max(longest, 2 * size_bytes / FIRST_RATE))

    def too_long_s(self, size_bytes: int, seconds: float) -> float:
        """Return how much longer than over a shared connection this payload took; 0 if it did not."""
        per_byte = self._per_byte.median() if self._per_byte else 1.0 / FIRST_RATE
        return max(seconds - max(SHARING * per_byte * size_bytes, UNNOTICED_S), 0.0)

    def typical_payload_s(self, size_bytes: int) -> float | None:
        """Return the median duration of a payload of this size, or None before any was measured."""
        return self._per_byte.median() * size_bytes if self._per_byte else None


@dataclass(slots=True)
class Stopwatch:
    """Time from one outer step to the next. Before training begins it measures nothing."""

    _since: float | None = None
    _trained_s: float | None = None
    """Training time in this outer step, if the trainer then waits for partners."""

    def begin(self, now: float) -> None:
        self._since = now

    def skip(self, seconds: float) -> None:
        if self._since is not None:
            self._since += seconds

    def wait(self, now: float) -> None:
        """Mark the end of training in this outer step: from now on the trainer waits."""
        if self._since is not None:
            self._trained_s = max(now - self._since, 0.0)

    def trained_s(self, now: float) -> float:
        """Return the seconds of training in this outer step, so far."""
        if self._trained_s is not None:
            return self._trained_s
        return 0.0 if self._since is None else max(now - self._since, 0.0)

    def lap(self, now: float) -> tuple[float, float] | None:
        """Return the seconds of the outer step that ended and its seconds of training; None if there are none."""
        since, trained_s = self._since, self._trained_s
        self._since, self._trained_s = now, None
        if since is None or now <= since:
            return None
        return now - since, now - since if trained_s is None else trained_s


class _Samples:
    """Most recent samples, also sorted. The bound is computed once per new sample."""

    __slots__ = ("_bound", "_ordered", "_values")

    def __init__(self) -> None:
        self._values = array("d")
        self._ordered = array("d")
        self._bound: float | None = None

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        if len(self._values) == REMEMBERED:
            del self._ordered[bisect_left(self._ordered, self._values.pop(0))]
        self._values.append(value)
        insort(self._ordered, value)
        self._bound = None

    def median(self) -> float:
        return median(self._ordered)

    def bound(self) -> float:
        if self._bound is None:
            middle = self.median()
            self._bound = middle + SPREADS * median(abs(value - middle) for value in self._ordered)
        return self._bound


def _clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
