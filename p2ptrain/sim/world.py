"""The virtual world: a heap of things to come and a clock that jumps to the next one."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class World:
    """Runs callbacks in the order of their times; equal times in the order they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        """Callbacks run so far."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0

    def at(self, time: float, callback: Callable[..., None], *arguments: Any) -> None:
        """Call back at this time, or now if it has passed."""
        self._serial += 1
        heapq.heappush(self._heap, (max(time, self.now), self._serial, callback, arguments))

    def after(self, delay: float, callback: Callable[..., None], *arguments: Any) -> None:
        """Call back this many seconds from now."""
        self.at(self.now + delay, callback, *arguments)

    def run(self, until: float = float("inf")) -> None:
        """Run until nothing is left or the next callback lies beyond ``until``."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, callback, arguments = heapq.heappop(self._heap)
            self.events += 1
            callback(*arguments)
        if until < float("inf"):
            self.now = max(self.now, until)
