"""Caps on what a peer sends and receives: one line a direction, shared by all its streams.

A line is a queue of bytes that leave at the cap's rate. Whoever has bytes to move books them and learns how long to
wait for its turn; turns come in the order of booking, and are short (``PIECE_BYTES``), so streams share a line evenly.
After a pause up to ``BURST_S`` seconds' worth may go at once. Small frames (``SMALL_BYTES``) and the DHT's questions
and answers are booked and do not wait: an answer that comes late costs more than the few bytes that it is early. Each
of both gets half of a cap so; small frames beyond it wait like all else, and whoever asks the DHT for more asks in
vain. Booking is also how bytes are counted, cap or no cap.

A cap may change at any moment, from any thread; what is booked and has not left then leaves at the new rate.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from math import inf

from p2ptrain.ports import Clock

PIECE_BYTES = 16 << 10
"""At the lowest cap (``LOWEST_RATE``) with six streams at once, a piece of each stream passes every 3 s: well within
the 20 s of silence after which a partner gives a stream up."""

LOWEST_RATE = 31_250.0
"""Bytes per second, a quarter of a megabit: the least that a cap may be. Six streams (four exchanges, a newcomer, a
manifest) then have 5 kB/s each, and a stream below 4 kB/s counts as dead on the other side."""

SMALL_BYTES = 4 << 10
"""Frames up to so many are small: .13 s at the lowest cap. An offer with its terms has 1 kB; a manifest, or what the
author ruled, may have sixty."""

UNWAITED_SHARE = 0.5
"""Of a cap, for what does not wait its turn: small frames, whose bytes others wait for, and as much for the DHT, whose
bytes nobody does. A guess: other streams keep the other half."""
UNWAITED_S = 10.0
"""So much of that share may pass at once: at the lowest cap 156 kB, eight answers of the DHT, or the small frames of
some thirty exchanges. A guess."""

BURST_S = 0.5
"""A guess: a burst this short is lost in what routers buffer."""


class Throttle:
    """One direction. ``book`` is pure but for the clock. Used by one event loop."""

    def __init__(self, clock: Clock, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self.rate = inf
        """Bytes per second; infinity: no cap. May be written from any thread."""
        self.total_bytes = 0
        """Booked since the start. May be read from any thread."""
        self._clock = clock
        self._sleep = sleep
        self._free_at = -inf
        """When all that is booked has left."""
        self._unwaited, self._small = _UnwaitedShare(clock), _UnwaitedShare(clock)
        """The DHT's, and that of small frames."""
        self._rate_then = inf
        """The rate by which ``_free_at`` was reckoned."""

    def book(self, size_bytes: int) -> float:
        """Seconds until these bytes may move."""
        now, rate = self._clock(), self.rate
        if rate != self._rate_then:
            if (left_s := self._free_at - now) > 0:
                self._free_at = now + left_s * self._rate_then / rate
            self._rate_then = rate
        self.total_bytes += size_bytes
        start = max(self._free_at, now - BURST_S)
        self._free_at = start + size_bytes / rate
        return max(start - now, 0.0)

    def book_small(self, size_bytes: int) -> float:
        """The same for a small frame: at once, while such frames keep to their share. So they put off others' turns by
        ``UNWAITED_S`` times that share, and then leave them the rest of the line: strangers would see to it that it
        were hours. What is beyond it waits, as much at a time as there are streams."""
        wait_s = self.book(size_bytes)
        if self._small.left(self.rate) < size_bytes:
            return wait_s
        self._small.take(size_bytes, self.rate)
        return 0.0

    def book_unwaited(self, size_bytes: int) -> None:
        """Count bytes that move at once, whoever waits for a turn. They put off nobody's turn, and nobody is refused
        for longer than ``UNWAITED_S`` after the last of them: strangers would see to it that it were hours."""
        self.total_bytes += size_bytes
        self._unwaited.take(size_bytes, self.rate)

    @property
    def is_flooded(self) -> bool:
        """More moved at once than the cap allows for: what comes next should be left."""
        return self._unwaited.left(self.rate) < 0

    async def wait(self, seconds: float, booked_bytes: int = 0) -> None:
        """Let what ``book`` said pass. Of whoever is cancelled meanwhile these bytes never move, and nobody waits for
        them."""
        if seconds > 0:
            try:
                await self._sleep(seconds)
            except asyncio.CancelledError:
                self.take_back(booked_bytes)
                raise

    def take_back(self, size_bytes: int) -> None:
        """These bytes were booked and do not move."""
        self.total_bytes -= size_bytes
        self._free_at -= size_bytes / self._rate_then

    def pieces(self, view: memoryview) -> Iterator[memoryview]:
        """In how many pieces to move these bytes: one where nothing caps them."""
        whole = max(len(view), 1)
        step = PIECE_BYTES if self.rate < inf else whole
        return (view[start : start + step] for start in range(0, whole, step))


class _UnwaitedShare:
    """What moves without waiting: ``UNWAITED_S`` seconds' worth of a share of the cap, and then as much as leaves."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._taken = 0.0
        """Bytes that have not left. They leave at the share's rate."""
        self._at = clock()

    def left(self, rate: float) -> float:
        """Bytes that may move yet; less than none: too many did."""
        now = self._clock()
        taken = 0.0 if rate == inf else self._taken - (now - self._at) * UNWAITED_SHARE * rate
        self._taken, self._at = max(taken, 0.0), now
        return UNWAITED_S * UNWAITED_SHARE * rate - self._taken

    def take(self, size_bytes: int, rate: float) -> None:
        """They moved, whether they might or not. What they are too many counts for ``UNWAITED_S`` and no longer."""
        self.left(rate)
        self._taken = min(self._taken + size_bytes, 2 * UNWAITED_S * UNWAITED_SHARE * rate)


class Throttles:
    """Both lines of one peer. Every stream of all its transports goes through them."""

    def __init__(
        self, clock: Clock = time.monotonic, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self.up = Throttle(clock, sleep)
        self.down = Throttle(clock, sleep)
        self.gives = True
        """Whether others get bytes for their own sake: weights, circuits, samples. Not while this peer rests, nor while
        others have had their share of its month. May be written from any thread."""
        self.rests = False
        """The owner lets this peer rest, or its month is used up. May be written from any thread."""
        self.given_bytes = 0
        """Moved for others' own sake since the start, both ways. May be read from any thread."""

    def give(self, size_bytes: int) -> None:
        """Count bytes, booked already, as moved for others' own sake."""
        self.given_bytes += size_bytes
