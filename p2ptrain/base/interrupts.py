"""Handling of Ctrl+C while a command still imports its modules, which takes seconds."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def default_sigint() -> Iterator[None]:
    """Let an interrupt end the process immediately inside this context.

    There is nothing to save yet, and libraries turn a KeyboardInterrupt during their imports into other errors: numpy's
    lazy imports recurse endlessly.
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
