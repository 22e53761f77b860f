"""Failures of a computer: disks, descriptors, daemons and clocks; with real mounts if root can make them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.breakage import Breakages, Disk, ExhaustedDescriptors, faketime_library, with_clock_error
from lab.script import Act, ActKind
from p2ptrain.base.errors import DeviceError

ON_A_DISK = """
import errno, os, socket, sys
from pathlib import Path
from lab.script import Act, ActKind
from lab.breakage import Disk

home = Path(sys.argv[1])
socket.socket(socket.AF_UNIX).bind(str(home / "old.sock"))
disk = Disk.small(home)
socket.socket(socket.AF_UNIX).bind(str(home / "new.sock"))
assert (home / "before").read_text() == "kept"
(home / "early").write_text("x")

def refusal(name):
    try:
        (home / name).write_bytes(b"y" * 100_000)
    except OSError as error:
        (home / name).unlink(missing_ok=True) if error.errno == errno.ENOSPC else None
        return errno.errorcode[error.errno]

disk.fill()
print(refusal("full"))
disk.drain()
print(refusal("room"))
disk.lock()
print(refusal("locked"))
disk.unlock()
disk.unlock()
print(refusal("open"))
disk.lock()
disk.close()
print(sorted(each.name for each in home.iterdir()), os.path.ismount(home))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts are root's")
def test_a_disk_fills_up_and_becomes_read_only_and_leaves_a_folder(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "before").write_text("kept")
    own_mounts = ["unshare", "--mount", "--propagation", "private", "--"]
    done = subprocess.run(
        [*own_mounts, sys.executable, "-c", ON_A_DISK, str(home)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["ENOSPC", "None", "EROFS", "None", "['before', 'early', 'open', 'room'] False"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["home"]


OPENING = """
import sys
for line in sys.stdin:
    try:
        open("/dev/null").close()
        print("opened", flush=True)  # after it is closed, so that its number is free again
    except OSError as error:
        print(error.strerror, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit is Linux's")
def test_an_exhausted_process_opens_nothing_until_the_end() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OPENING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def answer() -> str:
            print(file=process.stdin, flush=True)
            return process.stdout.readline().strip()  # type: ignore[union-attr]  # asserted above

        assert answer() == "opened"
        exhausted = ExhaustedDescriptors([process.pid])
        assert answer() == "Too many open files"
        exhausted.end()
        exhausted.end()
        assert answer() == "opened"
        process.stdin.close()


def test_an_ended_process_is_not_exhausted() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        ExhaustedDescriptors([process.pid]).end()


class Shrinking:
    """File on a disk that others fill: space that was free a moment ago is taken."""

    def __init__(self, error: int) -> None:
        self.blocks = 0
        self.error = error

    def __enter__(self) -> Shrinking:
        return self

    def __exit__(self, *_: Any) -> None:
        """Do nothing: there is nothing to close."""

    def write(self, block: bytes) -> int:
        self.blocks += 1
        if self.blocks > 3:
            raise OSError(self.error, os.strerror(self.error))
        return len(block)


def test_a_disk_is_full_when_it_takes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Shrinking(errno.ENOSPC)
    monkeypatch.setattr(Path, "open", lambda *_, **__: file)
    Disk(tmp_path).fill()
    assert file.blocks == 4
    broken = Shrinking(errno.EIO)
    monkeypatch.setattr(Path, "open", lambda *_, **__: broken)
    with pytest.raises(OSError, match="Input/output"):
        Disk(tmp_path).fill()


def test_output_of_a_peer_with_a_failing_disk_is_kept_outside_and_moved_home(tmp_path: Path) -> None:
    for name in ("anna", "bert"):
        (tmp_path / name).mkdir()
    breakages = Breakages({"anna": Disk(tmp_path / "anna")})
    logs = {name: breakages.log(name, tmp_path / name / "output.log") for name in ("anna", "bert")}
    assert logs == {"anna": tmp_path / "anna.log", "bert": tmp_path / "bert" / "output.log"}
    logs["anna"].write_text("no room")
    breakages._disks.clear()
    breakages.close()
    breakages.close()
    assert (tmp_path / "anna" / "output.log").read_text() == "no room"
    assert not logs["anna"].exists()


def plain(*command: str) -> Sequence[str]:
    return command


def test_a_right_clock_changes_nothing() -> None:
    assert with_clock_error(0.0, plain) is plain


@pytest.mark.skipif(not list(Path("/usr/lib").glob("**/faketime/libfaketime.so.1")), reason="needs libfaketime")
def test_only_the_time_of_day_is_wrong(tmp_path: Path) -> None:
    told = "import os, sys, time; print(time.time(), time.monotonic(), os.stat(sys.argv[1]).st_mtime)"
    command = with_clock_error(-3600, plain)(sys.executable, "-c", told, str(tmp_path))
    before = time.time(), time.monotonic()
    wall, steady, changed = map(float, subprocess.run(command, capture_output=True, check=True).stdout.split())
    assert before[0] - 3601 < wall < time.time() - 3599
    assert before[1] <= steady <= time.monotonic()
    assert abs(changed - tmp_path.stat().st_mtime) < 1


def test_a_clock_jumps_while_its_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "told.py").write_text(
        "import sys, time\nfrom p2ptrain.base.clock import wall\n"
        "for line in sys.stdin: print(time.time(), wall.jump_s, time.monotonic(), sys.argv[1:], flush=True)"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    breakages = Breakages()
    breakages.prepare([Act(1.0, ActKind.JUMP, "anna", 1.0)], {"anna": tmp_path / "anna"})
    assert breakages.program("bert", "told") == ("told", [])
    module, arguments = breakages.program("anna", "told")
    command = [sys.executable, "-m", module, *arguments, "more"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdin is not None
        assert program.stdout is not None

        def off_h() -> int:
            asked_at = time.monotonic()
            print("?", file=program.stdin, flush=True)
            wall, jump_s, steady, others = program.stdout.readline().split()
            assert asked_at <= float(steady) <= time.monotonic()
            assert abs(float(jump_s) - (float(wall) - time.time())) < 60  # seen by our clock, too
            assert others == "['more']"
            return round((float(wall) - time.time()) / 3600)

        assert off_h() == 0
        for by_h, wanted in ((24, 24), (-48, -24)):
            breakages.perform(Act(1.0, ActKind.JUMP, "anna", 3600.0 * by_h), program.pid)
            until = time.monotonic() + 20
            while off_h() != wanted and time.monotonic() < until:
                time.sleep(0.1)
            assert off_h() == wanted
        program.stdin.close()
    breakages.close()
    assert not list(tmp_path.glob("*.clock"))


def test_a_missing_library_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    with pytest.raises(DeviceError) as caught:
        faketime_library()
    assert caught.value.remedy == "Type: apt-get install libfaketime."
