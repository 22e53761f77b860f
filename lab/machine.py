"""The machine of a measurement."""

from __future__ import annotations

import platform
from pathlib import Path

from p2ptrain.base.cgroups import usable_cpus


def machine() -> str:
    """Return the processor, number of cores and system of this machine."""
    return f"{_processor()}, {usable_cpus()} cores, {platform.system()} {platform.machine()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or "unknown processor"
