"""Imports of large libraries, which take seconds: faster, and with a Ctrl+C that works meanwhile."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def large_imports() -> Iterator[None]:
    """Import without garbage collection, now and later, of what is loaded.

    Modules stay until the process ends, but the collector examines them again and again, and once more at exit: more
    than a quarter of the time that a peer needs to import its libraries.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def command_imports() -> Iterator[None]:
    """Import what a command needs; an interrupt ends the process immediately.

    There is nothing to save yet, and libraries turn a KeyboardInterrupt during their imports into other errors: numpy's
    lazy imports recurse endlessly.
    """
    before = signal.getsignal(signal.SIGINT)
    is_ours = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with large_imports():
            yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, before)
