"""Presence buckets: DHT keys for presence records, which split as the swarm grows. Pure.

Each DHT key holds one bucket. Level k has 2^k buckets, and a hash of its id gives every peer one home per level; level
0, the root, is everybody's home. A peer works at the level d where a bucket holds about ``TARGET`` peers. In a swarm of
n peers, with x = n / 2^d between ``MERGE`` and ``SPLIT``:

===============  ==============================  =====================================
level            announced peers                 records in a bucket
===============  ==============================  =====================================
0 to d - 2       a random share, others soon     ``SAMPLE``, or all if they are fewer
d - 1, d, d + 1  all                             2x, x, x/2
deeper           none                            none
===============  ==============================  =====================================

So no key holds more than about ``SAMPLE`` records, all peers are found equally often, and peers whose levels differ by
one still find each other. A bucket's size tells the swarm's size and corrects the level. ``docs/PROTOCOL.md`` has the
rules of a lookup.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from math import log2, pow
from random import Random
from typing import NamedTuple

from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.swarm.rules import ANNOUNCE_PERIOD_S, PRESENCE_LIFETIME_S

TARGET = 64
"""Approximate records in a bucket; more than a peer can exchange with before its next lookup, and 20 kB per answer. The
constants below follow from it. Guess: measure lookup traffic and mixing with other sizes."""
SPLIT = 96
MERGE = 40
"""Bucket sizes at which a peer goes deeper, and below which it goes shallower. They differ by more than a factor of
two, so that every swarm size has a stable level, and lie evenly around ``TARGET``."""
SAMPLE = 224
"""Records in a bucket of the levels that only newcomers ask. At least 2 ``SPLIT``, otherwise level d - 1 would lack
some; and 3.5 ``TARGET``, so that despite chance the bucket looks two levels too full (from 2^1.5 = 2.8)."""
LOST = 10
"""Bucket size below which a bucket other than the root says nothing. With ``MERGE`` expected this happens once in
10^9."""
MAX_LEVEL = 16
"""Deepest level, for four million peers; beyond, buckets grow."""
MAX_GETS = 4
"""Maximum number of buckets per lookup: a newcomer to 10,000 peers asks levels 0, 2, 4 and 6. The next lookup continues
there."""
RENEWALS = PRESENCE_LIFETIME_S / ANNOUNCE_PERIOD_S
"""Announcements in a record's lifetime; the record exists if at least one of them was stored."""


class PresenceBucket(NamedTuple):
    """Peers whose hash ends in the ``level`` bits of ``number``."""

    level: int
    number: int


def home(run: RunId, peer: PeerId, level: int) -> PresenceBucket:
    """Return the only bucket of a level in which a peer's record may lie."""
    return PresenceBucket(level, _bits(run, peer) % 2**level)


@lru_cache(maxsize=65_536)
def _bits(run: RunId, peer: PeerId) -> int:
    return int.from_bytes(sha256(f"p2ptrain bucket {run} {peer}".encode()).digest()[:4])


def fitting_level(level: int, records: int) -> int:
    """Return the level to work at, given the size of a bucket of ``level``: unchanged within the bounds."""
    if not MERGE <= records < SPLIT:
        level += round(log2(max(records, 1) / TARGET))
    return min(max(level, 0), MAX_LEVEL)


class PresenceBuckets:
    """One peer's working level and choice of buckets. Small, and harmless to lose.

    Args:
        random: draws the bucket to ask, and the shallow buckets to announce in.
    """

    def __init__(self, random: Random) -> None:
        self.level = 0
        self.size: int | None = None
        """Peers in the swarm by the last lookup; None before the first. Once the level fits, the error is the 12 %
        chance of one bucket; before, the number is too low."""
        self._random = random

    def homes(self, run: RunId, peer: PeerId) -> list[PresenceBucket]:
        """Return the buckets to announce a peer in now.

        A peer that knows no size yet should look up first, or it would crowd the root.
        """
        deepest = min(self.level + 1, MAX_LEVEL)
        return [home(run, peer, level) for level in range(deepest + 1) if self._random.random() < self._chance(level)]

    def search(self) -> Search:
        return Search(self)

    def pick(self, level: int) -> PresenceBucket:
        """Return a bucket of this level to ask, independent of the last one.

        If buckets took turns, the one after a full bucket, which sends askers deeper, would be asked less often.
        """
        return PresenceBucket(level, self._random.getrandbits(level))

    def _chance(self, level: int) -> float:
        """Return the probability of announcing on a level at each announcement."""
        expected = (self.size or 0) / 2**level
        if level > self.level:
            return float(expected >= MERGE / 2)  # otherwise nobody would stay there to look up
        if level >= self.level - 1 or expected <= SAMPLE:
            return 1.0
        return 1.0 - pow(1.0 - SAMPLE / expected, 1.0 / RENEWALS)


class Search:
    """One lookup: ask the bucket ``next`` and report how much it ``answered``, until ``next`` is None."""

    def __init__(self, buckets: PresenceBuckets) -> None:
        self.next: PresenceBucket | None = buckets.pick(buckets.level)
        self._buckets = buckets
        self._asked: set[int] = set()
        self._size = -1

    @property
    def saw_all(self) -> bool:
        """Whether the root was asked and holds all peers; no bucket of a deeper level does."""
        return 0 in self._asked and self._buckets.level == 0

    def answered(self, records: int) -> None:
        assert self.next is not None
        level = self.next.level
        self._asked.add(level)
        is_outlier = level > 0 and records < LOST
        size = records * 2**level
        if not is_outlier and size > self._size:  # each answer is a lower bound, so the largest is the best
            self._size = self._buckets.size = size
            self._buckets.level = fitting_level(level, records)
        self.next = self._following(level, is_outlier)

    def _following(self, asked: int, is_outlier: bool) -> PresenceBucket | None:
        """Return the bucket to ask after one of level ``asked``; never the same level twice."""
        level = 0 if is_outlier else self._buckets.level
        is_enough = not is_outlier and level < asked + 2
        if is_enough or level in self._asked or len(self._asked) == MAX_GETS:
            return None
        return self._buckets.pick(level)
