"""Buckets of presence records that split as the swarm grows: complete, bounded, evenly loaded. A swarm in memory."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.swarm.presence_buckets import (
    LOST,
    MAX_GETS,
    MAX_LEVEL,
    MERGE,
    SAMPLE,
    SPLIT,
    TARGET,
    PresenceBucket,
    PresenceBuckets,
    fitting_level,
    home,
)
from p2ptrain.swarm.rules import ANNOUNCE_PERIOD_S, PRESENCE_LIFETIME_S
from sim.directory import SimulatedBuckets

RUN = RunId("ab" * 32)
PEERS = [PeerId(f"peer{number}") for number in range(10_000)]
Found = dict[PeerId, set[PeerId]]
"""The peers that each peer found."""


@dataclass
class Swarm:
    """Peers that announce and look up once a round of 20 s."""

    random: Random = field(default_factory=lambda: Random(7))
    now: float = 0.0
    views: dict[PeerId, PresenceBuckets] = field(default_factory=dict)
    announcements: Counter[int] = field(default_factory=Counter)
    """Number of announcements by their number of keys."""
    lookups: Counter[int] = field(default_factory=Counter)
    largest: int = 0
    """Number of records in the largest answer."""

    def __post_init__(self) -> None:
        self.shelves: SimulatedBuckets[None] = SimulatedBuckets(RUN)

    def grow(self, size: int) -> None:
        for peer in PEERS[len(self.views) : size]:
            self.views[peer] = PresenceBuckets(self.random)

    def shrink(self, size: int) -> None:
        """Remove most peers, without a farewell."""
        self.views = dict(list(self.views.items())[:size])

    def forget_counts(self) -> None:
        self.shelves.stores.clear()
        self.shelves.gets.clear()
        self.announcements.clear()
        self.lookups.clear()
        self.largest = 0

    def round(self) -> Found:
        """Let all announce, spread over the round, then all look up. A new peer looks up before it announces."""
        for place, (peer, buckets) in enumerate(self.views.items()):
            then = self.now + ANNOUNCE_PERIOD_S * place / len(self.views)
            if buckets.size is None:
                self.shelves.lookup(buckets, then)
            until = then + PRESENCE_LIFETIME_S
            self.announcements[self.shelves.announce(buckets, peer, None, until)] += 1
        self.now += ANNOUNCE_PERIOD_S
        return {peer: self.lookup(buckets) for peer, buckets in self.views.items()}

    def lookup(self, buckets: PresenceBuckets) -> set[PeerId]:
        answers = self.shelves.lookup(buckets, self.now)
        self.lookups[len(answers)] += 1
        self.largest = max(self.largest, *map(len, answers))
        return set().union(*answers)

    def levels(self) -> set[int]:
        return {buckets.level for buckets in self.views.values()}


def reached(edges: dict[PeerId, Iterable[PeerId]], start: PeerId) -> set[PeerId]:
    seen, waiting = {start}, deque([start])
    while waiting:
        for other in edges[waiting.popleft()]:
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return seen


def is_connected(found: Found) -> bool:
    """Return whether the directed graph of which peer found which is strongly connected."""
    forth = {peer: [other for other in others if other in found] for peer, others in found.items()}
    back: dict[PeerId, list[PeerId]] = {peer: [] for peer in found}
    for peer, others in forth.items():
        for other in others:
            back[other].append(peer)
    start = next(iter(found))
    return len(reached(forth, start)) == len(reached(back, start)) == len(found)


# --- numbers and buckets ----------------------------------------------------------------------------------------------


def test_the_numbers_fit_each_other() -> None:
    assert SPLIT > 2 * MERGE  # every size of a swarm has a stable level
    assert SAMPLE >= 2 * SPLIT  # a peer one level too shallow still finds all
    assert fitting_level(0, int(SAMPLE * 0.85)) == 2  # a sampled bucket sends newcomers two levels deeper, even at
    assert fitting_level(0, int(SAMPLE * 1.15)) == 2  # twice its standard deviation of 7 %
    assert MERGE / 2**0.5 > LOST


@given(st.text(max_size=60).map(PeerId), st.integers(0, MAX_LEVEL - 1))
def test_homes_lie_within_each_other(peer: PeerId, level: int) -> None:
    inner, outer = home(RUN, peer, level + 1), home(RUN, peer, level)
    assert 0 <= inner.number < 2**inner.level
    assert inner.number % 2**level == outer.number


def test_homes_spread_evenly_and_otherwise_in_another_run() -> None:
    held = Counter(home(RUN, peer, 4).number for peer in PEERS)
    assert len(held) == 16
    assert max(held.values()) < 1.2 * len(PEERS) / 16
    same = sum(home(RUN, peer, 4) == home(RunId("cd" * 32), peer, 4) for peer in PEERS)
    assert same < 1.2 * len(PEERS) / 16


@pytest.mark.parametrize(
    ("level", "records", "fits"),
    [
        (0, 0, 0),
        (0, SPLIT - 1, 0),
        (0, SPLIT, 1),
        (0, 4 * TARGET, 2),
        (0, 2048, 5),
        (5, SPLIT - 1, 5),
        (5, MERGE, 5),
        (5, MERGE - 1, 4),
        (5, TARGET // 4, 3),
        (5, 0, 0),
        (MAX_LEVEL, 10**6, MAX_LEVEL),
    ],
)
def test_the_level_that_fits(level: int, records: int, fits: int) -> None:
    assert fitting_level(level, records) == fits


@given(st.integers(1, 10**6), st.integers(0, MAX_LEVEL))
def test_a_level_is_found_and_kept(size: int, level: int) -> None:
    """Check buckets that hold exactly size / 2^level, from any level."""
    for _ in range(3):
        level = fitting_level(level, size // 2**level)
    assert fitting_level(level, size // 2**level) == level
    assert level == 0 or size // 2**level >= MERGE
    assert size // 2**level < SPLIT


@given(st.integers(0, MAX_LEVEL), st.integers(MERGE, SPLIT - 1), st.sampled_from([-1, 0, 1]), st.integers(0, 2**32))
def test_peers_one_level_apart_find_each_other_for_certain(level: int, records: int, apart: int, seed: int) -> None:
    """Check one swarm, estimated up to twice as large or half as large."""
    other = level + apart
    if not 0 <= other <= MAX_LEVEL:
        return
    announcer = PresenceBuckets(Random(seed))
    announcer.level, announcer.size = level, records * 2**level
    homes = announcer.homes(RUN, PEERS[0])
    assert len(homes) == len(set(homes))
    assert home(RUN, PEERS[0], other) in homes


# --- whole swarms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 10, 39, 41, 90])
def test_a_small_swarm_is_found_whole_with_one_get(size: int) -> None:
    swarm = Swarm()
    swarm.grow(size)
    swarm.round()
    swarm.forget_counts()
    for _ in range(3):
        found = swarm.round()
        assert all(others == set(swarm.views) for others in found.values())
    assert set(swarm.lookups) == {1}
    assert max(swarm.announcements) <= 2
    assert swarm.lookup(PresenceBuckets(Random(1))) == set(swarm.views)  # a newcomer too


@pytest.mark.parametrize("size", [100, 150, 400, 1000, 3000])
def test_a_swarm_settles_whatever_its_size(size: int) -> None:
    swarm = Swarm()
    swarm.grow(size)
    for _ in range(8):
        swarm.round()
    swarm.forget_counts()
    met: Counter[int] = Counter()
    for _ in range(4):
        found = swarm.round()
        assert is_connected(found)
        met.update(len(others) for others in found.values())
    assert max(swarm.levels()) - min(swarm.levels()) <= 1
    assert min(met) >= MERGE / 2
    assert swarm.largest < 1.5 * SPLIT
    assert swarm.lookups[1] > 0.99 * swarm.lookups.total()
    for buckets in swarm.views.values():
        assert buckets.size is not None
        assert 0.5 * size < buckets.size < 2 * size


def test_a_swarm_that_appears_at_once_at_the_root_settles_too() -> None:
    """Check peers that announce without a lookup before: the root stores what it can, and all learn that it is full."""
    swarm = Swarm()
    swarm.grow(3000)
    for buckets in swarm.views.values():
        buckets.size = 0
    for _ in range(3):
        swarm.round()
    found = swarm.round()
    assert is_connected(found)
    assert max(swarm.levels()) - min(swarm.levels()) <= 1
    for _ in range(4):
        swarm.round()
    assert len(swarm.shelves.get(PresenceBucket(0, 0), swarm.now)) < 1.4 * SAMPLE


@pytest.fixture(scope="module")
def large() -> Swarm:
    """Return 10,000 peers, grown from 8 by doubling every 20 s."""
    swarm = Swarm()
    size = 8
    while size < len(PEERS):
        swarm.grow(size)
        assert is_connected(swarm.round()), size
        size *= 2
    swarm.grow(len(PEERS))
    for _ in range(2):
        assert is_connected(swarm.round())
    return swarm


def test_ten_thousand_peers_cost_no_more_than_ten(large: Swarm) -> None:
    large.forget_counts()
    rounds = 3
    in_degrees: Counter[PeerId] = Counter()
    for _ in range(rounds):
        found = large.round()
        for others in found.values():
            in_degrees.update(others)
    assert is_connected(found)
    operations = large.lookups.total()
    assert large.lookups[1] > 0.99 * operations  # gets per lookup
    assert sum(keys * times for keys, times in large.announcements.items()) < 4.5 * operations  # keys per announcement
    assert large.largest < 1.5 * SPLIT
    assert max(large.levels()) - min(large.levels()) <= 1

    mean = in_degrees.total() / len(PEERS)
    assert mean > rounds * MERGE
    assert set(in_degrees) == set(PEERS)
    assert min(in_degrees.values()) > 0.7 * mean
    assert max(in_degrees.values()) < 1.3 * mean

    load = large.shelves.stores + large.shelves.gets
    assert max(load.values()) < 0.01 * load.total()
    assert large.shelves.gets[PresenceBucket(0, 0)] == 0  # only newcomers read the root


def test_a_newcomer_to_ten_thousand_finds_its_level_in_one_lookup(large: Swarm) -> None:
    large.forget_counts()
    large.round()
    for seed in range(20):
        newcomer = PresenceBuckets(Random(seed))
        found = large.lookup(newcomer)
        assert len(found) > TARGET
        assert newcomer.level in large.levels() | {min(large.levels()) - 1}
    assert max(large.lookups) <= MAX_GETS
    assert large.largest < 1.5 * SAMPLE


def test_views_that_differ_by_a_factor_of_two_do_not_part_a_swarm(large: Swarm) -> None:
    """Check a swarm in which every other peer stays one level too deep."""
    large.round()
    shallow = min(large.levels())
    for place, buckets in enumerate(large.views.values()):
        buckets.level = shallow + place % 2
    in_degrees: Counter[PeerId] = Counter()
    for _ in range(3):
        found = large.round()
        assert is_connected(found)
        for place, (peer, buckets) in enumerate(large.views.items()):
            in_degrees.update(found[peer])
            buckets.level = shallow + place % 2
            buckets.size = len(PEERS) * (1 + place % 2)
    halves = [sum(in_degrees[peer] for peer in PEERS[start::2]) for start in (0, 1)]
    assert 0.95 < halves[0] / halves[1] < 1.05
    mean = in_degrees.total() / len(PEERS)
    assert min(in_degrees.values()) > 0.7 * mean
    assert max(in_degrees.values()) < 1.3 * mean


def test_what_is_left_of_ten_thousand_finds_itself_again(large: Swarm) -> None:
    """Check 20 peers with the levels of 10,000, which for 75 s still find the records of those that vanished."""
    swarm = deepcopy(large)
    swarm.shrink(20)
    for _ in range(int(PRESENCE_LIFETIME_S / ANNOUNCE_PERIOD_S) + 4):
        found = swarm.round()
    assert all(others == set(swarm.views) for others in found.values())
    assert swarm.levels() == {0}


def test_a_bucket_that_could_not_be_read_costs_one_lookup_and_no_more() -> None:
    swarm = Swarm()
    swarm.grow(1000)
    for _ in range(6):
        swarm.round()
    one = next(iter(swarm.views.values()))
    before = one.level
    search = one.search()
    asked = []
    while search.next is not None:
        asked.append(search.next.level)
        held = swarm.shelves.get(search.next, swarm.now)
        search.answered(0 if len(asked) == 1 else len(held))
    assert asked[:2] == [before, 0]
    assert len(asked) <= MAX_GETS
    assert abs(one.level - before) <= 1


def test_a_half_of_the_swarm_is_not_all_of_it() -> None:
    """Check few records: they send the peer to the root, which the next lookup reads, not this one."""
    one = PresenceBuckets(Random(1))
    one.level = 1
    search = one.search()
    search.answered(38)
    assert search.next is None
    assert (one.level, one.size) == (0, 76)
    assert not search.saw_all
    search = one.search()
    assert not search.saw_all
    search.answered(76)
    assert search.saw_all
    search = one.search()
    search.answered(SPLIT)
    assert not search.saw_all
