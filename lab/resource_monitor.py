"""Memory and open files of peers and their network daemons over time, to find growth."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from lab.breakage import daemons

PERIOD_S = 5.0
"""Sampling interval. Guess: any that gives FEWEST samples in the shortest soak; the time of one sample would settle it.
"""
SETTLING = 1 / 3
"""Share of the time that is ignored, in which caches fill and connections are made."""
WINDOW = 1 / 10
"""Share of the rest: its first and last parts are compared."""
FEWEST = 60
"""Samples needed for a statement: five minutes."""

_PAGE = os.sysconf("SC_PAGE_SIZE")

Sample = tuple[int, int, int, int]
"""Resident bytes of peer and daemon, open descriptors of peer and daemon."""
VALUES = ("memory", "daemon_memory", "descriptors", "daemon_descriptors")
"""Names of a sample's values; memory in bytes."""
FIGURES = ("memory_growth", "daemon_memory_growth", "descriptor_growth", "daemon_descriptor_growth")
"""Growth of each value: for memory last over first, minus one; for descriptors, which are few, last minus first."""


@dataclass(slots=True)
class ResourceMonitor:
    """Samples of all processes."""

    samples: dict[int, list[Sample]] = field(default_factory=dict)
    """Samples by process id."""
    peaks: dict[int, int] = field(default_factory=dict)
    """Largest resident bytes of a process and its daemons that were seen, by process id."""
    _next: float = 0.0

    def sample(self, now: float, pids: Sequence[int]) -> None:
        """Take a sample if one is due; ``now`` in seconds on any monotonic clock."""
        if now < self._next:
            return
        self._next = now + PERIOD_S
        for pid in pids:
            of_daemons = daemons(pid)
            if not of_daemons or not (own := _resident(pid)):
                continue  # the process starts, ends, or has lost its daemon
            sample = (
                own,
                sum(map(_resident, of_daemons)),
                _descriptors(pid),
                sum(map(_descriptors, of_daemons)),
            )
            self.samples.setdefault(pid, []).append(sample)
            self.peaks[pid] = max(self.peaks.get(pid, 0), _peak(pid) + sum(map(_peak, of_daemons)))


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """Return each of FIGURES; empty if there are fewer than FEWEST samples. Pure."""
    if len(samples) < FEWEST:
        return {}
    found = {}
    for name, (first, last) in zip(FIGURES, first_and_last(samples).values(), strict=True):
        found[name] = last - first if "descriptor" in name else last / first - 1
    return found


def first_and_last(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """Return each of VALUES after settling and at the end. Pure."""
    settled = samples[round(SETTLING * len(samples)) :]
    width = max(1, round(WINDOW * len(settled)))
    series = zip(VALUES, zip(*settled, strict=True), strict=True)
    return {name: (median(those[:width]), median(those[-width:])) for name, those in series}


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):  # the process has ended
        return 0


def _peak(pid: int) -> int:
    """Return the largest resident size of a process so far."""
    try:
        words = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:"))
        return int(words.split()[1]) << 10
    except (OSError, StopIteration):  # the process has ended or is a zombie
        return 0


def _descriptors(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return 0
