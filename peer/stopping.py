"""Ctrl+C, SIGTERM and a terminal that closes: the first one asks, the second one ends the process at once.

What the first one does changes once in a peer's life. While it joins there is nothing to save and nobody to say goodbye
to, and what it waits for may never come: joining ends where it stands. Once it trains, it ends its inner step, saves
and says goodbye. What is cleaned up after an error goes on to its end, which is near: the error is how the peer ends.

A terminal that closes, or a connection by ssh that drops, is SIGHUP. It asks as the others do, but never ends at once:
the kernel and the shell both send it, and service managers send it after their SIGTERM. Under nohup it is ignored.
Two SIGTERM at one moment are one: who has it sent for the death of a parent may get it once for each of its threads.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import FrameType, TracebackType
from typing import Any, Self

from p2ptrain.ports import Notebook
from p2ptrain.train.loop import Signals

_HANGUP: int | None = getattr(signal, "SIGHUP", None)
"""Not every platform has it."""
DOUBLED_S = 0.5
"""A guess: nobody asks for a second time so soon, but by Ctrl+C."""


class JoiningStopped(KeyboardInterrupt):
    """The owner stopped a peer that did not train yet."""


class Stopping:
    """Listens to the signals while it is entered, in the main thread. Swallows JoiningStopped: it is a good end.

    The handler takes no lock: it may interrupt the main thread, or itself, inside of any, also of an Event's or of the
    event log's. What there is to set and to tell goes through a queue, which bears that, to a thread of its own.
    """

    def __init__(self, signals: Signals, notebook: Notebook) -> None:
        self._signals = signals
        self._notebook = notebook
        self._wake: Callable[[], None] | None = None
        self._has_failed = False
        self._asked: tuple[int, float] | None = None
        """The first signal, and when it came."""
        self._before: dict[int, Any] = {}
        self._told: SimpleQueue[tuple[str, bool] | None] = SimpleQueue()
        """Of a signal its name, and whether it ends anything."""
        self._teller = threading.Thread(target=self._tell, name="stopping", daemon=True)

    def __enter__(self) -> Self:
        self._teller.start()
        self._before = {number: signal.signal(number, self._handle) for number in _heard()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._told.put(None)
        self._teller.join()
        return isinstance(error, JoiningStopped)

    @contextlib.contextmanager
    def minding_errors(self) -> Iterator[None]:
        """After an error in this block the first signal ends nothing any more: JoiningStopped would take its place."""
        try:
            yield
        except Exception:  # whatever it is, it goes on to whoever minds it
            self._has_failed = True
            raise

    def let_finish(self, wake: Callable[[], None]) -> None:
        """From now on the first signal sets ``Signals.stop`` and calls ``wake``. Raises JoiningStopped."""
        self._wake = wake
        if self._asked is not None:  # it came where an exception is lost: in a finalizer
            raise JoiningStopped

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked is not None:
            first, then = self._asked
            if number == _HANGUP or (number == first == signal.SIGTERM and now - then < DOUBLED_S):
                return
            raise KeyboardInterrupt
        self._asked = number, now
        self._told.put((signal.Signals(number).name, not self._has_failed))
        if not self._has_failed and self._wake is None:
            raise JoiningStopped

    def _tell(self) -> None:
        while (told := self._told.get()) is not None:
            name, ends = told
            self._signals.stop.set()
            if not ends:
                continue
            if self._wake is not None:
                self._wake()
            self._notebook.note("stopping", signal=name, training=self._wake is not None)


def _heard() -> list[int]:
    """The signals that ask us to stop."""
    closes = [] if _HANGUP is None or signal.getsignal(_HANGUP) is signal.SIG_IGN else [_HANGUP]
    return [signal.SIGINT, signal.SIGTERM, *closes]
