"""A virtual clock with a queue of scheduled callbacks; the clock jumps to the next one.

Only callbacks of the current second are in a heap. Later ones wait unordered, in one list per second (a calendar queue:
Brown, CACM 31 (10), 1988). With 10,000 peers a heap of everything would hold 100,000 entries, and ordering them would
take most of an event's time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf
from typing import Any

Entry = tuple[float, int, Callable[..., None], tuple[Any, ...]]


class World:
    """A virtual clock that runs callbacks by time, and callbacks of equal times in the order they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        """Callbacks run so far."""
        self.stopped = False
        """Whether the simulation has been stopped; scheduled callbacks do not run any more."""
        self._second = 0
        self._heap: list[Entry] = []
        """Callbacks up to the end of the current second."""
        self._later: dict[int, list[Entry]] = {}
        """Callbacks of later seconds, by second."""
        self._seconds: list[int] = []
        """Keys of ``_later``, as a heap."""
        self._serial = 0

    def at(self, time: float, callback: Callable[..., None], *arguments: Any) -> None:
        """Schedule a callback at this time; now if the time has passed, never if it is infinite."""
        if time < inf:
            now = self.now
            self._schedule(time if time > now else now, callback, arguments)

    def after(self, delay: float, callback: Callable[..., None], *arguments: Any) -> None:
        """Schedule a callback this many seconds from now; never if ``delay`` is infinite."""
        if delay < inf:
            self._schedule(self.now + delay, callback, arguments)

    def run(self, until: float = inf) -> None:
        """Run until no callback is left, the next one lies beyond ``until``, or the world is stopped."""
        heap, pop = self._heap, heapq.heappop
        while (heap or self._turn()) and heap[0][0] <= until and not self.stopped:
            self.now, _, callback, arguments = pop(heap)
            self.events += 1
            callback(*arguments)
        if until < inf and not self.stopped:
            self.now = max(self.now, until)

    def _schedule(self, time: float, callback: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._serial += 1
        entry, second = (time, self._serial, callback, arguments), int(time)
        if second <= self._second:
            heapq.heappush(self._heap, entry)
        elif (entries := self._later.get(second)) is not None:
            entries.append(entry)
        else:
            self._later[second] = [entry]
            heapq.heappush(self._seconds, second)

    def _turn(self) -> bool:
        """Advance to the next second that has callbacks. Return False if there is none."""
        if not self._seconds:
            return False
        self._second = heapq.heappop(self._seconds)
        self._heap.extend(self._later.pop(self._second))
        heapq.heapify(self._heap)
        return True
