"""SIGINT (Ctrl+C), SIGTERM and SIGHUP: the first signal stops the peer gracefully, a second one at once.

==============  =======================================================================================================
state           effect of the first signal
==============  =======================================================================================================
joining         joining is cancelled: there is nothing to save, nobody to say goodbye to, and the wait may never end
training        the inner step ends, a checkpoint is saved, the peer says goodbye
after an error  the cleanup continues, which is short; the peer ends with the error
==============  =======================================================================================================

SIGHUP (a terminal closes, an ssh connection drops) never acts as the second signal: the kernel and the shell both send
it, and service managers send it after their SIGTERM. Under nohup it is ignored. Two SIGTERM within ``DOUBLED_S`` count
as one: a process that receives SIGTERM at its parent's death may get one for each of the parent's threads.

A background task that fails stops the peer as a signal does, and the peer ends with its error.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Self

from p2ptrain.host.loop import Signals
from p2ptrain.ports import Notebook

DOUBLED_S = 0.5
"""Seconds within which a second SIGTERM counts as the first. Guess: the delays between service
managers' duplicate signals."""


class Stopping:
    """Handles signals, and failures of background tasks; a context manager within the task that they stop.

    Leaving it ends the background tasks. Raises KeyboardInterrupt after a second signal, and the error of a
    background task.
    """

    def __init__(self, signals: Signals, notebook: Notebook) -> None:
        self.is_hasty = False
        """Whether a second signal stops the peer at once."""
        self._signals = signals
        self._notebook = notebook
        self._wake: Callable[[], None] | None = None
        self._has_failed = False
        self._asked: tuple[int, float] | None = None
        self._has_cancelled = False
        self._before: dict[int, Any] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._fault: BaseException | None = None

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._stopped, self._loop = task, asyncio.get_running_loop()
        ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        for number in [signal.SIGINT, signal.SIGTERM, *([] if ignores_hangup else [signal.SIGHUP])]:
            self._before[number] = signal.getsignal(number)
            self._loop.add_signal_handler(number, self._signalled, number)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        for number, handler in self._before.items():
            self._loop.remove_signal_handler(number)
            signal.signal(number, handler)
        for task in self._tasks:
            task.cancel()
        is_stopped = error is None or isinstance(error, asyncio.CancelledError)
        if is_stopped and self.is_hasty:
            raise KeyboardInterrupt from None
        if is_stopped and self._fault is not None:
            raise self._fault
        return isinstance(error, asyncio.CancelledError) and self._has_cancelled

    @contextlib.contextmanager
    def handling_errors(self) -> Iterator[None]:
        """Ignore the first signal once this block has failed, because a cancellation would replace its error."""
        try:
            yield
        except Exception:  # raised again for the caller
            self._has_failed = True
            raise

    def let_finish(self, wake: Callable[[], None]) -> None:
        """Make the first signal set ``Signals.stop`` and call ``wake``. Raises CancelledError if it came before."""
        self._wake = wake
        if self._signals.stop.is_set():  # a library has lost the exception
            self._has_cancelled = True
            raise asyncio.CancelledError

    def watch(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a background task, whose failure stops the peer, until this context ends."""
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._ended)
        self._tasks.append(task)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and self._fault is None:
            self._fault = error
            self._stop()

    def _signalled(self, number: int) -> None:
        now = time.monotonic()
        if self._asked is not None:
            first, then = self._asked
            if number == signal.SIGHUP or (number == first == signal.SIGTERM and now - then < DOUBLED_S):
                return
            self.is_hasty = True
            self._cancel()
            for each in (signal.SIGINT, signal.SIGTERM):  # a third one ends the process if the cleanup hangs
                self._loop.remove_signal_handler(each)
                signal.signal(each, signal.SIG_DFL)
            return
        self._asked = number, now
        if not self._has_failed:
            self._notebook.note("stopping", signal=signal.Signals(number).name, training=self._wake is not None)
        self._stop()

    def _stop(self) -> None:
        self._signals.stop.set()
        if self._wake is not None:
            self._wake()
        elif not self._has_failed:
            self._cancel()

    def _cancel(self) -> None:
        self._has_cancelled = True
        self._stopped.cancel()
