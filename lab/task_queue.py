"""What takes a while is done beside everything else, and in order where it concerns the same: one turn after the other.

Who closes what: whoever gives turns waits until they are ``over``, or cancels them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class TaskQueue:
    """Work by the key of what it concerns."""

    _last: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def give(self, key: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do this as soon as all that was given for the same key is done. Behind what fails, nothing is done."""
        self._last[key] = asyncio.ensure_future(_done_after(self._last.get(key), work))

    def check(self) -> None:
        """Raise what the work of a turn that is over raised, if so."""
        for key, task in list(self._last.items()):
            if task.done():
                del self._last[key]
                task.result()

    async def over(self) -> None:
        """Wait until all is done. Raises what any of it raises."""
        while self._last:
            await asyncio.wait(self._last.values())
            self.check()

    async def cancel(self) -> None:
        """End it. What runs in a thread goes on there, and nobody waits for it."""
        tasks = list(self._last.values())
        self._last.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _done_after(before: asyncio.Task[None] | None, work: Callable[[], Awaitable[None]]) -> None:
    if before is not None:
        await before
    await work()
