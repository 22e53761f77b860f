"""The virtual world: things to come in the order of their times, and a clock that jumps to the next one.

Only what comes within the present second of the virtual clock is on a heap; all the rest waits unordered, a list for
each second (a calendar queue: Brown, CACM 31 (10), 1988). Among 10,000 peers a heap of everything would be 100,000
entries long, and most of an event's time would be spent on its order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf
from typing import Any

Entry = tuple[float, int, Callable[..., None], tuple[Any, ...]]


class World:
    """Runs callbacks in the order of their times; equal times in the order they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        """Callbacks run so far."""
        self.stopped = False
        """Nothing more is to happen, whatever is still scheduled."""
        self._second = 0
        self._heap: list[Entry] = []
        """What comes by the end of the present second."""
        self._later: dict[int, list[Entry]] = {}
        """By second."""
        self._seconds: list[int] = []
        """Of these, as a heap."""
        self._serial = 0

    def at(self, time: float, callback: Callable[..., None], *arguments: Any) -> None:
        """Call back at this time, or now if it has passed; never if it is infinite."""
        if time < inf:
            now = self.now
            self._schedule(time if time > now else now, callback, arguments)

    def after(self, delay: float, callback: Callable[..., None], *arguments: Any) -> None:
        """Call back this many seconds from now; never if there is no end to them."""
        if delay < inf:
            self._schedule(self.now + delay, callback, arguments)

    def run(self, until: float = inf, at_most: int | None = None) -> bool:
        """Run until nothing is left, or the next callback lies beyond ``until``, or it is stopped.

        Args:
            at_most: so many callbacks, and then return for the while.

        Returns:
            Whether there is more to run (False when ``until`` ends it).
        """
        heap, pop = self._heap, heapq.heappop
        left = at_most if at_most is not None else -1
        while (heap or self._turn()) and heap[0][0] <= until and not self.stopped:
            if left == 0:
                return True
            left -= 1
            self.now, _, callback, arguments = pop(heap)
            self.events += 1
            callback(*arguments)
        if until < inf and not self.stopped:
            self.now = max(self.now, until)
        return False

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
        """On to the next second in which something comes, the present one being over. False when nothing does."""
        if not self._seconds:
            return False
        self._second = heapq.heappop(self._seconds)
        self._heap.extend(self._later.pop(self._second))
        heapq.heapify(self._heap)
        return True
