"""Virtual time: an asyncio event loop whose clock jumps, so that hours pass in milliseconds, deterministically.

When nothing is ready, ``time()`` becomes exactly the time of the next scheduled call, without rounding, because the
simulator adds the same two numbers. Calls scheduled for the same time run in the order of scheduling, as on a heap
keyed by (time, serial). Executor work runs at once in the calling thread and takes no time. When nothing is ready and
nothing is scheduled, the loop raises ``DeadlockError``.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import selectors
from asyncio.events import TimerHandle
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class DeadlockError(RuntimeError):
    """All tasks wait, and nothing is scheduled that could wake one."""


class _OrderedTimer(TimerHandle):
    """Timer that runs after earlier ones for the same time; asyncio's own order of ties is undefined."""

    __slots__ = ("_serial",)
    _scheduled: bool

    def __init__(self, serial: int, when: float, *args: Any) -> None:
        super().__init__(when, *args)
        self._serial = serial

    def __lt__(self, other: TimerHandle) -> bool:
        if isinstance(other, _OrderedTimer):
            return (self.when(), self._serial) < (other.when(), other._serial)
        return NotImplemented

    __hash__ = TimerHandle.__hash__


class _JumpingSelector(selectors.BaseSelector):
    """Selector that polls the real one and advances the loop's clock where it would wait."""

    def __init__(self) -> None:
        self._real = selectors.DefaultSelector()
        self.jump: Callable[[], None] = lambda: None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if not ready and (timeout is None or timeout > 0):
            self.jump()
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def close(self) -> None:
        self._real.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop with a virtual clock that starts at 0; see the module."""

    _scheduled: list[TimerHandle]  # asyncio.BaseEventLoop's heap of timers
    _check_closed: Callable[[], None]

    def __init__(self) -> None:
        selector = _JumpingSelector()
        super().__init__(selector)
        selector.jump = self._jump
        self._serials = itertools.count()
        self._set(0.0)

    def time(self) -> float:
        return self._now

    def call_at(
        self,
        when: float,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> TimerHandle:
        self._check_closed()
        timer = _OrderedTimer(next(self._serials), when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def run_in_executor(  # type: ignore[override]  # asyncio's signature has its own TypeVarTuple; calls are compatible
        self, executor: object, func: Callable[..., Result], *args: Any
    ) -> asyncio.Future[Result]:
        future: asyncio.Future[Result] = self.create_future()
        future.set_result(func(*args))
        return future

    def _set(self, now: float) -> None:
        self._now = now
        # asyncio runs timers that are due before time() + resolution: one unit in the last place means "due by now".
        self._clock_resolution = math.ulp(now)

    def _jump(self) -> None:
        if not self._scheduled:
            raise DeadlockError("every task waits and nothing is scheduled")
        self._set(max(self._now, self._scheduled[0].when()))


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on a virtual clock, like ``asyncio.run``."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
