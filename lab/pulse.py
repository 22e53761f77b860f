"""Memory and open files of peers and their network daemons, over time: does anything grow that should not?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from lab.breakage import daemons

PERIOD_S = 5.0
"""Between two looks. A guess."""
SETTLING = 1 / 3
"""Of the time: caches fill and connections are made meanwhile. The issue is what grows after that."""
WINDOW = 1 / 10
"""Of the rest: its first and its last part are compared."""
FEWEST = 60
"""Samples below which nothing is said: five minutes."""

_PAGE = os.sysconf("SC_PAGE_SIZE")

Sample = tuple[int, int, int, int]
"""Resident bytes of peer and daemon, open descriptors of peer and daemon."""
SEEN = ("memory", "daemon_memory", "descriptors", "daemon_descriptors")
"""The four: memory in bytes."""
FIGURES = ("memory_growth", "daemon_memory_growth", "descriptor_growth", "daemon_descriptor_growth")
"""Of each of the four how much it grew: of memory last over first, less one; of descriptors, of which there are few,
last less first."""


@dataclass(slots=True)
class Pulse:
    """Looks at everybody's processes now and then."""

    samples: dict[int, list[Sample]] = field(default_factory=dict)
    """By process id."""
    peaks: dict[int, int] = field(default_factory=dict)
    """By the same: the most bytes that it and its daemons ever had resident, as far as was seen."""
    _next: float = 0.0

    def beat(self, now: float, pids: Sequence[int]) -> None:
        """``now`` in seconds on any steady clock."""
        if now < self._next:
            return
        self._next = now + PERIOD_S
        for pid in pids:
            of_daemons = daemons(pid)
            if not of_daemons or not (own := _resident(pid)):
                continue  # it starts, ends, or has lost its daemon
            sample = (
                own,
                sum(map(_resident, of_daemons)),
                _descriptors(pid),
                sum(map(_descriptors, of_daemons)),
            )
            self.samples.setdefault(pid, []).append(sample)
            self.peaks[pid] = max(self.peaks.get(pid, 0), _peak(pid) + sum(map(_peak, of_daemons)))


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """Each of FIGURES; nothing where there are too few samples to tell. Pure."""
    if len(samples) < FEWEST:
        return {}
    found = {}
    for name, (first, last) in zip(FIGURES, ends(samples).values(), strict=True):
        found[name] = last - first if "descriptor" in name else last / first - 1
    return found


def ends(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """Each of SEEN at first, once it has settled, and at last. Pure."""
    settled = samples[round(SETTLING * len(samples)) :]
    width = max(1, round(WINDOW * len(settled)))
    series = zip(SEEN, zip(*settled, strict=True), strict=True)
    return {name: (median(those[:width]), median(those[-width:])) for name, those in series}


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):  # just gone
        return 0


def _peak(pid: int) -> int:
    """The most that it ever had resident."""
    try:
        words = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:"))
        return int(words.split()[1]) << 10
    except (OSError, StopIteration):  # just gone, or a zombie
        return 0


def _descriptors(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return 0
