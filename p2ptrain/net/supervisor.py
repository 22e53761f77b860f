"""Supervision of p2pd: a node that is replaced, with all services on it, whenever its p2pd dies or hangs.

Resources: ``close`` closes the services and the node; cancel ``run`` first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from p2ptrain.base.backoff import backoff
from p2ptrain.base.errors import DeviceError, NetworkError
from p2ptrain.base.logging_setup import reporting
from p2ptrain.net.node import Node

STABLE_S = 300.0
"""Uptime of p2pd in seconds that resets the restart backoff. Guess: the distribution of p2pd's uptimes before
crashes."""
RESTART_S = (1.0, 60.0)
"""First and longest backoff in seconds before p2pd is restarted. Guess: how often an immediate restart fails."""

_report = reporting("the closing of a service")


class Service(Protocol):
    async def close(self) -> None: ...


class NodeSupervisor:
    """Keeper of a process's current node. A node that is replaced on purpose is followed by another at once.

    Args:
        start: starts a node.
        equip: starts the services of a new node and adds them to ``services``.
        attend: runs while p2pd does; ``Node.died`` does nothing else. Returns True if the node is to be replaced on
            purpose, and anything else if p2pd has ended.
        on_death: called with why p2pd died or did not start, and the seconds until the next try.
        on_return: called when another node is equipped.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[Node]],
        equip: Callable[[Node], Awaitable[None]],
        attend: Callable[[Node], Awaitable[object]],
        on_death: Callable[[str, float], None],
        on_return: Callable[[], None],
    ) -> None:
        self._start = start
        self._equip = equip
        self._attend = attend
        self._on_death = on_death
        self._on_return = on_return
        self.current: Node | None = None
        """The current node; None before the first and between two."""
        self.services: list[Service] = []
        """Services of the current node, which end with it."""

    @property
    def node(self) -> Node:
        """The current node. Raises NetworkError while there is none."""
        if self.current is None:
            raise NetworkError("p2pd is being restarted")
        return self.current

    async def start(self) -> None:
        """Start and equip the first node. Raises UserError; DeviceError if p2pd does not run on this machine."""
        try:
            await self._start_one()
        except (NetworkError, OSError, EOFError) as error:  # OSError, EOFError: p2pd died while it started
            raise DeviceError(
                f"The network daemon p2pd does not work: {error}.",
                "Run p2ptrain doctor; reinstall hivemind if that fails too.",
            ) from error

    async def run(self) -> None:
        """Attend the node, and replace it whenever its p2pd dies, until cancelled. Raises what ``attend`` raises."""
        loop, pauses_s = asyncio.get_running_loop(), backoff(*RESTART_S)
        while True:
            started_at = loop.time()
            is_on_purpose = await self._attend(self.node) is True
            if loop.time() - started_at > STABLE_S:
                pauses_s = backoff(*RESTART_S)
            if is_on_purpose:
                await self.close()
                why = await self._try_to_start()
            else:
                why = self.node.daemon.ending
            if not why:
                continue
            while why:
                pause_s = next(pauses_s)
                self._on_death(why, pause_s)
                await self.close()
                await asyncio.sleep(pause_s)
                why = await self._try_to_start()
            self._on_return()

    async def close(self) -> None:
        """Close the services and the node."""
        services, node = self.services, self.current
        self.services, self.current = [], None
        try:
            closing = [asyncio.create_task(each.close()) for each in services]
            for each in closing:
                each.add_done_callback(_report)
            await asyncio.gather(*closing, return_exceptions=True)
        finally:  # p2pd must end even if the closing is cancelled
            if node is not None:
                await node.close()

    async def _try_to_start(self) -> str:
        """Start another node; return why it failed, or an empty string."""
        try:
            await self._start_one()
        except Exception as error:  # any error, ours or hivemind's, only delays the next try
            return str(error) or type(error).__name__
        return ""

    async def _start_one(self) -> None:
        self.current = await self._start()
        await self._equip(self.current)
