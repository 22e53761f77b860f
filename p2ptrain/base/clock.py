"""Monotonic clock that keeps running while the computer sleeps.

``time.monotonic`` stops during suspend on Linux and macOS. A laptop that slept for hours would take last evening's
partners and presence records for live, and its own weights for fresh.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

CLOCK_SKEW_S = 300.0
"""Accepted lead of another peer's clock. Guess: the clock offsets of real peers would settle it."""


def _choose() -> Callable[[], float]:
    if hasattr(time, "CLOCK_BOOTTIME"):  # Linux
        return lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":  # here CLOCK_MONOTONIC counts sleep; time.monotonic reads another clock
        return lambda: time.clock_gettime(time.CLOCK_MONOTONIC)
    return time.monotonic


steady = _choose()
"""Seconds since an arbitrary moment; sleep counts, and nobody can set the clock."""
