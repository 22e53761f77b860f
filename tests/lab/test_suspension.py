"""Suspended machines: all processes of a peer stop, resume, and resume even if the suspending process dies."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from lab.suspension import SuspendedProcesses, process_tree, processes_with

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"])
child.wait()
"""
SUSPENDER = """
import os, sys, time
from lab.suspension import SuspendedProcesses
held = SuspendedProcesses([int(pid) for pid in sys.argv[1:]])
print("suspended", flush=True)
time.sleep(600)
"""


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


@pytest.fixture
def two() -> Iterator[tuple[psutil.Process, psutil.Process]]:
    """Start a process with a child."""
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    parent = psutil.Process(process.pid)
    [child] = parent.children()
    yield parent, child
    for each in (child, parent):
        each.kill()
    process.communicate()


def are_stopped(processes: tuple[psutil.Process, ...]) -> bool:
    return all(each.status() == psutil.STATUS_STOPPED for each in processes)


def test_a_suspension_stops_the_whole_process_tree(two: tuple[psutil.Process, psutil.Process]) -> None:
    assert process_tree(two[0].pid) == [each.pid for each in two]
    suspension = SuspendedProcesses(process_tree(two[0].pid))
    wait_for(lambda: are_stopped(two))
    suspension.end()
    suspension.end()
    wait_for(lambda: not any(are_stopped((each,)) for each in two))


def test_suspended_processes_resume_when_the_suspending_process_is_killed(
    two: tuple[psutil.Process, psutil.Process],
) -> None:
    command = [sys.executable, "-c", SUSPENDER, *(str(each.pid) for each in two)]
    suspender = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert suspender.stdout is not None
    assert suspender.stdout.readline() == "suspended\n"
    wait_for(lambda: are_stopped(two))
    suspender.kill()
    suspender.communicate()
    wait_for(lambda: not any(are_stopped((each,)) for each in two))


def test_an_ended_process_can_be_suspended_and_resumed_without_effect() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    SuspendedProcesses([gone.pid]).end()


def test_marked_processes_are_found_by_their_environment() -> None:
    environment = {**os.environ, "A_MARK_OF_THIS_TEST": "abc"}
    command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    process.stdout.readline()
    assert processes_with("A_MARK_OF_THIS_TEST", "abc") == [process.pid]
    assert processes_with("A_MARK_OF_THIS_TEST", "ab") == []
    process.kill()
    process.communicate()
    assert processes_with("A_MARK_OF_THIS_TEST", "abc") == []
