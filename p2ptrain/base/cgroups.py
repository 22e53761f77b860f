"""Limits of control groups: what a container, a slice or a service may use of its machine (cgroups(7)).

A limit holds for a group and everything below it, so the smallest of a process's group and its ancestors counts.
Version 2 has one hierarchy, version 1 one per controller; a container may see its own group as the root.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.base.errors import DeviceError

ROOT = Path("/")
NEEDED_PIDS = 40
"""Processes and threads of a peer or bootstrap with its p2pd. Guess: count those of peers with a page,
many partners and more cores; the demo's peer on two cores has 16."""
_THREADS = ("OMP_NUM_THREADS", "GOMAXPROCS")
"""Variables that set the number of threads of torch and numpy (OpenMP) and of p2pd (Go)."""


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """Limits of this process; infinite where there is none."""

    memory_bytes: float
    cpus: float
    """CPU seconds per second."""
    free_pids: float
    """Processes and threads that may still be started."""


def limits(root: Path = ROOT) -> CgroupLimits:
    """Read the limits from ``root/proc/self/cgroup`` and ``root/sys/fs/cgroup``; none on systems without these."""
    return CgroupLimits(
        memory_bytes=min(_memory(root), default=math.inf),
        cpus=min(_quotas(root), default=math.inf),
        free_pids=min(_free_pids(root), default=math.inf),
    )


def check_pids(root: Path = ROOT) -> None:
    """Raise DeviceError if too few processes and threads may be started for a peer or a bootstrap."""
    free = limits(root).free_pids
    if free < NEEDED_PIDS:
        raise DeviceError(
            f"This container or service may start {max(0, int(free))} more processes and threads; p2ptrain needs "
            f"{NEEDED_PIDS}.",
            f"Raise its limit, for instance with docker run --pids-limit {10 * NEEDED_PIDS}, or TasksMax= of systemd.",
        )


def usable_cpus(root: Path = ROOT) -> int:
    """Return the number of CPUs that this process can keep busy, at least 1.

    That is the affinity mask, rounded down to the quota: threads beyond it would stop all others until the quota's
    period ends.
    """
    present = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(present, limits(root).cpus)))


def limit_threads(environment: MutableMapping[str, str], root: Path = ROOT) -> None:
    """Where a quota allows fewer CPUs than the machine has, set the libraries' numbers of threads, unless they are set.

    Libraries count the machine's CPUs. They read the environment when they are loaded.
    """
    if usable_cpus(root) < (os.cpu_count() or 1):
        for name in _THREADS:
            environment.setdefault(name, str(usable_cpus(root)))


def _memory(root: Path) -> Iterator[float]:
    for group in _groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # missing, or "max"
                yield int((group / name).read_text())


def _quotas(root: Path) -> Iterator[float]:
    for group in _groups(root, "cpu"):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # missing, or "max"
            quota, period = map(int, (group / "cpu.max").read_text().split())
            yield quota / period
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota > 0:  # -1: none
                yield quota / period


def _free_pids(root: Path) -> Iterator[float]:
    for group in _groups(root, "pids"):
        with contextlib.suppress(OSError, ValueError):
            yield int((group / "pids.max").read_text()) - int((group / "pids.current").read_text())


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of our group and its ancestors, of version 2 and of the controller in version 1."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError):  # not on Linux
        return
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if not controllers:
            tops = [mount, mount / "unified"]
        elif controller in controllers.split(","):
            tops = [mount / controller, mount / controllers]
        else:
            continue
        for top in tops:
            group = top / path.lstrip("/")
            yield from (each for each in (group, *group.parents) if each.is_relative_to(top))
