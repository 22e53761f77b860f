"""Rate limits on what strangers ask for: token buckets and sliding windows. Pure; memory is bounded.

The cost of one conversation is bounded elsewhere (``links.Limits``, ``payload.due_s``, the core's deadlines).
A flood of short conversations costs a stream, a task and a response each, and would displace honest peers' ones; it is
rejected before any byte of it is read.
"""

from __future__ import annotations

import ipaddress
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from p2ptrain.net import address

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class RateLimit:
    """Capacity of a token bucket, and tokens added per second."""

    burst: float
    per_s: float


PER_PEER = RateLimit(burst=60.0, per_s=4.0)
"""Conversations of one peer. An honest peer keeps to ``rules.MAX_CALLS`` and ``CALLS_PER_S``, besides planned
exchanges and requests when it joins. Guess: honest peers' conversations in a large swarm would settle it."""

OVERALL = RateLimit(burst=400.0, per_s=100.0)
"""Conversations of all peers. A declining response takes .1 ms of a core (bench couple). Guess: a training peer's
slowdown under a flood would settle it."""

PER_ORIGIN = RateLimit(burst=OVERALL.burst / 2, per_s=OVERALL.per_s / 2)
"""Conversations from one IP address or through one relay: half, since peer ids cost nothing. Guess: peers per origin in
a real swarm would settle it."""

MAX_REMEMBERED = 1024
"""Most buckets kept, the latest; beyond that only the overall limit bounds the peers."""


class TokenBucket:
    """Token bucket, full at first."""

    __slots__ = ("_allowance", "_at", "_left")

    def __init__(self, allowance: RateLimit, now: float) -> None:
        self._allowance = allowance
        self._left = allowance.burst
        self._at = now

    def take(self, now: float, tokens: float = 1.0) -> bool:
        """Take so many tokens if the bucket has them; return whether it had."""
        self._fill(now)
        if self._left < tokens:
            return False
        self._left -= tokens
        return True

    def is_full(self, now: float) -> bool:
        """Return whether the bucket is full, like a new one."""
        self._fill(now)
        return self._left >= self._allowance.burst

    def _fill(self, now: float) -> None:
        gained = max(now - self._at, 0.0) * self._allowance.per_s
        self._left = min(self._left + gained, self._allowance.burst)
        self._at = max(self._at, now)


class RateLimiter(Generic[Key]):
    """Token bucket for each key, and one for all keys."""

    def __init__(self, each: RateLimit = PER_PEER, overall: RateLimit = OVERALL, most: int = MAX_REMEMBERED) -> None:
        self._each = each
        self._overall_allowance = overall
        self._overall: TokenBucket | None = None
        self._most = most
        self._buckets: dict[Key, TokenBucket] = {}  # ordered by last use

    def admits(self, who: Key, now: float, tokens: float = 1.0) -> bool:
        """Take tokens from the key's and the overall bucket; return whether both had them.

        A key above its own limit takes nothing from the overall bucket.
        """
        return self.admits_alone(who, now, tokens) and self.admits_anybody(now, tokens)

    def admits_alone(self, who: Key, now: float, tokens: float = 1.0) -> bool:
        """Take tokens from the key's bucket only."""
        bucket = self._buckets.pop(who, None) or TokenBucket(self._each, now)
        self._buckets[who] = bucket
        if len(self._buckets) > self._most:
            self._forget(now)
        return bucket.take(now, tokens)

    def admits_anybody(self, now: float, tokens: float = 1.0) -> bool:
        """Take tokens from the overall bucket only, for a key that is not known yet."""
        if self._overall is None:
            self._overall = TokenBucket(self._overall_allowance, now)
        return self._overall.take(now, tokens)

    def __len__(self) -> int:
        return len(self._buckets)

    def _forget(self, now: float) -> None:
        """Drop full buckets, which loses nothing; if none is full, the least recently used one."""
        full = [who for who, bucket in self._buckets.items() if bucket.is_full(now)]
        for who in full or [next(iter(self._buckets))]:
            del self._buckets[who]


class SlidingWindowLimit:
    """Limit of ``overall`` requests per window: at most ``each`` from one peer, and half from one origin.

    Peer ids cost nothing, but somebody with many of them has few origins.
    """

    def __init__(self, overall: int, each: int, window_s: float) -> None:
        self._overall = overall
        self._each = each
        self._from_one = overall // 2
        self._window_s = window_s
        self._taken: deque[tuple[float, str, str]] = deque()

    def take(self, who: str, now: float, where: str = "") -> bool:
        """Return whether a request is granted, and count it if so.

        Args:
            where: the request's origin; empty: no limit by origin, as on this machine.
        """
        while self._taken and self._taken[0][0] <= now - self._window_s:
            self._taken.popleft()
        if len(self._taken) >= self._overall or sum(asker == who for _, asker, _ in self._taken) >= self._each:
            return False
        if where and sum(origin == where for _, _, origin in self._taken) >= self._from_one:
            return False
        self._taken.append((now, who, where))
        return True


def origin(place: str) -> str:
    """Return the origin of a multiaddress: its IPv4 address, or its IPv6 /64, since one household has all of that."""
    host = address.ip_of(place)  # for an IPv4 address that is written as IPv6, the IPv4 address
    if host is not None and host.version == 6:
        return str(ipaddress.ip_network((int(host), 64), strict=False))
    return address.host_of(place) if host is None else str(host)
