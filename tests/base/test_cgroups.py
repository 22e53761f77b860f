"""Limits of control groups, from directories that look like /proc and /sys/fs/cgroup."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from p2ptrain.base.cgroups import CgroupLimits, check_pids, limit_threads, limits, usable_cpus
from p2ptrain.base.errors import DeviceError

GIB = 1 << 30
NONE = CgroupLimits(math.inf, math.inf, math.inf)
V1_NONE = {
    "memory/memory.limit_in_bytes": "9223372036854771712",
    "cpu/cpu.cfs_quota_us": "-1",
    "cpu/cpu.cfs_period_us": "100000",
    "pids/pids.max": "max",
    "pids/pids.current": "7",
}


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    """Write a /proc/self/cgroup with these lines, and files below /sys/fs/cgroup."""
    for path, text in {
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("groups", "files", "found"),
    [
        pytest.param("0::/", {}, NONE, id="version 2, no limit files"),
        pytest.param(
            "0::/",
            {"memory.max": "max", "cpu.max": "max 100000", "pids.max": "max", "pids.current": "9"},
            NONE,
            id="version 2, max",
        ),
        pytest.param(
            "0::/",
            {"memory.max": str(GIB), "cpu.max": "150000 100000", "pids.max": "100", "pids.current": "40"},
            CgroupLimits(GIB, 1.5, 60),
            id="version 2, container that sees its group as the root",
        ),
        pytest.param(
            "0::/user.slice/session.scope",
            {
                "user.slice/memory.max": str(GIB),
                "user.slice/session.scope/memory.max": "max",
                "user.slice/cpu.max": "400000 100000",
                "user.slice/session.scope/cpu.max": "50000 100000",
                "user.slice/pids.max": "100",
                "user.slice/pids.current": "90",
                "user.slice/session.scope/pids.max": "50",
                "user.slice/session.scope/pids.current": "5",
                "other.slice/memory.max": "1000",
            },
            CgroupLimits(GIB, 0.5, 10),
            id="version 2, nested: the smallest of each",
        ),
        pytest.param(
            "4:memory:/\n3:cpu,cpuacct:/\n2:pids:/",
            V1_NONE,
            CgroupLimits(2**63 - 4096, math.inf, math.inf),
            id="version 1, none",
        ),
        pytest.param(
            "4:memory:/docker/0123\n3:cpu,cpuacct:/docker/0123\n2:pids:/docker/0123\n1:name=systemd:/x\n0::/",
            {
                "memory/memory.limit_in_bytes": str(GIB),
                "cpu,cpuacct/cpu.cfs_quota_us": "200000",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
                "pids/pids.max": "64",
                "pids/pids.current": "4",
            },
            CgroupLimits(GIB, 2, 60),
            id="version 1, container; the group has the host's name",
        ),
        pytest.param(
            "4:memory:/a/b\n0::/a",
            {"memory/a/memory.limit_in_bytes": str(GIB), "unified/a/cpu.max": "100000 100000"},
            CgroupLimits(GIB, 1, math.inf),
            id="both versions",
        ),
        pytest.param("nonsense", {"memory.max": "1"}, NONE, id="lines of another form"),
        pytest.param(
            "0::/", {"memory.max": "many", "cpu.max": "1 0", "pids.max": "3"}, NONE, id="nonsense in the files"
        ),
    ],
)
def test_the_smallest_limit_counts(tmp_path: Path, groups: str, files: dict[str, str], found: CgroupLimits) -> None:
    assert limits(machine(tmp_path, groups, files)) == found


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert limits(tmp_path) == NONE


def test_too_few_processes_are_told_before_any_is_started(tmp_path: Path) -> None:
    check_pids(machine(tmp_path, "0::/", {"pids.max": "50", "pids.current": "10"}))
    machine(tmp_path, "0::/", {"pids.current": "11"})
    with pytest.raises(DeviceError, match=r"may start 39 more .* needs 40\.\n  Raise its limit"):
        check_pids(tmp_path)


@pytest.mark.parametrize(("quota", "cpus"), [("50000", 1), ("100000", 1), ("290000", 2), ("max", 8), ("9900000", 8)])
def test_threads_are_at_most_what_the_quota_keeps_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cpus: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    root = machine(tmp_path, "0::/", {"cpu.max": f"{quota} 100000"})
    assert usable_cpus(root) == cpus
    environment = {"GOMAXPROCS": "5"}  # the owner's choice
    limit_threads(environment, root)
    assert environment == {"GOMAXPROCS": "5"} | ({"OMP_NUM_THREADS": str(cpus)} if cpus < 8 else {})
