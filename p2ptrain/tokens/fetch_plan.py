"""Plan for fetching shards: which one next, and from which source. Pure: time and randomness are arguments.

::

    a shard that this peer needs                                      action
    ----------------------------------------------------------------  ----------------------------------------------
    a peer has it and is free                                         ask that peer
    only peers that are busy have it, or a peer is fetching it        wait for them, for a while
    no peer has it, or that wait is over                              ask the mirror, else the bootstrap
    training waits for it, and its source is slow                     ask a second source; the first to finish counts

So each shard leaves a bootstrap about once, however many peers begin at once. What sources say of themselves only
directs the first question. A source that does not send what it said, or nothing in time, is asked again after a
growing pause. A peer that sends a false shard is asked for nothing for long; a mirror or bootstrap, one of whose files
may be damaged, not for that shard. A shard that several strangers failed to send is asked of sources that have sent a
shard before, of the mirror or the bootstrap. The shell fetches, and checks digests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from itertools import islice
from random import Random

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.tokens.index import SHARD_BYTES
from p2ptrain.tokens.walk import WINDOW, Walk

MOST_FETCHES = 4
"""Concurrent fetches: two or three uplinks of homes fill a downlink of 50 Mbit/s. Guess: bench/carry.py with others."""
AHEAD = 2 * WINDOW
"""Most shards that a peer needs at once: this window's and the next one's."""
AHEAD_LEAST = 4
"""Shards to have beyond the window in which training is, at least."""
PATIENCE_S = (4.0, 60.0)
"""Longest wait for another peer before a mirror or bootstrap is asked: if training waits for the shard, and if it does
not. The wait is drawn between half of it and all. Guess: bench/carry.py with others."""
SPREAD_S = 60.0
"""Longest wait before a bootstrap is asked for a shard that no peer has, and that training does not wait for yet: peers
that need it, too, learn that it is coming."""
LOOK_S = 5.0
"""Longest pause while shards are missing; the sources' statements change meanwhile."""
IDLE_S = 60.0
"""Pause while nothing is missing."""
BUSY_S = (1.0, 3.0)
"""First and longest pause after a source was busy."""
BUSY_SOON_S = (10.0, 40.0)
"""First and longest pause after a mirror or bootstrap was too busy for what training does not wait for yet: what
another peer's training waits for gets there first."""
FAILED_S = (5.0, 600.0)
"""First and longest pause after a peer failed."""
TRUSTED_FAILED_S = 30.0
"""Longest pause after a mirror or bootstrap failed: it may be the only source."""
FALSE_S = 3600.0
"""Pause after a peer sent a false shard: four megabytes for nothing."""
TRUSTED_FALSE_S = 300.0
"""Time for which a mirror or bootstrap is not asked for a shard again that it sent falsely: its owner may repair it."""
MOST_DOUBTS = 5
"""Failures of strangers after which a shard is asked of proven sources."""
FIRST_BYTES_PER_S = 500e3
"""Assumed speed of an unmeasured source: 4 Mbit/s, a share of a home's uplink."""
LEAST_BYTES_PER_S = 32e3
"""A fetch slower than this is given up, after ``GRACE_S``: a shard would take two minutes."""
GRACE_S = 15.0
SLOW, SLOW_S = 2.0, 4.0
"""A source is slow if it needs this many times as long as another would, and this many seconds more; it has at least
these seconds to begin."""
MOST_RECORDS = 512
"""Sources whose speed and failures are remembered, and false shards of mirrors and bootstraps."""


class SourceKind(IntEnum):
    """Kinds of sources, in the order of preference."""

    PEER = 0
    MIRROR = 1
    BOOTSTRAP = 2


@dataclass(frozen=True, slots=True)
class ShardSource:
    """What a source says of itself."""

    name: str
    """Peer id, or address of a mirror."""
    kind: SourceKind
    held: frozenset[int] | None
    """Numbers of its shards in the index; None: all."""
    coming: frozenset[int] = frozenset()
    """Numbers of those that it is fetching."""

    def has(self, shard: int) -> bool:
        return self.held is None or shard in self.held


@dataclass(frozen=True, slots=True)
class ShardFetch:
    """Ask this source for this shard."""

    shard: int
    source: str


class FetchOutcome(Enum):
    """How a fetch ended."""

    WHOLE = "whole"
    """The shard arrived, and its digest is right."""
    BUSY = "busy"
    """The source serves too many at the moment."""
    FAILED = "failed"
    """The source does not have it, cannot be reached, broke off or was too slow."""
    FALSE = "false"
    """What the source sent has another digest than the shard."""
    CANCELLED = "cancelled"
    """The shard is not needed any more, or has come from another source."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Shards that a peer needs, in order."""

    now: tuple[int, ...]
    """Training cannot go on without these."""
    soon: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        return self.now + self.soon


def needs(walk: Walk, step: int, per_step: int, held_out: Iterable[int] = ()) -> Needs:
    """Return what a peer needs from an inner step on: this window, held-out shards, and the next window or two.

    Args:
        held_out: numbers of held-out shards in the index, to be had before the next window.
    """
    first, *following = islice(walk.windows(step, per_step), 3)
    now = [*first, *(each.shard for each in walk.sequences(step, per_step))]  # a step may end in the next window
    soon = [*held_out, *following[0]]
    if len(soon) < AHEAD_LEAST:
        soon += following[1]
    now = list(dict.fromkeys(now))[:AHEAD]
    return Needs(tuple(now), tuple(each for each in dict.fromkeys(soon) if each not in now)[: AHEAD - len(now)])


@dataclass(slots=True)
class _Record:
    """What this peer has seen of a source."""

    bytes_per_s: float = FIRST_BYTES_PER_S
    is_proven: bool = False
    failures: int = 0
    busy: int = 0
    asked_again_at: float = 0.0
    asked_for_soon_at: float = 0.0
    """When it is asked again for what training does not wait for."""

    @property
    def is_hopeful(self) -> bool:
        """Whether it is worth waiting for what the source says it has, or will have."""
        return self.is_proven or (self.failures == 0 and self.busy < _MOST_BUSY)


_MOST_BUSY = 4


@dataclass(slots=True)
class _UnderWay:
    kind: SourceKind
    is_urgent: bool
    began: float
    size_bytes: int = 0

    def bytes_per_s(self, now: float) -> float:
        return max(self.size_bytes, 1) / max(now - self.began, 1e-3)


@dataclass(slots=True)
class _Wish:
    """A shard that is needed and not here."""

    since: float
    patience: float
    """Share of a patience after which another kind of source is asked, .5 to 1."""
    spread: float
    """Share of ``SPREAD_S``, 0 to 1."""
    doubts: int = 0


class FetchPlan:
    """Fetches of one peer: those under way, and what it has seen of its sources."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._under_way: dict[ShardFetch, _UnderWay] = {}
        self._records: BoundedDict[str, _Record] = BoundedDict(MOST_RECORDS)
        self._wishes: dict[int, _Wish] = {}
        self._false: BoundedDict[tuple[str, int], float] = BoundedDict(MOST_RECORDS)
        """Until when a mirror or bootstrap, by name, is not asked for a shard that it sent falsely."""

    @property
    def under_way(self) -> tuple[ShardFetch, ...]:
        return tuple(self._under_way)

    @property
    def coming(self) -> frozenset[int]:
        """Shards that this peer is fetching, which it tells others."""
        return frozenset(fetch.shard for fetch in self._under_way)

    def begin(
        self, wanted: Needs, here: Collection[int], sources: Sequence[ShardSource], now: float
    ) -> ShardFetch | float:
        """Return the next fetch, which then counts as under way until ``ended``; else when to ask again, in seconds.

        Ask again earlier if a fetch ends, if sources say something new, or if training needs others.
        """
        missing = [shard for shard in wanted.all if shard not in here]
        self._wishes = {
            shard: self._wishes.get(shard) or _Wish(now, self._rng.uniform(0.5, 1.0), self._rng.random())
            for shard in missing
        }
        if not missing:
            return IDLE_S
        look_at = now + LOOK_S
        if len(self._under_way) >= MOST_FETCHES:
            return LOOK_S
        coming = self.coming
        is_waiting = any(shard in wanted.now for shard in missing)
        for shard in missing:
            is_urgent = shard in wanted.now
            found: ShardSource | float
            if shard not in coming:
                found = self._source(shard, is_urgent, is_waiting, sources, now)
            elif is_urgent:
                found = self._second_source(shard, sources, now)
            else:
                continue
            if isinstance(found, ShardSource):
                fetch = ShardFetch(shard, found.name)
                self._under_way[fetch] = _UnderWay(found.kind, is_urgent, now)
                return fetch
            look_at = min(look_at, found)
        return max(look_at - now, 0.05)

    def received(self, fetch: ShardFetch, size_bytes: int) -> None:
        """Record how much of a shard has arrived in all."""
        if (state := self._under_way.get(fetch)) is not None:
            state.size_bytes = size_bytes

    def unneeded(self, wanted: Needs, here: Collection[int]) -> list[ShardFetch]:
        """Return the fetches to cancel: their shard has come from elsewhere, or is not needed any more."""
        return [fetch for fetch in self._under_way if fetch.shard in here or fetch.shard not in wanted.all]

    def overdue(self, now: float) -> list[ShardFetch]:
        """Return the fetches to give up because they are too slow, whose ends are to be recorded as FAILED."""
        return [
            fetch
            for fetch, state in self._under_way.items()
            if now - state.began > GRACE_S and state.bytes_per_s(now) < LEAST_BYTES_PER_S
        ]

    def ended(self, fetch: ShardFetch, outcome: FetchOutcome, now: float) -> None:
        """Record the end of a fetch."""
        state = self._under_way.pop(fetch, None)
        if state is None:
            return
        record = self._record(fetch.source)
        self._records[fetch.source] = record
        is_stranger = state.kind is SourceKind.PEER
        match outcome:
            case FetchOutcome.WHOLE:
                speed = state.bytes_per_s(now)
                record.bytes_per_s = (record.bytes_per_s + speed) / 2 if record.is_proven else speed
                record.is_proven, record.failures, record.busy = True, 0, 0
            case FetchOutcome.CANCELLED:
                if now - state.began > SLOW_S:
                    record.bytes_per_s = min(record.bytes_per_s, state.bytes_per_s(now))
            case FetchOutcome.BUSY:
                record.busy += 1
                is_patient = not (is_stranger or state.is_urgent)
                first_s, longest_s = BUSY_SOON_S if is_patient else BUSY_S
                again = now + min(first_s * 2.0 ** min(record.busy - 1, 10), longest_s) * self._rng.uniform(0.5, 1.5)
                if is_patient:
                    record.asked_for_soon_at = again
                else:
                    record.asked_again_at = again
            case FetchOutcome.FALSE if is_stranger:
                record.failures += 1
                record.is_proven = False
                record.asked_again_at = now + FALSE_S
            case FetchOutcome.FAILED | FetchOutcome.FALSE:
                if outcome is FetchOutcome.FALSE:
                    self._false[fetch.source, fetch.shard] = now + TRUSTED_FALSE_S
                record.failures += 1
                longest_s = FAILED_S[1] if is_stranger else TRUSTED_FAILED_S
                pause_s = min(FAILED_S[0] * 2.0 ** min(record.failures - 1, 10), longest_s)
                record.asked_again_at = now + pause_s * self._rng.uniform(0.5, 1.0)
        has_failed = outcome in (FetchOutcome.FAILED, FetchOutcome.FALSE)
        if has_failed and is_stranger and not record.is_proven and (wish := self._wishes.get(fetch.shard)):
            wish.doubts += 1

    def _source(
        self, shard: int, is_urgent: bool, is_waiting: bool, sources: Sequence[ShardSource], now: float
    ) -> ShardSource | float:
        """Return whom to ask for a shard, or when to look again."""
        wish = self._wishes[shard]
        able = self._able(shard, sources, now)
        free = [each for each in able if self._is_free(each, now, is_urgent)]
        if peers := [each for each in free if each.kind is SourceKind.PEER and self._is_fit(each, wish)]:
            return self._fastest(peers)
        others = [each for each in free if each.kind is not SourceKind.PEER]
        if not others:
            pauses = [at for each in able if (at := self._asked_again_at(each, is_urgent)) > now]
            return min(pauses, default=now + LOOK_S)  # the end of a fetch frees its source earlier
        mirrors = [each for each in others if each.kind is SourceKind.MIRROR]
        if is_urgent:
            if mirrors:
                return self._fastest(mirrors)
            due = wish.since + (PATIENCE_S[0] * wish.patience if self._is_elsewhere(shard, wish, sources) else 0.0)
        elif self._is_elsewhere(shard, wish, sources):
            due = wish.since + PATIENCE_S[1] * wish.patience
        elif mirrors:
            due = now
        elif is_waiting:  # bootstraps have to begin with what others' training waits for
            due = now + LOOK_S
        else:
            due = wish.since + SPREAD_S * wish.spread
        return self._fastest(mirrors or others) if due <= now else due

    def _second_source(self, shard: int, sources: Sequence[ShardSource], now: float) -> ShardSource | float:
        """Return whom to ask, too, for a shard whose source is slow, or when to look again."""
        asked = {fetch.source: state for fetch, state in self._under_way.items() if fetch.shard == shard}
        (state, *more) = asked.values()
        if more:
            return now + LOOK_S
        if now - state.began < SLOW_S:
            return state.began + SLOW_S
        wish = self._wishes[shard]
        able = [each for each in self._able(shard, sources, now) if each.name not in asked]
        able = [each for each in able if self._is_free(each, now)]
        able = [each for each in able if each.kind is not SourceKind.PEER or self._is_fit(each, wish)]
        if not able:
            return now + LOOK_S
        best = self._fastest([each for each in able if each.kind is min(each.kind for each in able)])
        left_s = (SHARD_BYTES - state.size_bytes) / state.bytes_per_s(now)
        other_s = SHARD_BYTES / self._record(best.name).bytes_per_s
        return best if left_s > SLOW * other_s + SLOW_S else now + 1.0

    def _able(self, shard: int, sources: Sequence[ShardSource], now: float) -> list[ShardSource]:
        """Return the sources that have a shard and did not send it falsely a short time ago."""
        return [each for each in sources if each.has(shard) and self._false.get((each.name, shard), now) <= now]

    def _is_free(self, source: ShardSource, now: float, is_urgent: bool = True) -> bool:
        """Return whether a source can be asked now; of peers and bootstraps for one shard at a time."""
        if self._asked_again_at(source, is_urgent) > now:
            return False
        fetches = sum(fetch.source == source.name for fetch in self._under_way)
        return fetches < (MOST_FETCHES if source.kind is SourceKind.MIRROR else 1)

    def _asked_again_at(self, source: ShardSource, is_urgent: bool) -> float:
        record = self._record(source.name)
        return record.asked_again_at if is_urgent else max(record.asked_again_at, record.asked_for_soon_at)

    def _is_fit(self, peer: ShardSource, wish: _Wish) -> bool:
        return wish.doubts < MOST_DOUBTS or self._record(peer.name).is_proven

    def _is_elsewhere(self, shard: int, wish: _Wish, sources: Sequence[ShardSource]) -> bool:
        """Return whether a peer seems to have a shard, or to be fetching it."""
        return wish.doubts < MOST_DOUBTS and any(
            each.kind is SourceKind.PEER
            and (each.has(shard) or shard in each.coming)
            and self._record(each.name).is_hopeful
            for each in sources
        )

    def _fastest(self, sources: Sequence[ShardSource]) -> ShardSource:
        """Return one of the sources, a faster one more likely, so that not all peers ask the same one."""
        return max(sources, key=lambda each: self._record(each.name).bytes_per_s * self._rng.uniform(0.2, 1.0))

    def _record(self, name: str) -> _Record:
        return self._records.get(name) or _Record()
