"""An interrupt during a command's imports ends the process at once; after them, Python handles it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys

import pytest

from p2ptrain.base.imports import command_imports, large_imports

LOADING = """
import os, signal
from p2ptrain.base.imports import command_imports
with command_imports():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        print("a library swallowed it")
"""


def test_an_interrupt_amid_imports_ends_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_afterwards_python_hears_of_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with command_imports():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_who_ignores_interrupts_goes_on_to() -> None:
    """Check that a background job of a shell, which ignores SIGINT, still does so after the imports."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with command_imports():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_imports_are_neither_collected_nor_examined_again() -> None:
    before = gc.get_freeze_count()
    with large_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    gc.unfreeze()
