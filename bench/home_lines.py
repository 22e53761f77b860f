"""Simulated lines of homes on a virtual clock: transfers share each direction equally, and there are no packets."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

MBIT = 1e6 / 8
"""Bytes per second of 1 Mbit/s."""


class HomeLine:
    """One node's line."""

    def __init__(self, down_mbit_s: float, up_mbit_s: float) -> None:
        self.down, self.up = down_mbit_s * MBIT, up_mbit_s * MBIT
        self.incoming: set[LineTransfer] = set()
        self.outgoing: set[LineTransfer] = set()
        self.sent_bytes = 0.0


@dataclass(eq=False, slots=True)
class LineTransfer:
    """Bytes on their way from one line to another."""

    sender: HomeLine
    receiver: HomeLine
    done: Callable[[], None]
    left_bytes: float
    bytes_per_s: float = 0.0
    since: float = 0.0
    version: int = 0


class LineWorld:
    """Virtual clock, and the lines' transfers."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), call))

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now, _, call = heapq.heappop(self._events)
            call()
        self.now = until_s

    def send(self, transfer: LineTransfer) -> None:
        transfer.since = self.now
        transfer.sender.outgoing.add(transfer)
        transfer.receiver.incoming.add(transfer)
        self._share(transfer.sender, transfer.receiver)

    def end(self, transfer: LineTransfer) -> None:
        """Take a transfer off its lines, whole or not."""
        self.settle(transfer)
        transfer.version += 1
        transfer.sender.outgoing.discard(transfer)
        transfer.receiver.incoming.discard(transfer)
        self._share(transfer.sender, transfer.receiver)

    def settle(self, transfer: LineTransfer) -> None:
        """Count what a transfer has carried until now."""
        moved = min(transfer.bytes_per_s * (self.now - transfer.since), transfer.left_bytes)
        transfer.left_bytes -= moved
        transfer.sender.sent_bytes += moved
        transfer.since = self.now

    def _share(self, sender: HomeLine, receiver: HomeLine) -> None:
        for transfer in sender.outgoing | receiver.incoming:
            up = transfer.sender.up / len(transfer.sender.outgoing)
            down = transfer.receiver.down / len(transfer.receiver.incoming)
            self.settle(transfer)
            transfer.bytes_per_s = min(up, down)
            transfer.version += 1
            self.after(transfer.left_bytes / transfer.bytes_per_s, self._ending(transfer, transfer.version))

    def _ending(self, transfer: LineTransfer, version: int) -> Callable[[], None]:
        def end() -> None:
            if transfer.version == version:
                transfer.left_bytes, transfer.sender.sent_bytes = 0.0, transfer.sender.sent_bytes + transfer.left_bytes
                self.end(transfer)
                transfer.done()

        return end
