"""The virtual world: a heap of things to come and a clock that jumps to the next one."""

from __future__ import annotations

import heapq
from collections.abc import Callable
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
        self._heap: list[Entry] = []
        self._serial = 0

    def at(self, time: float, callback: Callable[..., None], *arguments: Any) -> None:
        """Call back at this time, or now if it has passed."""
        self._serial += 1
        now = self.now
        heapq.heappush(self._heap, (time if time > now else now, self._serial, callback, arguments))

    def after(self, delay: float, callback: Callable[..., None], *arguments: Any) -> None:
        """Call back this many seconds from now."""
        self._serial += 1
        heapq.heappush(self._heap, (self.now + delay, self._serial, callback, arguments))

    def run(self, until: float = float("inf"), at_most: int | None = None) -> bool:
        """Run until nothing is left, or the next callback lies beyond ``until``, or it is stopped.

        Args:
            at_most: so many callbacks, and then return for the while.

        Returns:
            Whether there is more to run (False when ``until`` ends it).
        """
        heap, pop = self._heap, heapq.heappop
        left = at_most if at_most is not None else -1
        while heap and heap[0][0] <= until and not self.stopped:
            if left == 0:
                return True
            left -= 1
            self.now, _, callback, arguments = pop(heap)
            self.events += 1
            callback(*arguments)
        if until < float("inf") and not self.stopped:
            self.now = max(self.now, until)
        return False
