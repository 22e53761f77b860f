"""Caps on what a peer sends and receives: one line a direction, shared by all its streams.

A line is a queue of bytes that leave at the cap's rate. Whoever has bytes to move books them and learns how long to
wait for its turn; turns come in the order of booking, and are short (``PIECE_BYTES``), so streams share a line evenly.
After a pause up to ``BURST_S`` seconds' worth may go at once. Small frames (``SMALL_BYTES``) and the DHT's questions
and answers are booked and never wait: an answer that comes late costs more than the few bytes that it is early. The DHT
gets half of a cap so; who asks for more asks in vain. Booking is also how bytes are counted, cap or no cap.

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
"""Frames up to so many never wait: .13 s at the lowest cap. An offer with its terms has 1 kB; a manifest, or what the
author ruled, may have sixty."""

UNWAITED_SHARE = 0.5
"""Of a cap, for what never waits its turn. A guess: other streams keep the other half."""
UNWAITED_S = 10.0
"""So much of that share may pass at once: at the lowest cap 156 kB, eight answers of the DHT. A guess."""

BURST_S = 0.5
"""A guess: a burst this short is lost in what routers buffer."""


class Line:
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
        self._unwaited = 0.0
        self._unwaited_at = clock()
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

    def book_unwaited(self, size_bytes: int) -> None:
        """Count bytes that move at once, whoever waits for a turn. They put off nobody's turn, and nobody is refused
        for longer than ``UNWAITED_S`` after the last of them: strangers would see to it that it were hours."""
        self.total_bytes += size_bytes
        self._unwaited = min(self._unwaited_now() + size_bytes, 2 * self._most_unwaited)

    @property
    def is_flooded(self) -> bool:
        """More moved at once than the cap allows for: what comes next should be left."""
        return self._unwaited_now() > self._most_unwaited

    @property
    def _most_unwaited(self) -> float:
        return UNWAITED_S * UNWAITED_SHARE * self.rate

    def _unwaited_now(self) -> float:
        """Bytes beyond their share of the cap: they leave at that share's rate."""
        now, rate = self._clock(), self.rate
        left = 0.0 if rate == inf else self._unwaited - (now - self._unwaited_at) * UNWAITED_SHARE * rate
        self._unwaited, self._unwaited_at = max(left, 0.0), now
        return self._unwaited

    async def wait(self, seconds: float) -> None:
        """Let what ``book`` said pass."""
        if seconds > 0:
            await self._sleep(seconds)

    def pieces(self, view: memoryview) -> Iterator[memoryview]:
        """In how many pieces to move these bytes: one where nothing caps them."""
        whole = max(len(view), 1)
        step = PIECE_BYTES if self.rate < inf else whole
        return (view[start : start + step] for start in range(0, whole, step))


class Rates:
    """Both lines of one peer. Every stream of all its transports goes through them."""

    def __init__(
        self, clock: Clock = time.monotonic, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self.up = Line(clock, sleep)
        self.down = Line(clock, sleep)
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
