"""Two clocks: a monotonic one that keeps running while the computer sleeps, and a wall clock that notices jumps.

``time.monotonic`` stops during suspend on Linux and macOS. A laptop that slept for hours would take last evening's
partners and presence records for live, and its own weights for fresh.

Durations are measured by ``steady``, dates are read from ``wall``. A system's clock jumps when a time server corrects
it, or when a battery, a dual boot or a hand sets it wrong. By a clock that is a day wrong, others would refuse our
records, all of theirs and our certificate would have expired, and a pause would end. ``wall`` therefore continues as
before a jump until others' clocks show which time is right.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

CLOCK_SKEW_S = 300.0
"""Accepted lead of another peer's clock. Guess: the clock offsets of real peers would settle it."""

JUMP_S = 10.0
"""Least jump of the system's clock that is not followed at once. Records survive an error of 30 s
(``net.relay.reachability``); time servers change a running clock by less than a second."""
UNJUDGED_S = 120.0
"""Seconds after which a jump is followed if nobody tells which time is right, as an owner without a network may set the
clock. A peer whose network returns asks within a minute."""


def _choose() -> Callable[[], float]:
    if hasattr(time, "CLOCK_BOOTTIME"):  # Linux
        return lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":  # here CLOCK_MONOTONIC counts sleep; time.monotonic reads another clock
        return lambda: time.clock_gettime(time.CLOCK_MONOTONIC)
    return time.monotonic


steady = _choose()
"""Seconds since an arbitrary moment; sleep counts, and nobody can set the clock."""


class WallClock:
    """Seconds since 1970, which continue as before when the system's clock jumps. Safe to call from any thread.

    Args:
        system: the system's clock; None: ``time.time``, also if that is replaced later, as by the laboratory.
        steady: clock that nobody can set.
    """

    def __init__(self, system: Callable[[], float] | None = None, steady: Callable[[], float] = steady) -> None:
        self._system = system or (lambda: time.time())
        self._steady = steady
        self._lock = threading.Lock()
        self._offset = self._system() - steady()
        """This clock's lead over the steady one."""
        self._jumped: tuple[float, float] | None = None
        """The system's lead over the steady clock after a jump that is not yet judged, and when it was noticed."""
        self._refused: float | None = None
        """The system's lead after a jump that others refuted."""

    def __call__(self) -> float:
        with self._lock:
            return self._followed()

    def _followed(self) -> float:
        now = self._steady()
        lead = self._system() - now
        if abs(lead - self._offset) <= JUMP_S:
            self._offset, self._jumped, self._refused = lead, None, None
        elif self._refused is None or abs(lead - self._refused) > JUMP_S:
            self._refused = None
            if self._jumped is None or abs(lead - self._jumped[0]) > JUMP_S:
                self._jumped = lead, now
            elif now - self._jumped[1] > UNJUDGED_S:
                self._offset, self._jumped = lead, None
        return now + self._offset

    @property
    def jump_s(self) -> float:
        """Seconds by which the system's clock has jumped ahead without being followed; 0 if it has not."""
        with self._lock:
            self._followed()
            lead_s = self._system() - self._steady() - self._offset
        return lead_s if abs(lead_s) > JUMP_S else 0.0

    @property
    def is_judged(self) -> bool:
        """Whether there is no jump, or others have told which time is right."""
        with self._lock:
            self._followed()
            return self._jumped is None

    def judge(self, ahead_s: float) -> bool:
        """Decide which time is right after a jump, this clock's or the system's; return whether the latter is.

        Args:
            ahead_s: seconds by which this clock is ahead of others' clocks. Others decide between the two times only,
                so that they cannot set this clock.
        """
        with self._lock:
            self._followed()
            lead = self._system() - self._steady()
            is_system = abs(ahead_s + lead - self._offset) < abs(ahead_s)
            if is_system:
                self._offset = lead
            self._jumped, self._refused = None, None if is_system else lead
        return is_system


wall = WallClock()
"""This process's wall clock: dates in records, receipts and certificates, hours and months."""
