"""Ctrl+C while a command still loads what it needs, which takes seconds."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def default_sigint() -> Iterator[None]:
    """Inside, an interrupt ends the process as it ends any program.

    Nothing is there to be saved yet, and libraries turn a KeyboardInterrupt amid their imports into other errors:
    numpy's lazy ones recurse without end.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
