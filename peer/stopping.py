"""SIGINT (Ctrl+C), SIGTERM and SIGHUP: the first signal stops the peer gracefully, a second one at once.

==============  =======================================================================================================
state           effect of the first signal
==============  =======================================================================================================
joining         joining is interrupted: there is nothing to save, nobody to say goodbye to, and the wait may never end
training        the inner step ends, a checkpoint is saved, the peer says goodbye
after an error  the cleanup continues, which is short; the peer ends with the error
==============  =======================================================================================================

SIGHUP (a terminal closes, an ssh connection drops) never acts as the second signal: the kernel and the shell both send
it, and service managers send it after their SIGTERM. Under nohup it is ignored. Two SIGTERM within ``DOUBLED_S`` count
as one: a process that receives SIGTERM at its parent's death may get one for each of the parent's threads.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import FrameType
from typing import Any, Self

from p2ptrain.host.loop import Signals
from p2ptrain.ports import Notebook

DOUBLED_S = 0.5
"""Seconds within which a second SIGTERM counts as the first. Guess: the delays between service
managers' duplicate signals."""


class JoiningStopped(KeyboardInterrupt):
    """The owner stopped the peer before training began."""


class Stopping:
    """Handles the signals; a context manager for the main thread that suppresses JoiningStopped.

    The handler takes no lock, because it may interrupt the main thread or itself while one is held, for instance in an
    Event or in the event log. It uses a reentrant queue, and a separate thread sets events and writes notes.
    """

    def __init__(self, signals: Signals, notebook: Notebook) -> None:
        self._signals = signals
        self._notebook = notebook
        self._wake: Callable[[], None] | None = None
        self._has_failed = False
        self._asked: tuple[int, float] | None = None
        self._before: dict[int, Any] = {}
        self._queue: SimpleQueue[tuple[str, bool] | None] = SimpleQueue()
        """Signal names, and whether each stops something; None ends the thread."""
        self._notifier = threading.Thread(target=self._notify, name="stopping", daemon=True)

    def __enter__(self) -> Self:
        self._notifier.start()
        ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        handled = [signal.SIGINT, signal.SIGTERM, *([] if ignores_hangup else [signal.SIGHUP])]
        self._before = {number: signal.signal(number, self._handle) for number in handled}
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._queue.put(None)
        self._notifier.join()
        return isinstance(error, JoiningStopped)

    @contextlib.contextmanager
    def handling_errors(self) -> Iterator[None]:
        """Ignore the first signal once this block has failed, because JoiningStopped would replace its error."""
        try:
            yield
        except Exception:  # raised again for the caller
            self._has_failed = True
            raise

    @property
    def is_terminated(self) -> bool:
        """Whether the first signal was not Ctrl+C, so that nobody may sit at the terminal."""
        return self._asked is not None and self._asked[0] != signal.SIGINT

    def let_finish(self, wake: Callable[[], None]) -> None:
        """Make the first signal set ``Signals.stop`` and call ``wake``. Raises JoiningStopped if it came before."""
        self._wake = wake
        if self._asked is not None:  # the exception was lost, in a finalizer
            raise JoiningStopped

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked is not None:
            first, then = self._asked
            if number == signal.SIGHUP or (number == first == signal.SIGTERM and now - then < DOUBLED_S):
                return
            raise KeyboardInterrupt
        self._asked = number, now
        self._queue.put((signal.Signals(number).name, not self._has_failed))
        if not self._has_failed and self._wake is None:
            raise JoiningStopped

    def _notify(self) -> None:
        while (entry := self._queue.get()) is not None:
            name, ends = entry
            self._signals.stop.set()
            if not ends:
                continue
            if self._wake is not None:
                self._wake()
            self._notebook.note("stopping", signal=name, training=self._wake is not None)
