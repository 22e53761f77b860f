"""Access lines that are shared fairly among the payloads that cross them.

Each host has two pipes, up and down. A transfer crosses its sender's up pipe and its receiver's down pipe; nothing in
between limits it. Transfers get max-min fair rates (Bertsekas and Gallager, Data Networks, section 6.5.2), which long
TCP connections approach: a transfer's rate is limited by one full pipe, its bottleneck, and no other transfer in that
pipe is faster.

Rates change only when a transfer begins or ends or a pipe's capacity changes. Only affected pipes are recomputed,
beginning with the pipes that changed, until every transfer whose rate moved has both its pipes among them. If uplinks
are narrower than downlinks, that is nearly always one pipe, whatever the size of the swarm.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from sim.world import World

Action = tuple[Callable[..., None], tuple[Any, ...]]

SAME = 1e-9
"""Relative difference below which two rates are equal up to the order of additions."""

AT_ONCE_S = 0.02
"""Longest time on an empty line for which a transfer is treated like a message, with the latency alone: sharing a line
does not matter for it."""


class Pipe:
    """One direction of one host's access line."""

    __slots__ = ("capacity", "limits", "transfers")

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        """Bytes per second; may be infinite, and 0 while the host is frozen."""
        self.limits = 0
        """Number of transfers whose bottleneck this pipe is."""
        self.transfers: dict[int, Transfer] = {}


class Transfer:
    """A transfer of bytes from one host to another."""

    __slots__ = ("action", "alarm", "bottleneck", "down", "due", "left", "rate", "serial", "since", "size", "up")

    def __init__(self, serial: int, up: Pipe, down: Pipe, size: float, now: float, action: Action) -> None:
        self.serial = serial
        self.up = up
        self.down = down
        self.size = size
        self.left = size
        """Bytes still to be sent at ``since``."""
        self.rate = 0.0
        self.since = now
        self.bottleneck: Pipe | None = None
        self.due = inf
        """Time at which it ends at the current rate."""
        self.alarm = inf
        """Time of the next check; not after ``due``."""
        self.action = action

    def moved(self, now: float) -> float:
        """Return the bytes sent so far."""
        return self.size - max(self.left - self.rate * (now - self.since), 0.0)


class Transfers:
    """All transfers under way and their rates."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._serial = 0

    def start(self, up: Pipe, down: Pipe, size: float, action: Callable[..., None], *arguments: Any) -> Transfer | None:
        """Send ``size`` bytes, then call ``action(*arguments)``. Small transfers end at once and return None."""
        if size <= AT_ONCE_S * min(up.capacity, down.capacity):
            action(*arguments)
            return None
        self._serial += 1
        transfer = Transfer(self._serial, up, down, size, self._world.now, (action, arguments))
        up.transfers[transfer.serial] = transfer
        down.transfers[transfer.serial] = transfer
        self._fill(up, down)
        return transfer

    def stop(self, transfer: Transfer) -> float:
        """Abort a transfer, or do nothing if it has ended; return the bytes it moved."""
        moved = transfer.moved(self._world.now)
        if transfer.up.transfers.pop(transfer.serial, None) is not None:
            del transfer.down.transfers[transfer.serial]
            transfer.left, transfer.rate, transfer.size = 0.0, 0.0, moved
            transfer.due = transfer.alarm = inf
            self._limit(transfer, None)
            self._fill(transfer.up, transfer.down)
        return moved

    def resize(self, pipe: Pipe, capacity: float) -> None:
        pipe.capacity = capacity
        region = {pipe: None}
        for transfer in pipe.transfers.values():
            region[transfer.up] = region[transfer.down] = None
        self._fill_region(region)

    # --- rates ------------------------------------------------------------------------------------------------------

    def _fill(self, up: Pipe, down: Pipe) -> None:
        """Update the rates after a transfer between these two pipes began or ended."""
        if not self._share_up(up, down):
            self._fill_region({up: None, down: None})

    def _share_up(self, up: Pipe, down: Pipe) -> bool:
        """Handle the usual case quickly: ``up`` stays the bottleneck of all its transfers. Return False otherwise."""
        transfers = up.transfers.values()
        if down.limits or up.capacity == inf:
            return False
        rate = up.capacity / len(transfers) if transfers else 0.0
        for transfer in transfers:
            if transfer.bottleneck is not up and transfer.bottleneck is not None:
                return False
            other = transfer.down
            if other.limits or other.capacity < sum(rate if t.up is up else t.rate for t in other.transfers.values()):
                return False
        for transfer in transfers:
            self._limit(transfer, up)
            self._change(transfer, rate)
        return True

    def _fill_region(self, region: dict[Pipe, None]) -> None:
        """Give fair rates to the transfers in these pipes and in all affected pipes."""
        while True:
            rates = _fair_rates(region)
            before = len(region)
            for transfer, (rate, _) in rates.items():
                if not _same(rate, transfer.rate):
                    for pipe in (transfer.up, transfer.down):
                        if pipe not in region and _notices(pipe, rates):
                            region[pipe] = None
            if len(region) == before:
                break
        for transfer, (rate, bottleneck) in rates.items():
            self._limit(transfer, bottleneck)
            if not _same(rate, transfer.rate):
                self._change(transfer, rate)

    @staticmethod
    def _limit(transfer: Transfer, bottleneck: Pipe | None) -> None:
        if transfer.bottleneck is not bottleneck:
            if transfer.bottleneck is not None:
                transfer.bottleneck.limits -= 1
            if bottleneck is not None:
                bottleneck.limits += 1
            transfer.bottleneck = bottleneck

    def _change(self, transfer: Transfer, rate: float) -> None:
        now = self._world.now
        transfer.left = max(transfer.left - transfer.rate * (now - transfer.since), 0.0)
        transfer.rate, transfer.since = rate, now
        transfer.due = now + transfer.left / rate if rate > 0 else inf
        if transfer.due < transfer.alarm:
            transfer.alarm = transfer.due
            self._world.at(transfer.due, self._look, transfer, transfer.due)

    def _look(self, transfer: Transfer, alarm: float) -> None:
        """Handle an alarm: the transfer ends, or has become slower since the alarm was set."""
        if alarm != transfer.alarm:
            return
        if transfer.due > alarm:
            transfer.alarm = transfer.due
            if transfer.due < inf:
                self._world.at(transfer.due, self._look, transfer, transfer.due)
            return
        action, arguments = transfer.action
        transfer.left, transfer.rate = 0.0, 0.0
        self.stop(transfer)
        action(*arguments)


def _same(one: float, other: float) -> bool:
    return one == other or abs(one - other) < SAME * max(one, other)


def _notices(pipe: Pipe, rates: dict[Transfer, tuple[float, Pipe | None]]) -> bool:
    """Return whether the new rates can change other rates in this pipe: it is full, or would be."""
    if pipe.limits:
        return True
    used = sum(rates[each][0] if each in rates else each.rate for each in pipe.transfers.values())
    return used > pipe.capacity


def _fair_rates(region: dict[Pipe, None]) -> dict[Transfer, tuple[float, Pipe | None]]:
    """Compute the max-min fair rates of all transfers in these pipes, each with its bottleneck, by progressive filling.

    A transfer whose bottleneck lies outside the region keeps at most its current rate.
    """
    rates: dict[Transfer, tuple[float, Pipe | None]] = {}
    room: dict[Pipe, float] = {}
    waiting: dict[Pipe, dict[int, Transfer]] = {}
    capped: list[tuple[float, int, Transfer]] = []
    for pipe in region:
        if pipe.capacity == inf:
            rates.update(
                (each, (inf, None)) for each in pipe.transfers.values() if each.up.capacity == each.down.capacity
            )
            continue
        room[pipe] = pipe.capacity
        waiting[pipe] = dict(pipe.transfers)
        for transfer in pipe.transfers.values():
            outside = transfer.bottleneck
            if outside is not None and outside not in region:
                capped.append((transfer.rate, transfer.serial, transfer))
    capped.sort(reverse=True, key=lambda entry: entry[:2])

    def settle(transfer: Transfer, rate: float, bottleneck: Pipe | None) -> None:
        rates[transfer] = rate, bottleneck
        for pipe in (transfer.up, transfer.down):
            if pipe in room and waiting[pipe].pop(transfer.serial, None) is not None:
                room[pipe] = max(room[pipe] - rate, 0.0)

    while True:
        level, narrowest = inf, None
        for pipe, transfers in waiting.items():
            if transfers and (share := room[pipe] / len(transfers)) < level:
                level, narrowest = share, pipe
        while capped and capped[-1][2] in rates:
            capped.pop()
        if capped and capped[-1][0] <= level:
            rate, _, transfer = capped.pop()
            settle(transfer, rate, transfer.bottleneck)
        elif narrowest is not None:
            for transfer in list(waiting[narrowest].values()):
                settle(transfer, level, narrowest)
        else:
            return rates
