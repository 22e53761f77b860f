"""Runs a module whose time of day jumps: ``python -m lab.jumping_clock FILE MODULE …``.

The file holds the seconds by which the clock is ahead, and is read every second. Only Python's ``time.time`` jumps:
monotonic clocks, file times and p2pd's clock stay true. (libfaketime, which can read a file too, makes such a process
many times slower, and ``time.sleep`` fail.)
"""

from __future__ import annotations

import contextlib
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path

READ_EVERY_S = 1.0
"""Interval between two looks at the file."""


class JumpingClock:
    """Clock whose lead is in a file."""

    def __init__(self, file: Path, true: Callable[[], float] = time.time) -> None:
        self._file = file
        self._true = true
        self._read_at = float("-inf")
        self._off_s = 0.0

    def __call__(self) -> float:
        if time.monotonic() - self._read_at >= READ_EVERY_S:
            self._read_at = time.monotonic()
            with contextlib.suppress(OSError, ValueError):  # it is being written
                self._off_s = float(self._file.read_text(encoding="ascii"))
        return self._true() + self._off_s


if __name__ == "__main__":
    place, module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    time.time = JumpingClock(Path(place))  # before anything imports it
    runpy.run_module(module, run_name="__main__", alter_sys=True)
