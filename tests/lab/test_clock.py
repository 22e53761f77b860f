"""Clocks that are wrong: only the time of day is, and only where it is asked for."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lab import clock
from p2ptrain.base.errors import DeviceError


def plain(*command: str) -> Sequence[str]:
    return command


def test_a_right_clock_changes_nothing() -> None:
    assert clock.beside(0.0, plain) is plain


@pytest.mark.skipif(not list(Path("/usr/lib").glob("**/faketime/libfaketime.so.1")), reason="needs libfaketime")
def test_only_the_time_of_day_is_wrong(tmp_path: Path) -> None:
    told = "import os, sys, time; print(time.time(), time.monotonic(), os.stat(sys.argv[1]).st_mtime)"
    command = clock.beside(-3600, plain)(sys.executable, "-c", told, str(tmp_path))
    before = time.time(), time.monotonic()
    wall, steady, changed = map(float, subprocess.run(command, capture_output=True, check=True).stdout.split())
    assert before[0] - 3601 < wall < time.time() - 3599
    assert before[1] <= steady <= time.monotonic()
    assert abs(changed - tmp_path.stat().st_mtime) < 1


def test_without_the_library_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    with pytest.raises(DeviceError) as caught:
        clock.library()
    assert caught.value.remedy == "Type: apt-get install libfaketime."
