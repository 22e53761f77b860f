"""How often a peer, and all peers together, may begin a conversation with us: token buckets. Pure; bounded.

What one conversation may cost is bounded elsewhere (``links.Limits``, ``payload.Pace``, the core's deadlines). A flood
of short ones costs a stream, a task and an answer each, and would starve honest callers of the few that are served at
once; who floods is turned down before a byte of it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class RateLimit:
    """What a bucket holds, and how fast it fills."""

    burst: float
    per_s: float


PER_PEER = RateLimit(burst=60.0, per_s=4.0)
"""Conversations of one peer. An honest one keeps to ``rules.MOST_CALLS`` and ``CALLS_PER_S``, beside what a round plans
with each partner and what it asks for when it joins: a guess with room for these."""

OVERALL = RateLimit(burst=400.0, per_s=100.0)
"""Of all peers together. An answer that declines takes .1 ms of a core (bench couple); a hundred a second are felt by
nobody. A guess."""

PER_ORIGIN = RateLimit(burst=OVERALL.burst / 2, per_s=OVERALL.per_s / 2)
"""Of all peers behind one IP address, or that one relay leads to us: names cost nothing. A guess: half."""

MOST_REMEMBERED = 1024
"""Buckets that are not full, of whom we heard last. More peers at once than that are the overall bucket's business."""


class TokenBucket:
    """One bucket of tokens, full at first."""

    __slots__ = ("_allowance", "_at", "_left")

    def __init__(self, allowance: RateLimit, now: float) -> None:
        self._allowance = allowance
        self._left = allowance.burst
        self._at = now

    def take(self, now: float, tokens: float = 1.0) -> bool:
        """Take so many if they are there."""
        self._fill(now)
        if self._left < tokens:
            return False
        self._left -= tokens
        return True

    def is_full(self, now: float) -> bool:
        """As good as a new one."""
        self._fill(now)
        return self._left >= self._allowance.burst

    def _fill(self, now: float) -> None:
        gained = max(now - self._at, 0.0) * self._allowance.per_s
        self._left = min(self._left + gained, self._allowance.burst)
        self._at = max(self._at, now)


class RateLimiter(Generic[Key]):
    """A bucket for each, and one for all of them."""

    def __init__(self, each: RateLimit = PER_PEER, overall: RateLimit = OVERALL, most: int = MOST_REMEMBERED) -> None:
        self._each = each
        self._overall_allowance = overall
        self._overall: TokenBucket | None = None
        self._most = most
        self._buckets: dict[Key, TokenBucket] = {}  # who was heard last comes last

    def admits(self, who: Key, now: float, tokens: float = 1.0) -> bool:
        """Whether one more may begin, that costs so much. Who is turned down for its own sake takes nothing from the
        others."""
        return self.admits_alone(who, now, tokens) and self.admits_anybody(now, tokens)

    def admits_alone(self, who: Key, now: float, tokens: float = 1.0) -> bool:
        """The same whatever the others do, and nothing of theirs is taken."""
        bucket = self._buckets.pop(who, None) or TokenBucket(self._each, now)
        self._buckets[who] = bucket
        if len(self._buckets) > self._most:
            self._forget(now)
        return bucket.take(now, tokens)

    def admits_anybody(self, now: float, tokens: float = 1.0) -> bool:
        """The same before it is known who it is."""
        if self._overall is None:
            self._overall = TokenBucket(self._overall_allowance, now)
        return self._overall.take(now, tokens)

    def __len__(self) -> int:
        return len(self._buckets)

    def _forget(self, now: float) -> None:
        """Drop those whose bucket is full: nothing is lost; and if that is nobody, who was not heard for longest."""
        full = [who for who, bucket in self._buckets.items() if bucket.is_full(now)]
        for who in full or [next(iter(self._buckets))]:
            del self._buckets[who]
