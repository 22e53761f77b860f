"""Computers whose clocks are wrong: libfaketime tells their programs another time of day.

Steady clocks, on which deadlines count, and the times of files stay true. p2pd is linked statically and sees the true
time; it needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from p2ptrain.base.errors import DeviceError
from peer.testnet.processes import Wrap


def beside(seconds: float, inside: Wrap) -> Wrap:
    """Commands run where ``inside`` says, with a clock that is so many seconds fast."""
    if not seconds:
        return inside
    wrong = {
        "LD_PRELOAD": str(library()),
        "FAKETIME": f"{seconds:+.0f}s",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
    }

    def told(*command: str) -> Sequence[str]:
        return inside("/usr/bin/env", *(f"{name}={value}" for name, value in wrong.items()), *command)

    return told


def library() -> Path:
    """libfaketime's. DeviceError where it is not installed."""
    for place in ("/usr/lib", "/usr/local/lib"):
        for found in sorted(Path(place).glob("**/faketime/libfaketime.so.1")):
            return found
    raise DeviceError(
        "A clock that is wrong needs libfaketime, which is not installed.", "Type: apt-get install libfaketime."
    )
