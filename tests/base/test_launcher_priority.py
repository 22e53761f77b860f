"""Priority of a child that yields to its parent, nice(2) and autogroups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from p2ptrain.base.launcher import launched

LOWER = "import os, p2ptrain.base.launcher as it; it.lower_priority(3); print(os.nice(0)); {}"


def test_a_child_yields_also_where_the_system_groups_by_session() -> None:
    show = "print(open('/proc/self/autogroup').read())" if Path("/proc/self/autogroup").exists() else "print('nice 3')"
    command = launched(sys.executable, "-c", LOWER.format(show))
    lines = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.splitlines()
    niceness = min(os.nice(0) + 3, 19)
    assert int(lines[0]) == niceness
    assert lines[1].endswith(f"nice {niceness}")


@pytest.mark.parametrize("error", ["FileNotFoundError", "PermissionError", "BlockingIOError"])
def test_a_system_that_does_not_let_it_is_no_error(error: str) -> None:
    refuse = f"import pathlib\ndef refuse(*a, **k): raise {error}\npathlib.Path.open = refuse\n"
    command = [sys.executable, "-c", refuse + LOWER.format("print('on')")]
    assert subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.split()[-1] == "on"
