"""Failures of a computer while its peer runs: its disk, file descriptors, network daemon and clock.

A disk that can fill up is a small in-memory file system mounted at the peer's home; a read-only disk is the home
bind-mounted onto itself. Both need a mount namespace of their own, which a cell has (``lab.cell``). At the end the
in-memory files are copied to the folder. The peer's printed output goes to a file outside that disk.

A wrong clock is libfaketime's: it changes the time of day of Python processes. Monotonic clocks, which deadlines use,
and file times stay true. p2pd is statically linked, sees the true time, and needs none.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from lab.namespaces import COMMAND_DEADLINE_S
from lab.script import NETWORK_ACTS, TROUBLE_ACTS, Act, ActKind
from lab.suspension import process_tree
from p2ptrain.base.errors import DeviceError
from peer.testnet.processes import Wrap

DISK_BYTES = 64 << 20
"""Size of a disk that can fill up: about twenty checkpoints of a lab model. Guess: the largest home of a lab run would
settle it."""
DAEMON = "p2pd"
ORPHANS_S = 5.0
"""Longest time for a trainer's processes to end after their node was killed."""
RANK_MODULE = b"peer.training.language_trainer"
"""Argument of the processes of a trainer, one a device."""
BREAKAGE_ACTS = frozenset(kind for pair in TROUBLE_ACTS.values() for kind in pair if kind is not None) - NETWORK_ACTS
"""Acts that ``Breakages.perform`` performs."""

_FILLER = ".filler"


@dataclass(slots=True)
class Disk:
    """Disk that holds a peer's home. ``close`` leaves an ordinary folder with everything that was written."""

    home: Path
    _locked: bool = False

    @classmethod
    def small(cls, home: Path) -> Disk:
        """Mount a disk of DISK_BYTES that holds the current content of the home."""
        aside = home.with_name(f"{home.name}.before")
        shutil.copytree(home, aside, ignore=_sockets)
        _mount("-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "tmpfs", str(home))
        shutil.copytree(aside, home, dirs_exist_ok=True)
        shutil.rmtree(aside)
        return cls(home)

    def fill(self) -> None:
        """Fill the disk, even if other processes write meanwhile."""
        block = bytes(1 << 16)
        with (self.home / _FILLER).open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(block)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def drain(self) -> None:
        (self.home / _FILLER).unlink(missing_ok=True)

    def lock(self) -> None:
        """Make the home read-only. Files that are already open stay writable."""
        _mount("--bind", str(self.home), str(self.home))
        self._locked = True
        _mount("-o", "remount,bind,ro", str(self.home))

    def unlock(self) -> None:
        """Make the home writable again. May be called twice."""
        if self._locked:
            self._locked = False
            _unmount(self.home)

    def close(self) -> None:
        """Copy the files to an ordinary folder. No process may have a file of the home open."""
        self.unlock()
        self.drain()
        kept = self.home.with_name(f"{self.home.name}.kept")
        shutil.copytree(self.home, kept, ignore=_sockets)
        _unmount(self.home)
        shutil.rmtree(self.home)
        kept.rename(self.home)


@dataclass(slots=True)
class ExhaustedDescriptors:
    """Processes that cannot open another file until ``end``."""

    pids: Sequence[int]
    _before: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(OSError):  # the process has just ended
                self._before[pid] = resource.prlimit(pid, resource.RLIMIT_NOFILE)
                # The limit bounds a descriptor's number, and a new one is always the lowest free number.
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (_first_free(pid), self._before[pid][1]))

    def end(self) -> None:
        """Restore the limits. May be called twice."""
        for pid, limits in self._before.items():
            with contextlib.suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        self._before.clear()


@dataclass(slots=True)
class ClockFile:
    """File that ``lab.jumping_clock`` reads."""

    path: Path
    _off_s: float = 0.0

    def jump(self, by_s: float) -> None:
        """Set the clock ahead by so many seconds."""
        self._off_s += by_s
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(str(self._off_s), encoding="ascii")


@dataclass(slots=True)
class Breakages:
    """Current failures by peer.

    Owns the disks: ``close`` turns every home into an ordinary folder again.
    """

    _disks: dict[str, Disk] = field(default_factory=dict)
    """Disks by peer name."""
    _exhausted: dict[str, ExhaustedDescriptors] = field(default_factory=dict)
    _clocks: dict[str, ClockFile] = field(default_factory=dict)
    _logs: dict[Path, Path] = field(default_factory=dict)
    """Temporary path of each log outside a failing disk, with its final path."""

    def prepare(self, acts: Iterable[Act], homes: Mapping[str, Path]) -> None:
        """Mount disks for the peers whose disks will fail. Call it before any peer starts."""
        for who in sorted({act.who for act in acts if act.kind in (ActKind.FILL, ActKind.LOCK)}):
            self._disks[who] = Disk.small(homes[who])
        for who in {act.who for act in acts if act.kind is ActKind.JUMP}:
            self._clocks[who] = ClockFile(homes[who].with_name(f"{homes[who].name}.clock"))
            self._clocks[who].jump(0.0)

    def program(self, who: str, module: str) -> tuple[str, list[str]]:
        """Return the module that runs a peer's ``module``, and its first arguments: if its clock jumps, another one."""
        if who not in self._clocks:
            return module, []
        return "lab.jumping_clock", [str(self._clocks[who].path), module]

    def log(self, who: str, log: Path) -> Path:
        """Return where to write a peer's output: outside its home if its disk will fail, so that nothing is lost."""
        if who not in self._disks:
            return log
        beside = log.parent.with_name(f"{log.parent.name}.log")
        self._logs[beside] = log
        return beside

    def perform(self, act: Act, pid: int) -> None:
        """Begin or end a failure of the computer on which this process is a peer."""
        match act.kind:
            case ActKind.FILL:
                self._disks[act.who].fill()
            case ActKind.DRAIN:
                self._disks[act.who].drain()
            case ActKind.LOCK:
                self._disks[act.who].lock()
            case ActKind.UNLOCK:
                self._disks[act.who].unlock()
            case ActKind.EXHAUST:
                self._exhausted[act.who] = ExhaustedDescriptors([pid, *daemons(pid)])
            case ActKind.RELIEVE:
                self._exhausted.pop(act.who).end()
            case ActKind.LOSE_DAEMON:
                kill_daemons(pid)
            case ActKind.JUMP:
                self._clocks[act.who].jump(act.by_s)
            case ActKind.LOSE_RANK | ActKind.FREEZE_RANK:
                signal_last_rank(pid, signal.SIGKILL if act.kind is ActKind.LOSE_RANK else signal.SIGSTOP)
            case _:
                raise ValueError(f"not a failure: {act.kind}")

    def repair(self) -> None:
        """End all failures."""
        for each in self._exhausted.values():
            each.end()
        for disk in self._disks.values():
            disk.unlock()
            disk.drain()

    def close(self) -> None:
        """Turn the homes into ordinary folders. No process may have a file of them open."""
        for disk in self._disks.values():
            disk.close()
        self._disks.clear()
        for clock in self._clocks.values():
            clock.path.unlink(missing_ok=True)
        self._clocks.clear()
        for beside, log in self._logs.items():
            if beside.exists():
                beside.rename(log)
        self._logs.clear()


def daemons(pid: int) -> list[int]:
    """Return the p2pd processes among a process and its descendants."""
    return [each for each in process_tree(pid) if _program(each) == DAEMON]


def kill_daemons(pid: int) -> None:
    """Kill the network daemons of a peer, as a crash would."""
    for each in daemons(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def ranks(pid: int) -> list[int]:
    """Return the processes of a peer's trainer, one a device."""
    return [each for each in process_tree(pid) if RANK_MODULE in _arguments(each)]


def kill_node(who: str, pid: int) -> None:
    """Kill the node of a peer on several devices, and its daemons, as ``Stage.kill`` does a whole peer.

    Raises DeviceError unless its trainer's processes then end by themselves; they are killed in that case.
    """
    orphans = [psutil.Process(each) for each in ranks(pid)]
    for each in (pid, *daemons(pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    until = time.monotonic() + ORPHANS_S
    while (alive := [each for each in orphans if runs(each)]) and time.monotonic() < until:
        time.sleep(0.02)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if alive or not orphans:
        left = ", ".join(str(each.pid) for each in alive) or "there were none"
        raise DeviceError(
            f"The processes of the trainer of {who} did not end by themselves: {left}.", "See what they logged."
        )


def signal_last_rank(pid: int, number: signal.Signals) -> None:
    """Send a signal to the process of a peer's last device. Raises DeviceError if it trains on one device."""
    found = ranks(pid)
    try:
        if len(found) < 2:
            raise DeviceError("It has no process of a second device.", "See what it logged.")
        os.kill(found[-1], number)
    except ProcessLookupError as error:
        raise DeviceError("The process of its last device has ended.", "See what it logged.") from error


def with_clock_error(seconds: float, inside: Wrap) -> Wrap:
    """Return a command wrapper that also makes the clock fast by this many seconds."""
    if not seconds:
        return inside
    wrong = {
        "LD_PRELOAD": str(faketime_library()),
        "FAKETIME": f"{seconds:+.0f}s",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
    }

    def wrapped(*command: str) -> Sequence[str]:
        return inside("/usr/bin/env", *(f"{name}={value}" for name, value in wrong.items()), *command)

    return wrapped


def faketime_library() -> Path:
    """Return the path of libfaketime. Raises DeviceError if it is not installed."""
    for place in ("/usr/lib", "/usr/local/lib"):
        for found in sorted(Path(place).glob("**/faketime/libfaketime.so.1")):
            return found
    raise DeviceError(
        "peers.clock_off_s needs libfaketime, which is not installed.",
        "Type: apt-get install libfaketime.",
    )


def _sockets(folder: str, names: list[str]) -> list[str]:
    """Return the names of sockets: a copy of a socket is of no use."""
    return [name for name in names if stat.S_ISSOCK((Path(folder) / name).lstat().st_mode)]


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/exe").readlink().name
    except OSError:  # the process has ended or is a zombie
        return ""


def runs(process: psutil.Process) -> bool:
    """Return whether a process has not ended; one that nobody has waited for has."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _arguments(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # the process has ended
        return []


def _first_free(pid: int) -> int:
    taken = {int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()}
    return next(number for number in range(len(taken) + 1) if number not in taken)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, timeout=COMMAND_DEADLINE_S)


def _unmount(place: Path) -> None:
    subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=COMMAND_DEADLINE_S)
