"""Throttles: caps on a peer's traffic, one per direction, shared by all its streams.

A throttle is a queue of bytes that leave at the cap's rate. A stream books bytes and receives the time to wait; turns
come in the order of booking and are short (``PIECE_BYTES``), so streams share the cap evenly. After a pause up to
``BURST_S`` seconds' worth of bytes may move at once. Small frames (``SMALL_BYTES``) and the DHT's traffic are booked
but do not wait, because a delayed response costs more than a few early bytes. Each of these two kinds may use half of
the cap so; small frames beyond it wait, and DHT requests beyond it are not answered. Booking also counts the bytes,
with or without a cap.

A cap may change at any time, from any thread; bytes in the queue then leave at the new rate.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from math import inf

from p2ptrain.ports import Clock

PIECE_BYTES = 16 << 10
"""Bytes per turn. At the lowest cap (``MIN_RATE``) each of six streams moves a piece every 3 s, well within the 20 s
of silence after which a partner closes a stream."""

MBIT = 125_000.0
"""Bytes per megabit."""

MIN_RATE = MBIT / 4
"""Lowest cap in bytes per second. Six streams (four exchanges, a newcomer, a manifest) then have 5 kB/s
each; the other side closes a stream below 4 kB/s."""

SMALL_BYTES = 4 << 10
"""Largest small frame, .13 s at the lowest cap. An offer with its terms has 1 kB; a manifest or an access list may have
60 kB."""

UNWAITED_SHARE = 0.5
"""Share of a cap for small frames, which delay other bytes, and as much for the DHT, whose bytes do not. Guess:
exchange times under a flood at the lowest cap would settle it."""
UNWAITED_S = 10.0
"""Seconds' worth of that share that may move at once: at the lowest cap 156 kB, eight responses of the DHT or the small
frames of some thirty exchanges. Guess: the burst sizes of a real peer would settle it."""

BURST_S = 0.5
"""Seconds' worth of a cap that may move at once after a pause. Guess: a router's delay under such bursts would settle
it."""


class Throttle:
    """Throttle of one direction, for one event loop. ``book`` has no side effect outside the object."""

    def __init__(self, clock: Clock, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self.rate = inf
        """Cap in bytes per second; infinity: none. Any thread may write it."""
        self.total_bytes = 0
        """Bytes booked since the start. Any thread may read it."""
        self._clock = clock
        self._sleep = sleep
        self._free_at = -inf
        """Time at which all booked bytes have left."""
        self._unwaited, self._small = _UnwaitedShare(clock), _UnwaitedShare(clock)
        """Shares of the DHT and of small frames."""
        self._rate_then = inf
        """Rate for which ``_free_at`` was computed."""

    def book(self, size_bytes: int) -> float:
        """Book bytes; return the seconds until they may move."""
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
        """Book a small frame; return 0 while such frames keep to their share, else the seconds to wait.

        The bound protects other bytes from a flood of small frames: the delay is at most ``UNWAITED_S`` times the
        share, and the rest of the cap remains.
        """
        wait_s = self.book(size_bytes)
        if self._small.left(self.rate) < size_bytes:
            return wait_s
        self._small.take(size_bytes, self.rate)
        return 0.0

    def book_unwaited(self, size_bytes: int) -> None:
        """Count bytes of the DHT, which move at once and delay no other bytes.

        ``is_flooded`` ends at most ``UNWAITED_S`` after the last of them, so that a flood cannot block the DHT for
        hours.
        """
        self.total_bytes += size_bytes
        self._unwaited.take(size_bytes, self.rate)

    @property
    def is_flooded(self) -> bool:
        """True if the DHT has used more than its share; further requests should be dropped."""
        return self._unwaited.left(self.rate) < 0

    async def wait(self, seconds: float, booked_bytes: int = 0) -> None:
        """Wait as ``book`` said. If the wait is cancelled, the bytes are taken back, so that no other stream waits for
        them."""
        if seconds > 0:
            try:
                await self._sleep(seconds)
            except asyncio.CancelledError:
                self.take_back(booked_bytes)
                raise

    def take_back(self, size_bytes: int) -> None:
        """Remove booked bytes that will not move."""
        self.total_bytes -= size_bytes
        self._free_at -= size_bytes / self._rate_then

    def pieces(self, view: memoryview) -> Iterator[memoryview]:
        """Split a buffer into pieces of one turn each; a single piece without a cap."""
        whole = max(len(view), 1)
        step = PIECE_BYTES if self.rate < inf else whole
        return (view[start : start + step] for start in range(0, whole, step))


class _UnwaitedShare:
    """Share of a cap for bytes that do not wait: a token bucket of ``UNWAITED_S`` seconds' worth."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._taken = 0.0
        """Bytes taken and not yet paid off at the share's rate."""
        self._at = clock()

    def left(self, rate: float) -> float:
        """Return the bytes that may still move; negative if too many did."""
        now = self._clock()
        taken = 0.0 if rate == inf else self._taken - (now - self._at) * UNWAITED_SHARE * rate
        self._taken, self._at = max(taken, 0.0), now
        return UNWAITED_S * UNWAITED_SHARE * rate - self._taken

    def take(self, size_bytes: int, rate: float) -> None:
        """Count bytes that moved, within the share or not. An excess counts for at most ``UNWAITED_S``."""
        self.left(rate)
        self._taken = min(self._taken + size_bytes, 2 * UNWAITED_S * UNWAITED_SHARE * rate)


class Throttles:
    """Throttles of one peer, one per direction; every stream of all its transports uses them."""

    def __init__(
        self, clock: Clock = time.monotonic, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self.up = Throttle(clock, sleep)
        self.down = Throttle(clock, sleep)
        self.gives = True
        """True while this peer serves weights and circuits to others; False while it rests or others have used
        their share of the monthly budget. Any thread may write it."""
        self.rests = False
        """True while the owner pauses this peer or its monthly budget is used up. Any thread may write it."""
        self.given_bytes = 0
        """Bytes moved for others' benefit since the start, both ways. Any thread may read it."""

    def give(self, size_bytes: int) -> None:
        """Count bytes that are already booked as moved for others' benefit."""
        self.given_bytes += size_bytes
