"""A thread beside an event loop, for calls that compute or block for long."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Self, TypeVar

T = TypeVar("T")

INTERRUPT_S = 5.0
"""Longest wait for an interrupted call. Guess: how long a call of a C library blocks, such as a read from the hub."""
NAP_S = 0.5
"""Longest piece of ``nap``, in seconds."""


class DaemonThread:
    """One thread that makes calls for a loop, in order; a context manager. The process ends without waiting for it.

    The threads of ``asyncio.to_thread`` delay the end of the process until their calls return, which a call into a
    hung driver or network disk never does.
    """

    def __init__(self, name: str) -> None:
        self._loop: asyncio.AbstractEventLoop
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.put(None)

    async def run(self, function: Callable[..., T], *arguments: Any, wake: Callable[[], None] = lambda: None) -> T:
        """Return what a function returns in the thread. If the caller is cancelled, the call gets a KeyboardInterrupt.

        Waits at most ``INTERRUPT_S`` for the interrupted call.

        Args:
            wake: ends a wait of the function outside of Python's interpreter, which no exception interrupts.
        """
        future = self._submit(function, *arguments)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            until = time.monotonic() + INTERRUPT_S
            if not future.done():
                assert self._thread.ident is not None
                ident = ctypes.c_ulong(self._thread.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(KeyboardInterrupt))
            while not future.done() and time.monotonic() < until:
                wake()
                await asyncio.sleep(0.02)
            raise

    def result_of(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and return its result, for a call in the thread."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while not future.done():
                with contextlib.suppress(TimeoutError):
                    return future.result(NAP_S)
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, partial(function, *arguments)))
        return future

    def _work(self) -> None:
        with contextlib.suppress(KeyboardInterrupt):  # it came when its call had just returned
            while (entry := self._calls.get()) is not None:
                future, function = entry
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    result = function()
                except BaseException as error:  # raised in the loop
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
                del entry, future, function


def nap(seconds: float) -> None:
    """Sleep in pieces, between which ``DaemonThread.run`` can interrupt."""
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        time.sleep(min(left_s, NAP_S))
