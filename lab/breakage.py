"""What breaks on a computer while its peer runs: the disk of its home, its file descriptors, its network daemon.

A disk that can fill up is a small file system in memory, mounted where the home is; one that is read-only is the home
mounted over itself. Both need a mount namespace that others do not see, which a cell has (``lab.cell``). What the peer
left is copied from memory into the folder at the end; what it prints goes to a file that no such disk holds.
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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab.freezing import family
from lab.namespaces import COMMAND_DEADLINE_S
from lab.script import BREAKS, Act, Do
from p2ptrain.base.errors import DeviceError
from peer.testnet.processes import Wrap

DISK_BYTES = 64 << 20
"""Of a disk that can fill up: a guess, twenty checkpoints of a laboratory's model."""
DAEMON = "p2pd"
BREAKAGE = frozenset(do for pair in BREAKS.values() for do in pair if do is not None)
"""What ``Breakages.do`` does."""

_FILLER = ".filler"


@dataclass(slots=True)
class Disk:
    """What a peer's home lies on. ``close`` leaves an ordinary folder with all that was written."""

    home: Path
    _locked: bool = False

    @classmethod
    def small(cls, home: Path) -> Disk:
        """A disk of DISK_BYTES with what lies in the home."""
        aside = home.with_name(f"{home.name}.before")
        shutil.copytree(home, aside, ignore=_sockets)
        _mount("-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "tmpfs", str(home))
        shutil.copytree(aside, home, dirs_exist_ok=True)
        shutil.rmtree(aside)
        return cls(home)

    def fill(self) -> None:
        """Take all the room there is, also when others take some of it meanwhile."""
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
        """Files cannot be made, changed or removed by their names. (Who has one open goes on writing to it.)"""
        _mount("--bind", str(self.home), str(self.home))
        self._locked = True
        _mount("-o", "remount,bind,ro", str(self.home))

    def unlock(self) -> None:
        """Safe to call twice."""
        if self._locked:
            self._locked = False
            _unmount(self.home)

    def close(self) -> None:
        """Nobody may have a file there open any more."""
        self.unlock()
        self.drain()
        kept = self.home.with_name(f"{self.home.name}.kept")
        shutil.copytree(self.home, kept, ignore=_sockets)
        _unmount(self.home)
        shutil.rmtree(self.home)
        kept.rename(self.home)


@dataclass(slots=True)
class Exhausted:
    """Processes that can open nothing more, until ``end``."""

    pids: Sequence[int]
    _before: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(OSError):  # it has just ended
                self._before[pid] = resource.prlimit(pid, resource.RLIMIT_NOFILE)
                # The limit is on a descriptor's number, and the lowest free one is always taken.
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (_first_free(pid), self._before[pid][1]))

    def end(self) -> None:
        """Safe to call twice."""
        for pid, limits in self._before.items():
            with contextlib.suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        self._before.clear()


@dataclass(slots=True)
class Breakages:
    """What is broken of whom. Who closes what: ``close`` gives every home back as a folder."""

    _disks: dict[str, Disk] = field(default_factory=dict)
    """By the peer's name."""
    _exhausted: dict[str, Exhausted] = field(default_factory=dict)
    _logs: dict[Path, Path] = field(default_factory=dict)
    """What somebody prints while its disk may break, and where it belongs."""

    def prepare(self, acts: Iterable[Act], homes: Mapping[str, Path]) -> None:
        """Before anybody starts: disks for those whose disks will break."""
        for who in sorted({act.who for act in acts if act.do in (Do.FILL, Do.LOCK)}):
            self._disks[who] = Disk.small(homes[who])

    def log(self, who: str, log: Path) -> Path:
        """Where to write what it prints: beside its home where its disk will break, or its words would be lost."""
        if who not in self._disks:
            return log
        beside = log.parent.with_name(f"{log.parent.name}.log")
        self._logs[beside] = log
        return beside

    def do(self, act: Act, pid: int) -> None:
        """Something of the computer on which this process is a peer breaks, or works again."""
        match act.do:
            case Do.FILL:
                self._disks[act.who].fill()
            case Do.DRAIN:
                self._disks[act.who].drain()
            case Do.LOCK:
                self._disks[act.who].lock()
            case Do.UNLOCK:
                self._disks[act.who].unlock()
            case Do.EXHAUST:
                self._exhausted[act.who] = Exhausted([pid, *daemons(pid)])
            case Do.RELIEVE:
                self._exhausted.pop(act.who).end()
            case Do.LOSE_DAEMON:
                kill_daemon(pid)
            case _:
                raise ValueError(f"nothing breaks when somebody {act.do}")

    def mend(self) -> None:
        """Everything works again."""
        for each in self._exhausted.values():
            each.end()
        for disk in self._disks.values():
            disk.unlock()
            disk.drain()

    def close(self) -> None:
        """Nobody may have a file in these homes open any more."""
        for disk in self._disks.values():
            disk.close()
        self._disks.clear()
        for beside, log in self._logs.items():
            if beside.exists():
                beside.rename(log)
        self._logs.clear()


def daemons(pid: int) -> list[int]:
    """The network daemons among a process and all below it."""
    return [each for each in family(pid) if _program(each) == DAEMON]


def kill_daemon(pid: int) -> None:
    """As a bug of it would."""
    for each in daemons(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


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


def _sockets(folder: str, names: list[str]) -> list[str]:
    """Those that are sockets: nobody listens there any more, and no copy of one is any use."""
    return [name for name in names if stat.S_ISSOCK((Path(folder) / name).lstat().st_mode)]


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/exe").readlink().name
    except OSError:  # just gone, or a zombie
        return ""


def _first_free(pid: int) -> int:
    taken = {int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()}
    return next(number for number in range(len(taken) + 1) if number not in taken)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, timeout=COMMAND_DEADLINE_S)


def _unmount(place: Path) -> None:
    subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=COMMAND_DEADLINE_S)
