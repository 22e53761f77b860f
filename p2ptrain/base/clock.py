"""A steady clock that goes on while the computer sleeps.

Python's ``time.monotonic`` stands still in suspend on Linux and macOS. By that clock a laptop that slept for hours
would take partners and records of the evening before for live, and its own weights for fresh.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


def _choose() -> Callable[[], float]:
    if hasattr(time, "CLOCK_BOOTTIME"):  # Linux
        return lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":  # there CLOCK_MONOTONIC counts sleep, and time.monotonic reads another one
        return lambda: time.clock_gettime(time.CLOCK_MONOTONIC)
    return time.monotonic


steady = _choose()
"""Seconds since some moment; nobody sets it, and sleep counts."""
