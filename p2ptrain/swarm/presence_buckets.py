"""Where presence is kept and looked for: buckets that split as the swarm grows. Pure.

A key of the DHT holds one bucket. Level k has 2^k of them, and a hash of its id gives every peer one home on each
level; on level 0, the root, everybody has the same. A peer works at the level d where a bucket holds about ``TARGET``
peers. In a swarm of n, with x = n / 2^d between ``MERGE`` and ``SPLIT``:

===============  ==============================  =====================================
level            who announces there             records in a bucket
===============  ==============================  =====================================
0 to d - 2       a random share, others soon     ``SAMPLE``, or all if they are fewer
d - 1, d, d + 1  everybody                       2x, x, x/2
deeper           nobody                          none
===============  ==============================  =====================================

So a peer announces itself under few keys (one in a swarm of less than ``MERGE``, three or four in a large one), and no
key holds more than about ``SAMPLE`` records. A lookup asks one bucket of level d, a random one each time: everybody is
found equally often, and no key is asked more than others. Peers whose levels differ by one find each other as if they
did not.

What a bucket holds tells how large the swarm is, so each answer corrects the level: too full, deeper; too empty,
shallower. Two or more levels too full (a newcomer at the root, a swarm that grew), and the same lookup goes on deeper
at once. As good as empty (a swarm that vanished, a peer that slept), and it goes on at the root: there, everybody meets
who finds nobody elsewhere.
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
"""Records in a bucket, about. A guess: more than a peer can exchange with before it looks again; 20 kB an answer. The
numbers below follow from it."""
SPLIT = 96
MERGE = 40
"""A peer goes deeper when its bucket holds so many, shallower when it holds fewer: further apart than a factor of two,
so that every size of a swarm has a level to rest on, and evenly around ``TARGET``."""
SAMPLE = 224
"""Records in a bucket of the levels that only newcomers ask. At least 2 ``SPLIT``, or level d - 1 would lack some; and
3.5 ``TARGET``, so that in spite of chance it looks two levels too full (2^1.5 = 2.8 is where it begins to)."""
LOST = 10
"""A bucket other than the root that holds fewer says nothing. With ``MERGE`` expected it happens once in 10^9."""
MAX_LEVEL = 16
"""Four million peers; beyond, buckets grow."""
MAX_GETS = 4
"""Buckets that one lookup asks: a newcomer to 10,000 peers asks levels 0, 2, 4 and 6. The next lookup goes on there."""
RENEWALS = PRESENCE_LIFETIME_S / ANNOUNCE_PERIOD_S
"""Announcements while a record lasts: it is there when one of so many draws put it there."""


class PresenceBucket(NamedTuple):
    """The peers whose hash ends in the ``level`` bits of ``number``."""

    level: int
    number: int
    """0 to 2^level - 1."""


def home(run: RunId, peer: PeerId, level: int) -> PresenceBucket:
    """The one bucket of a level in which a peer's record may lie."""
    return PresenceBucket(level, _bits(run, peer) % 2**level)


@lru_cache(maxsize=65_536)
def _bits(run: RunId, peer: PeerId) -> int:
    """32 bits that stand for a peer."""
    return int.from_bytes(sha256(f"p2ptrain bucket {run} {peer}".encode()).digest()[:4])


def fitting_level(level: int, records: int) -> int:
    """The level on which to work, given what a bucket of ``level`` holds: the same while that is within the bounds."""
    if not MERGE <= records < SPLIT:
        level += round(log2(max(records, 1) / TARGET))
    return min(max(level, 0), MAX_LEVEL)


class PresenceBuckets:
    """One peer's view: on which level it works, and which bucket it asks next. Small, and lost without harm.

    Args:
        random: draws which bucket to ask, and under which shallow ones to announce.
    """

    def __init__(self, random: Random) -> None:
        self.level = 0
        self.size: int | None = None
        """Peers in the swarm, by the last lookup: off by the chance of one bucket, 12 %, once the level fits; too low
        while it does not. None before the first."""
        self._random = random

    def homes(self, run: RunId, peer: PeerId) -> list[PresenceBucket]:
        """The buckets under which to announce a peer now. Who knows no size yet should look up first: it would crowd
        the root."""
        deepest = min(self.level + 1, MAX_LEVEL)
        return [home(run, peer, level) for level in range(deepest + 1) if self._random.random() < self._chance(level)]

    def search(self) -> Search:
        """Begin a lookup."""
        return Search(self)

    def pick(self, level: int) -> PresenceBucket:
        """A bucket of this level to ask. Independent of the last one: taken in turns, the one behind a full one, which
        sends who asks it deeper, would be asked less."""
        return PresenceBucket(level, self._random.getrandbits(level))

    def _chance(self, level: int) -> float:
        """Of announcing on a level, at each announcement."""
        expected = (self.size or 0) / 2**level
        if level > self.level:
            return float(expected >= MERGE / 2)  # or nobody would stay there to look
        if level >= self.level - 1 or expected <= SAMPLE:
            return 1.0
        return 1.0 - pow(1.0 - SAMPLE / expected, 1.0 / RENEWALS)


class Search:
    """One lookup: ask the bucket ``next``, tell how much it ``answered``, until ``next`` is None."""

    def __init__(self, buckets: PresenceBuckets) -> None:
        self.next: PresenceBucket | None = buckets.pick(buckets.level)
        self._buckets = buckets
        self._asked: set[int] = set()
        self._size = -1

    @property
    def saw_all(self) -> bool:
        """Whether the root was asked, and holds everybody: no bucket of a deeper level does."""
        return 0 in self._asked and self._buckets.level == 0

    def answered(self, records: int) -> None:
        """The bucket asked last holds so many live records."""
        assert self.next is not None
        level = self.next.level
        self._asked.add(level)
        is_lost = level > 0 and records < LOST
        size = records * 2**level
        if not is_lost and size > self._size:  # each answer is a lower bound, the largest is the best
            self._size = self._buckets.size = size
            self._buckets.level = fitting_level(level, records)
        self.next = self._following(level, is_lost)

    def _following(self, asked: int, is_lost: bool) -> PresenceBucket | None:
        """The bucket to ask after one of level ``asked``; never the same level twice."""
        level = 0 if is_lost else self._buckets.level
        is_enough = not is_lost and level < asked + 2
        if is_enough or level in self._asked or len(self._asked) == MAX_GETS:
            return None
        return self._buckets.pick(level)
