"""Who sleeps on a stage. Calls of the stage that may take long are made in threads."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from lab.script import Do, told
from lab.stages import Sleep, Stage
from p2ptrain.base.errors import DeviceError


@dataclass(slots=True)
class Suspends:
    """Everybody who is asleep, by name, each with its host."""

    stage: Stage
    _held: dict[str, tuple[str, Sleep]] = field(default_factory=dict)

    def __contains__(self, who: str) -> bool:
        return who in self._held

    async def begin(self, who: str, host: str, pid: int) -> None:
        """It falls asleep, its line too. Raises DeviceError where it stays awake."""
        self._held[who] = host, await asyncio.to_thread(self.stage.nap, who, pid)
        self.stage.sleeps(host, True)

    async def end(self, who: str) -> None:
        """It wakes. Raises DeviceError where it sleeps on."""
        host, nap = self._held[who]
        await asyncio.to_thread(nap.end)
        del self._held[who]
        self.stage.sleeps(host, False)

    async def forget(self, who: str) -> None:
        """It was killed: nobody is there to wake, and its line is another's now."""
        if who in self._held:
            host, nap = self._held.pop(who)
            with contextlib.suppress(DeviceError):
                await asyncio.to_thread(nap.end)
            self.stage.sleeps(host, False)

    async def end_all(self) -> list[str]:
        """Everybody wakes; returns who does not, and why."""
        failed = []
        for who in list(self._held):
            try:
                await self.end(who)
            except DeviceError as error:
                failed.append(f"{told(who, Do.THAW)} at the end: {error.problem.rstrip('.')}")
        return failed
