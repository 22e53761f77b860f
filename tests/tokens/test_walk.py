"""The order in which peers read shards: complete, without repeats, reproducible, a window at a time."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.tokens.walk import FIRST_PARTS, FIRST_SHARDS, WINDOW, Place, Walk

WALKS = st.builds(
    lambda shards, per_shard, missing, peer: Walk(3, peer, shards, per_shard, max(per_shard - missing, shards == 1)),
    st.integers(1, 40),
    st.integers(1, 6),
    st.integers(0, 6),
    st.sampled_from(["amber", "birch"]),
)


def epoch(walk: Walk, number: int) -> list[Place]:
    return [walk.sequences(number * walk.total + step, 1)[0] for step in range(walk.total)]


@given(WALKS, st.integers(0, 2))
def test_an_epoch_has_every_sequence_once(walk: Walk, number: int) -> None:
    read = epoch(walk, number)
    sizes = [walk.per_shard] * (walk.shards - 1) + [walk.in_last]
    assert sorted(read) == [Place(shard, each) for shard, size in enumerate(sizes) for each in range(size)]


@given(WALKS, st.integers(0, 60), st.integers(1, 5))
def test_a_step_reads_from_the_windows_that_are_announced(walk: Walk, step: int, per_step: int) -> None:
    begun = walk.windows(step, per_step)
    enough = [shard for window in islice(begun, per_step + 1) for shard in window]
    places = walk.sequences(step, per_step)
    assert {place.shard for place in places} <= set(enough)
    assert places[0].shard in next(walk.windows(step, per_step))


@given(WALKS, st.integers(0, 10))
def test_steps_of_any_size_read_the_same(walk: Walk, step: int) -> None:
    assert walk.sequences(step, 3) == [walk.sequences(each, 1)[0] for each in range(3 * step, 3 * step + 3)]


def test_the_first_windows_are_short_and_later_epochs_have_full_ones() -> None:
    walk = Walk(1, "amber", 30, 4, 4)
    sizes = [len(window) for window in islice(walk.windows(0, 1), 8)]
    assert sizes == [1, 1, 2, 4, WINDOW, WINDOW, 6, 1]


def test_the_first_shard_is_one_of_a_few_and_its_rest_comes_last() -> None:
    walks = [Walk(1, f"peer {each}", 100, 8, 8) for each in range(200)]
    firsts = [next(walk.windows(0, 1)) for walk in walks]
    assert len({shard for [shard] in firsts}) == FIRST_SHARDS
    for walk, [first] in zip(walks[:5], firsts, strict=False):
        read = epoch(walk, 0)
        assert [place.shard for place in read[: 8 // FIRST_PARTS]] == [first] * (8 // FIRST_PARTS)
        assert first not in {place.shard for place in read[8 // FIRST_PARTS : -(8 - 8 // FIRST_PARTS)]}
    assert len({walk.sequences(2, 1)[0].shard for walk in walks}) > 80


def test_peers_epochs_and_runs_have_orders_of_their_own() -> None:
    walks = [Walk(1, "amber", 30, 4, 4), Walk(1, "birch", 30, 4, 4), Walk(2, "amber", 30, 4, 4)]
    orders = [tuple(epoch(walk, number)) for walk in walks for number in range(2)]
    assert len(set(orders)) == len(orders)


def test_the_order_is_the_same_in_every_version() -> None:
    walk = Walk(7, "amber", 20, 100, 60)
    assert walk.sequences(0, 3) == [(10, 73), (10, 91), (10, 87)]
    assert walk.sequences(400, 3) == [(18, 55), (18, 24), (7, 39)]


def test_a_late_step_of_a_large_text_is_found_at_once() -> None:
    walk = Walk(1, "amber", 500_000, 2_047, 5)
    assert len(walk.sequences(10**7, 8)) == 8


@pytest.mark.parametrize(("shards", "per_shard", "in_last"), [(0, 1, 1), (1, 1, 0), (2, 3, 4), (2, 3, -1)])
def test_impossible_shards_are_refused(shards: int, per_shard: int, in_last: int) -> None:
    with pytest.raises(ValueError, match="shards"):
        Walk(1, "amber", shards, per_shard, in_last)


@given(WALKS, st.integers(0, 2))
def test_a_whole_epoch_is_its_sequences_one_by_one(walk: Walk, number: int) -> None:
    assert [tuple(place) for place in walk.epoch(number).tolist()] == epoch(walk, number)


def test_spans_follow_each_other_and_tell_the_windows_of_steps() -> None:
    walk = Walk(3, "me", 21, 10, 4)
    spans = walk.spans(0)
    end = 0
    for _ in range(12):
        positions, shards = next(spans)
        assert positions.start == end
        end = positions.stop
        found = {place.shard for place in walk.sequences(0, end)[positions.start :]}
        assert found == set(shards)
        assert next(walk.spans(positions.start)) == next(walk.spans(positions.stop - 1)) == (positions, shards)
