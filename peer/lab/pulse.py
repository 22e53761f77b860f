"""Memory and open files of peers and their network daemons, over time: does anything grow that should not?"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from peer.lab.breakage import daemons

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
FIGURES = ("memory_growth", "daemon_memory_growth", "descriptor_growth", "daemon_descriptor_growth")
"""Of each of the four how much it grew: of memory last over first, less one; of descriptors, of which there are few,
last less first."""


@dataclass(slots=True)
class Pulse:
    """Looks at everybody's processes now and then."""

    samples: dict[int, list[Sample]] = field(default_factory=dict)
    """By process id."""
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


def growth(samples: Sequence[Sample]) -> Mapping[str, float]:
    """Each of FIGURES; nothing where there are too few samples to tell. Pure."""
    settled = samples[round(SETTLING * len(samples)) :]
    if len(samples) < FEWEST:
        return {}
    width = max(1, round(WINDOW * len(settled)))
    found = {}
    for name, series in zip(FIGURES, zip(*settled, strict=True), strict=True):
        first, last = median(series[:width]), median(series[-width:])
        found[name] = last - first if "descriptor" in name else last / first - 1
    return found


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):  # just gone
        return 0


def _descriptors(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return 0
