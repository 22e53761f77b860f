"""The plan of which shard is fetched next from whom: what it never does, and whom it prefers."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.tokens.fetch_plan import (
    AHEAD,
    FALSE_S,
    FIRST_BYTES_PER_S,
    GRACE_S,
    IDLE_S,
    LEAST_BYTES_PER_S,
    LOOK_S,
    MOST_DOUBTS,
    MOST_FETCHES,
    MOST_RECORDS,
    PATIENCE_S,
    SLOW_S,
    SPREAD_S,
    TRUSTED_FAILED_S,
    TRUSTED_FALSE_S,
    FetchOutcome,
    FetchPlan,
    Needs,
    ShardFetch,
    ShardSource,
    SourceKind,
    needs,
)
from p2ptrain.tokens.index import SHARD_BYTES
from p2ptrain.tokens.walk import WINDOW, Walk

BOOTSTRAP = ShardSource("boot", SourceKind.BOOTSTRAP, None)
MIRROR = ShardSource("mirror", SourceKind.MIRROR, None)


def peer(name: str, *held: int, coming: tuple[int, ...] = ()) -> ShardSource:
    return ShardSource(name, SourceKind.PEER, frozenset(held), frozenset(coming))


def plan() -> FetchPlan:
    return FetchPlan(Random(1))


def begun(found: ShardFetch | float) -> ShardFetch:
    assert isinstance(found, ShardFetch)
    return found


def first_asked(fetches: FetchPlan, wanted: Needs, sources: list[ShardSource], now: float) -> tuple[str, float]:
    """Return which source is asked first if nothing happens meanwhile, and when."""
    for _ in range(1000):
        found = fetches.begin(wanted, (), sources, now)
        if isinstance(found, ShardFetch):
            return found.source, now
        now += found
    raise AssertionError("nobody is asked")


@pytest.mark.parametrize(
    ("sources", "asked"),
    [
        ([BOOTSTRAP], "boot"),
        ([BOOTSTRAP, MIRROR], "mirror"),
        ([BOOTSTRAP, MIRROR, peer("amber", 3)], "amber"),
        ([BOOTSTRAP, peer("amber", 4)], "boot"),
        ([BOOTSTRAP, MIRROR, peer("amber", coming=(3,))], "mirror"),
    ],
)
def test_training_that_waits_asks_at_once_a_peer_that_has_the_shard_else_another_source(
    sources: list[ShardSource], asked: str
) -> None:
    assert plan().begin(Needs((3,), ()), (), sources, 7.0) == ShardFetch(3, asked)


@pytest.mark.parametrize(("wanted", "longest_s"), [(Needs((3,), ()), PATIENCE_S[0]), (Needs((), (3,)), PATIENCE_S[1])])
def test_a_bootstrap_is_asked_late_for_what_another_peer_is_fetching(wanted: Needs, longest_s: float) -> None:
    source, at = first_asked(plan(), wanted, [BOOTSTRAP, peer("amber", coming=(3,))], 7.0)
    assert source == "boot"
    assert longest_s / 2 <= at - 7.0 <= longest_s + LOOK_S


def test_peers_that_need_a_shard_soon_ask_the_bootstrap_at_different_times() -> None:
    times = {first_asked(FetchPlan(Random(each)), Needs((), (3,)), [BOOTSTRAP], 0.0)[1] for each in range(20)}
    assert len(times) > 10
    assert max(times) <= SPREAD_S + LOOK_S


def test_a_bootstrap_gives_what_training_waits_for_before_what_comes_later() -> None:
    fetches = plan()
    assert fetches.begin(Needs((3,), (4,)), (), [BOOTSTRAP, peer("amber", 5)], 0.0) == ShardFetch(3, "boot")
    fetches.received(ShardFetch(3, "boot"), SHARD_BYTES - 1)
    second = ShardSource("other", SourceKind.BOOTSTRAP, None)
    for now in range(30):
        assert not isinstance(fetches.begin(Needs((3,), (4,)), (), [BOOTSTRAP, second], float(now)), ShardFetch)


def test_a_source_that_is_slow_while_training_waits_gets_a_second_one_beside_it() -> None:
    fetches = plan()
    slow = begun(fetches.begin(Needs((3,), ()), (), [peer("amber", 3)], 0.0))
    sources = [peer("amber", 3), peer("birch", 3)]
    assert not isinstance(fetches.begin(Needs((3,), ()), (), sources, SLOW_S / 2), ShardFetch)
    fetches.received(slow, 40_000)
    assert fetches.begin(Needs((3,), ()), (), sources, SLOW_S) == ShardFetch(3, "birch")
    assert not isinstance(fetches.begin(Needs((3,), ()), (), [*sources, BOOTSTRAP], 60.0), ShardFetch)
    fetches.ended(ShardFetch(3, "birch"), FetchOutcome.WHOLE, 12.0)
    assert fetches.unneeded(Needs((3,), ()), {3}) == [slow]


def test_a_source_that_is_fast_enough_stays_alone() -> None:
    fetches = plan()
    fetch = begun(fetches.begin(Needs((3,), ()), (), [peer("amber", 3)], 0.0))
    fetches.received(fetch, int(FIRST_BYTES_PER_S * SLOW_S))
    found = fetches.begin(Needs((3,), ()), (), [peer("amber", 3), peer("birch", 3)], SLOW_S)
    assert not isinstance(found, ShardFetch)


def test_a_fetch_that_nearly_stands_still_is_overdue() -> None:
    fetches = plan()
    fetch = begun(fetches.begin(Needs((), (3,)), (), [peer("amber", 3)], 0.0))
    assert fetches.overdue(GRACE_S) == []
    assert fetches.overdue(GRACE_S + 1) == [fetch]
    fetches.received(fetch, int(LEAST_BYTES_PER_S * (GRACE_S + 2)))
    assert fetches.overdue(GRACE_S + 1) == []


def test_one_that_claims_everything_and_sends_nothing_is_found_out() -> None:
    fetches, liar, now = plan(), ShardSource("liar", SourceKind.PEER, None), 0.0
    asked = 0
    while now < 3600.0:
        found = fetches.begin(Needs((3,), ()), (), [liar], now)
        if isinstance(found, ShardFetch):
            asked += 1
            now += GRACE_S
            fetches.ended(found, FetchOutcome.FAILED, now)
        else:
            now += found
    assert asked == MOST_DOUBTS  # the shard is then asked of proven sources alone
    source, _ = first_asked(fetches, Needs((3,), ()), [liar, BOOTSTRAP], now)
    assert source == "boot"


def test_liars_under_many_names_cost_a_few_tries_of_a_shard() -> None:
    fetches = plan()
    liars = [ShardSource(f"liar {each}", SourceKind.PEER, None) for each in range(100)]
    for now in map(float, range(MOST_DOUBTS)):
        fetch = begun(fetches.begin(Needs((3,), ()), (), [*liars, BOOTSTRAP], now))
        assert fetch.source != "boot"
        fetches.ended(fetch, FetchOutcome.FALSE, now)
    assert fetches.begin(Needs((3,), ()), (), [*liars, BOOTSTRAP], float(MOST_DOUBTS)) == ShardFetch(3, "boot")


def test_the_sender_of_a_false_shard_is_set_aside_for_long() -> None:
    fetches = plan()
    fetches.ended(begun(fetches.begin(Needs((3,), ()), (), [peer("amber", 3)], 0.0)), FetchOutcome.FALSE, 0.0)
    _, at = first_asked(fetches, Needs((3,), ()), [peer("amber", 3)], 0.0)
    assert at >= FALSE_S


@pytest.mark.parametrize("source", [BOOTSTRAP, MIRROR])
def test_a_mirror_or_bootstrap_with_a_damaged_shard_is_soon_asked_for_others(source: ShardSource) -> None:
    fetches, now = plan(), 0.0
    fetches.ended(begun(fetches.begin(Needs((3,), ()), (), [source], now)), FetchOutcome.FALSE, now)
    _, now = first_asked(fetches, Needs((3, 4), ()), [source], now)
    assert now <= TRUSTED_FAILED_S
    assert fetches.under_way == (ShardFetch(4, source.name),)
    fetches.ended(ShardFetch(4, source.name), FetchOutcome.WHOLE, now)
    assert fetches.begin(Needs((3,), ()), (), [source, peer("amber", 3)], now) == ShardFetch(3, "amber")
    fetches.ended(ShardFetch(3, "amber"), FetchOutcome.FAILED, now)
    assert first_asked(fetches, Needs((3,), ()), [source], now)[1] >= TRUSTED_FALSE_S


def test_pauses_grow_with_failures_and_end_with_success() -> None:
    fetches, now, pauses = plan(), 0.0, []
    for outcome in [FetchOutcome.FAILED] * 4 + [FetchOutcome.WHOLE, FetchOutcome.FAILED]:
        name, at = first_asked(fetches, Needs((3,), ()), [BOOTSTRAP], now)
        pauses.append(at - now)
        fetches.ended(ShardFetch(3, name), outcome, at)
        now = at
    assert pauses[1] < pauses[2] < pauses[3] < 60.0
    assert pauses[5] == 0.0
    assert first_asked(fetches, Needs((3,), ()), [BOOTSTRAP], now)[1] - now <= pauses[1] * 2


def test_a_faster_source_is_asked_more_often() -> None:
    fetches = plan()
    for name, duration_s in (("amber", 1.0), ("birch", 20.0)):
        fetch = begun(fetches.begin(Needs((3,), ()), (), [peer(name, 3)], 0.0))
        fetches.received(fetch, SHARD_BYTES)
        fetches.ended(fetch, FetchOutcome.WHOLE, duration_s)
    asked = []
    for now in range(100, 150):
        fetch = begun(fetches.begin(Needs((3,), ()), (), [peer("birch", 3), peer("amber", 3)], float(now)))
        asked.append(fetch.source)
        fetches.ended(fetch, FetchOutcome.CANCELLED, float(now))
    assert asked.count("amber") > 45


def test_what_is_here_needs_nothing() -> None:
    assert plan().begin(Needs((3,), (4,)), {3, 4}, [BOOTSTRAP], 0.0) == IDLE_S


def drawn_sources(rng: Random) -> list[ShardSource]:
    return [
        ShardSource(name, rng.choice(list(SourceKind)), rng.choice([None, drawn_shards(rng)]), drawn_shards(rng))
        for name in rng.sample(["amber", "birch", "cedar", "mirror", "boot"], rng.randint(0, 5))
    ]


def drawn_shards(rng: Random) -> frozenset[int]:
    return frozenset(rng.sample(range(13), rng.randint(0, 13)))


@given(st.integers(0, 1 << 30))
def test_whatever_sources_say(seed: int) -> None:
    """Fetch only what is needed, not here and stated; a shard from at most two sources, of which each has one fetch."""
    rng = Random(seed)
    fetches, here, now = FetchPlan(rng), set[int](), 0.0
    for _ in range(30):
        sources, order, urgent = drawn_sources(rng), rng.sample(range(13), rng.randint(0, 13)), rng.randint(0, 5)
        wanted = Needs(tuple(order[:urgent]), tuple(order[urgent:]))
        found = fetches.begin(wanted, here, sources, now)
        if isinstance(found, ShardFetch):
            assert found.shard in set(wanted.all) - here
            [source] = [each for each in sources if each.name == found.source]
            assert source.has(found.shard)
            now += rng.random()
        else:
            assert 0.0 < found <= IDLE_S
            now += found
        assert len(set(fetches.under_way)) == len(fetches.under_way) <= MOST_FETCHES
        for shard in fetches.coming:
            assert sum(each.shard == shard for each in fetches.under_way) <= 2
        if fetches.under_way and rng.random() < 0.6:
            fetch, outcome = rng.choice(fetches.under_way), rng.choice(list(FetchOutcome))
            fetches.ended(fetch, outcome, now)
            if outcome is FetchOutcome.WHOLE:
                here.add(fetch.shard)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 30), st.floats(0.0, 0.9))
def test_everything_arrives_while_an_honest_source_lives(seed: int, shards: int, failing: float) -> None:
    """A bootstrap that answers, beside peers of which many fail: each shard arrives, whatever peers do."""
    rng = Random(seed)
    fetches, here, now = FetchPlan(rng), set[int](), 0.0
    peers = [ShardSource(f"peer {each}", SourceKind.PEER, None) for each in range(8)]
    bad = [FetchOutcome.BUSY, FetchOutcome.FAILED, FetchOutcome.FALSE]
    for _ in range(20_000):
        wanted = Needs(tuple(range(min(4, shards))), tuple(range(4, shards)))
        found = fetches.begin(wanted, here, [*peers, BOOTSTRAP], now)
        if isinstance(found, float):
            if found == IDLE_S:
                break
            now += found
        for fetch in fetches.unneeded(wanted, here):
            fetches.ended(fetch, FetchOutcome.CANCELLED, now)
        for fetch in fetches.under_way:
            is_failing = fetch.source != "boot" and rng.random() < failing
            outcome = rng.choice(bad) if is_failing else FetchOutcome.WHOLE
            fetches.ended(fetch, outcome, now)
            if outcome is FetchOutcome.WHOLE:
                here.add(fetch.shard)
    assert here == set(range(shards))


def test_memory_is_bounded() -> None:
    fetches = plan()
    for each in range(3 * MOST_RECORDS):
        fetch = begun(fetches.begin(Needs((each,), ()), (), [peer(f"peer {each}", each)], float(each)))
        fetches.ended(fetch, FetchOutcome.FAILED, float(each))
    assert len(fetches._records) == MOST_RECORDS
    assert len(fetches._wishes) == 1


@given(st.integers(1, 60), st.integers(0, 500), st.integers(1, 9))
def test_what_a_peer_needs_begins_with_its_step(shards: int, step: int, per_step: int) -> None:
    walk = Walk(3, "amber", shards, 5, 5)
    wanted = needs(walk, step, per_step, [shards])
    assert len(set(wanted.all)) == len(wanted.all) <= AHEAD
    assert {place.shard for place in walk.sequences(step, per_step)} <= set(wanted.now)
    assert wanted.soon[0] == shards
    assert len(wanted.all) >= min(shards, 4)


def test_what_a_peer_needs_at_first_is_a_window_and_some_shards_more() -> None:
    walk = Walk(3, "amber", 100, 5, 5)
    assert [len(part) for part in (needs(walk, 0, 1).now, needs(walk, 0, 1).soon)] == [1, 3]
    later = needs(walk, 200, 1)
    assert [len(later.now), len(later.soon)] == [WINDOW, WINDOW]
