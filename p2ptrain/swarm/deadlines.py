"""How long to wait for a partner: learnt from completed exchanges, never asked of a user.

A deadline is ``median + 8 MAD`` of what completed attempts took (median absolute deviation; outliers do not move it),
for payloads per byte. Before anything completed a sane start value counts. Of a payload's two deadlines the longer one
counts on both sides, within reason. A missed deadline doubles all that follow
until something completes again: otherwise a network that became slow would fail every exchange for ever.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence

REMEMBERED = 64  # guess: an hour of exchanges at one a minute
SPREADS = 8.0  # MADs above the median; exchange times have heavy tails. Guess
SHARING = 4.0  # a line may be shared by so many exchanges (rules.MAX_EXCHANGES) and was not when the few samples came
FIRST_REPLY_S = 10.0  # before anything is measured
REPLY_BOUNDS_S = (2.0, 30.0)  # a busy two-core machine was seen to answer after 1 s
PROMPT_BOUNDS_S = (0.2, 1.0)  # a round trip across the world, and a busy machine
FIRST_RATE = 125_000.0  # bytes/s before anything is measured: 1 Mbit/s, the slowest home upload we care about
PAYLOAD_BOUNDS_S = (5.0, 900.0)  # the upper one grows with the payload: twice its time at FIRST_RATE
TOLERANCE = 4.0  # a partner may ask for so many times our own patience. Guess: of lines at 100 and at 2 Mbit/s
UNNOTICED_S = 1.0  # nobody is held for so little. Guess: a busy machine
MAX_PATIENCE = 16.0  # largest multiple after missed deadlines


class Deadlines:
    """Measured reply times and transfer rates of one peer's exchanges with all partners."""

    def __init__(self) -> None:
        self._replies = _Samples()
        self._per_byte = _Samples()
        self._patience = 1.0

    def replied(self, seconds: float) -> None:
        """A partner answered an offer after this long."""
        self._replies.add(seconds)

    def transferred(self, size_bytes: int, seconds: float) -> None:
        """A payload exchange of this size completed."""
        self._per_byte.add(seconds / max(size_bytes, 1))
        self._patience = 1.0

    def missed(self) -> None:
        """A deadline passed."""
        self._patience = min(2 * self._patience, MAX_PATIENCE)

    def reply_s(self) -> float:
        """How long to wait for an answer to an offer."""
        estimate = self._replies.bound() if self._replies else FIRST_REPLY_S
        return _clamp(self._patience * estimate, *REPLY_BOUNDS_S)

    def prompt_reply_s(self) -> float:
        """An answer that takes longer than this is unusually late."""
        return _clamp(4 * self._replies.median(), *PROMPT_BOUNDS_S) if self._replies else PROMPT_BOUNDS_S[1]

    def seconds_per_byte(self) -> float:
        """How long we are prepared to wait for each byte of a payload: what partners are told."""
        per_byte = 1.0 / FIRST_RATE
        if self._per_byte:
            per_byte = max(self._per_byte.bound(), SHARING * self._per_byte.median())
        return self._patience * per_byte

    def payload_s(self, size_bytes: int, theirs: float = 0.0) -> float:
        """How long to wait for a payload of this size both ways, acknowledgements included.

        Args:
            theirs: what the partner said of its ``seconds_per_byte``. Who knows fast lines only would give up each time
                on one whose line is slow, for ever. It counts up to ``TOLERANCE`` times our own, or as a line of
                ``FIRST_RATE`` takes that is shared: else it would say how long it may hold us.
        """
        shortest, longest = PAYLOAD_BOUNDS_S
        ours = self.seconds_per_byte()
        per_byte = max(ours, min(theirs, max(TOLERANCE * ours, SHARING / FIRST_RATE)))
        return _clamp(per_byte * size_bytes, shortest, max(longest, 2 * size_bytes / FIRST_RATE))

    def too_long_s(self, size_bytes: int, seconds: float) -> float:
        """By how much a payload of this size took longer than a shared line takes; 0 where it did not."""
        per_byte = self._per_byte.median() if self._per_byte else 1.0 / FIRST_RATE
        return max(seconds - max(SHARING * per_byte * size_bytes, UNNOTICED_S), 0.0)

    def typical_payload_s(self, size_bytes: int) -> float | None:
        """The median time of a payload of this size, None before any was measured."""
        return self._per_byte.median() * size_bytes if self._per_byte else None


class _Samples:
    """The last samples, also in order; the bound is computed once for each new one."""

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
        return _median(self._ordered)

    def bound(self) -> float:
        """Median + ``SPREADS`` times the median distance from it."""
        if self._bound is None:
            middle = self.median()
            self._bound = middle + SPREADS * _median(sorted([abs(value - middle) for value in self._ordered]))
        return self._bound


def _median(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
