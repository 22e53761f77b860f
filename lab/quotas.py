"""Slow computers: control groups that limit the CPU time of a peer and its network daemon.

The kernel stops a group for the rest of each ``PERIOD_US`` once it has used its share. Timers, sockets and packets of
the kernel go on, as on a slow computer. Groups are of version 1 (``cpu.cfs_quota_us``) or 2 (``cpu.max``), in one group
of the testnet, below the group of this process where that can have children. Needs root. Empty groups may outlive a
killed testnet; the next one removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.base.errors import DeviceError
from peer.testnet.processes import Wrap

MOUNT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
"""The kernel's default. A shorter one is closer to a slow processor, but the kernel counts in slices of 5 ms."""
LEAST_CORES = 0.01
"""Least that the kernel accepts in this period: 1 ms."""
PREFIX = "p2pt-lab-"
END_S = 5.0
"""Time for a group to become empty after its last process ended. Guess: milliseconds; lab runs would settle it."""

_ENTER = 'echo 0 > "$1" && shift && exec "$@"'


@dataclass(slots=True)
class CpuQuotas:
    """Control groups by host, in one group of the testnet. ``close`` removes them, once their processes have ended."""

    group: Path
    is_unified: bool
    """Whether the groups are of version 2."""
    _lock: int
    """Descriptor that locks the group while this process lives."""

    @classmethod
    def here(cls) -> CpuQuotas:
        """Make the testnet's group, and remove those of killed testnets. Raises DeviceError."""
        try:
            parent, is_unified = _parent(Path("/proc/self/cgroup").read_text())
            group = parent / f"{PREFIX}{secrets.token_hex(4)}"
            parents_lock = _locked(parent)  # until ours is locked, another testnet would take it for one to remove
            try:
                for debris in parent.glob(f"{PREFIX}*"):
                    _sweep(debris)
                group.mkdir()
                made = cls(group, is_unified, _locked(group))
            finally:
                os.close(parents_lock)
            try:
                if is_unified:
                    (group / "cgroup.subtree_control").write_text("+cpu")
            except OSError:
                made.close()
                raise
        except OSError as error:
            raise _refused(error) from error
        return made

    def add(self, host: str) -> None:
        """Make the group of a host, without a limit."""
        (self.group / host).mkdir()

    def limit(self, host: str, cores: float | None) -> None:
        """Set the CPU seconds per second that a host's processes may use together; None for no limit.

        Raises DeviceError if the kernel refuses, as version 1 does above the limit of a container.
        """
        quota = None if cores is None else round(cores * PERIOD_US)
        try:
            if self.is_unified:
                (self.group / host / "cpu.max").write_text(f"{'max' if quota is None else quota} {PERIOD_US}")
            else:
                (self.group / host / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (self.group / host / "cpu.cfs_quota_us").write_text(str(-1 if quota is None else quota))
        except OSError as error:
            raise _refused(error, "" if cores is None else f" to {cores:g} cores") from error

    def inside(self, host: str, wrap: Wrap) -> Wrap:
        """Return a wrapper that also puts the command, with the same process id, and its children in the group."""
        entry = self.group / host / "cgroup.procs"
        return lambda *command: ["/bin/sh", "-c", _ENTER, "sh", str(entry), *wrap(*command)]

    def close(self) -> None:
        """Remove all groups; those whose processes live on remain. May be called twice."""
        until = time.monotonic() + END_S
        while not _removed(self.group) and time.monotonic() < until:
            time.sleep(0.05)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def check_quota_support(limits: Iterable[float]) -> None:
    """Make and remove a group with each limit, in cores. Raises DeviceError if this machine does not allow one."""
    groups = CpuQuotas.here()
    try:
        groups.add("probe")
        for cores in limits:
            groups.limit("probe", cores)
    finally:
        groups.close()


def _refused(error: OSError, what: str = "") -> DeviceError:
    return DeviceError(
        f"This machine cannot limit CPU time{what}: {error}.",
        "Leave out peers.cores, or run as root where control groups can be written. If this is a container, start it "
        "with --privileged --cgroupns=host.",
    )


def _locked(group: Path, wait: bool = True) -> int:
    """Lock a group and return the descriptor that holds the lock. Raises OSError."""
    descriptor = os.open(group, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _sweep(debris: Path) -> None:
    """Remove the group of a testnet that was killed."""
    with contextlib.suppress(OSError):  # a testnet holds the lock, or removes it
        lock = _locked(debris, wait=False)
        _removed(debris)
        os.close(lock)


def _removed(group: Path) -> bool:
    """Remove a group and those in it; return whether it is gone."""
    try:
        for each in group.iterdir():
            if each.is_dir():
                each.rmdir()
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _parent(own: str, mount: Path = MOUNT) -> tuple[Path, bool]:
    """Return where groups with a CPU limit can be made, and whether they are of version 2. Raises OSError.

    Args:
        own: content of /proc/self/cgroup.
    """
    lines = [line.split(":", 2) for line in own.splitlines() if line.count(":") >= 2]
    for _, controllers, path in lines:
        for top in (mount / "cpu", mount / controllers):
            if "cpu" in controllers.split(",") and top.is_dir():
                return _nearest(top, path), False
    for _, controllers, path in lines:
        if controllers == "" and "cpu" in _words(mount / "cgroup.controllers"):
            own_group = _nearest(mount, path)
            for group in (own_group, *own_group.parents):  # one with processes passes no controller on, but the root
                if group.is_relative_to(mount) and "cpu" in _words(group / "cgroup.subtree_control"):
                    return group, True
            (mount / "cgroup.subtree_control").write_text("+cpu")
            return mount, True
    raise FileNotFoundError("there is no cpu controller of control groups")


def _nearest(top: Path, path: str) -> Path:
    """Return our group, or the top where a container hides it."""
    group = top / path.lstrip("/")
    return group if group.is_dir() else top


def _words(file: Path) -> Sequence[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
