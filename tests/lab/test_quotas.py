"""Limits on CPU time: where groups are made, and that a limited process gets what it may have."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab import quotas
from lab.quotas import CpuQuotas, check_quota_support
from p2ptrain.base.errors import DeviceError

BURN = """
import resource, time
until = time.monotonic() + 2.0
while time.monotonic() < until:
    pass
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime)
"""


def machine(place: Path, *files: str, **contents: str) -> Path:
    for name in files:
        (place / name).mkdir(parents=True)
    for name, text in contents.items():
        (place / name.replace("__", "/").replace("_DOT_", ".")).write_text(text)
    return place


def test_groups_of_version_1_are_made_in_our_own(tmp_path: Path) -> None:
    mount = machine(tmp_path, "cpu/ours", "unified")
    assert quotas._parent("3:cpu:/ours\n0::/\n", mount) == (mount / "cpu" / "ours", False)


def test_a_container_may_see_its_group_as_the_top(tmp_path: Path) -> None:
    mount = machine(tmp_path, "cpu,cpuacct")
    assert quotas._parent("3:cpu,cpuacct:/docker/abc\n", mount) == (mount / "cpu,cpuacct", False)


def test_groups_of_version_2_are_made_where_the_controller_is_passed_on(tmp_path: Path) -> None:
    mount = machine(
        tmp_path, "user/ours", **{"cgroup_DOT_controllers": "cpu memory", "user__cgroup_DOT_subtree_control": "cpu"}
    )
    assert quotas._parent("0::/user/ours\n", mount) == (mount / "user", True)


def test_the_root_of_version_2_passes_the_controller_on(tmp_path: Path) -> None:
    mount = machine(tmp_path, "ours", **{"cgroup_DOT_controllers": "cpu"})
    assert quotas._parent("0::/ours\n", mount) == (mount, True)
    assert (mount / "cgroup.subtree_control").read_text() == "+cpu"


def test_a_machine_without_the_controller_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no cpu controller"):
        quotas._parent("0::/\n", tmp_path)


def test_nothing_is_left_where_a_container_may_not_pass_the_controller_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, text: str) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(quotas, "_parent", lambda own: (tmp_path, True))
    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(DeviceError, match=r"cannot limit CPU time: .*busy") as caught:
        CpuQuotas.here()
    assert "--cgroupns=host" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_unified", [False, True])
def test_a_limit_that_the_kernel_refuses_is_told(tmp_path: Path, is_unified: bool) -> None:
    groups = CpuQuotas(tmp_path, is_unified, -1)
    with pytest.raises(DeviceError, match="CPU time to 4 cores: "):
        groups.limit("nobody", 4.0)


@pytest.fixture
def groups() -> CpuQuotas:
    try:
        return CpuQuotas.here()
    except DeviceError as error:
        pytest.skip(error.problem)


def burnt_s(groups: CpuQuotas, host: str) -> float:
    command = groups.inside(host, lambda *command: command)(sys.executable, "-I", "-S", "-c", BURN)
    return float(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


@pytest.mark.skipif(os.geteuid() != 0, reason="control groups are root's")
def test_a_limited_host_gets_its_share_and_nothing_is_left(groups: CpuQuotas) -> None:
    try:
        groups.add("slow")
        groups.limit("slow", 0.05)
        assert burnt_s(groups, "slow") < 0.4  # .1, and its start
        debris = groups.group.with_name(f"{quotas.PREFIX}debris")
        (debris / "host").mkdir(parents=True)
        CpuQuotas.here().close()
        assert not debris.exists()
        assert groups.group.exists()  # locked
        check_quota_support([quotas.LEAST_CORES, 2.0])
    finally:
        groups.close()
    assert not groups.group.exists()
    groups.close()
