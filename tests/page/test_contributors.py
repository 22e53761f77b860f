"""Contributions of peers: what counts, what is bounded, and by how much a run ends sooner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.page.contributors import (
    GAP_S,
    MOST_CONTRIBUTORS,
    MOST_SPEED,
    MOST_TIMES,
    OBSERVATION_S,
    Contribution,
    ContributionTable,
    reported,
    sooner_s,
)
from p2ptrain.page.memory import PageMemory


def measured(tokens: float = 6000.0, seconds: float = 600.0) -> ContributionTable:
    """Return a table that has measured this progress, at an even speed."""
    table = ContributionTable()
    steps = int(seconds / 30)
    for step in range(steps + 1):
        table.observe(tokens * step / steps, 1000.0 + 30.0 * step)
    return table


def by_peer(table: ContributionTable, run_tokens: int = 12_000) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in table.document(run_tokens, {"a"})["rows"]}


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, 0.0), (0.5, 1000.0), (0.25, 1000.0 / 3), (0.9, 9000.0), (1.0, None), (-0.1, None), (1.1, None)],
)
def test_without_a_peer_the_others_need_longer(share: float, expected: float | None) -> None:
    """Check a run of 1,000 s: with half of the tokens, a peer halves its time."""
    assert sooner_s(10_000, 10.0, share) == (None if expected is None else pytest.approx(expected))


def test_at_an_unknown_speed_nothing_is_claimed() -> None:
    assert sooner_s(10_000, 0.0, 0.5) is None
    table = ContributionTable()
    table.take(Contribution("a", tokens=50))
    table.observe(100.0, 1000.0)
    assert by_peer(table)["a"]["sooner_s"] is None
    assert by_peer(table)["a"]["share"] == 0.5


def test_shares_are_of_all_tokens_and_the_largest_is_first() -> None:
    table = measured()
    table.take(Contribution("a", "fox", tokens=1500, trained_s=60.0))
    table.take(Contribution("b", tokens=3000))
    found = table.document(12_000, {"a"})
    assert [(row["id"], row["share"], row["here"]) for row in found["rows"]] == [("b", 0.5, False), ("a", 0.25, True)]
    assert found["others_tokens"] == 1500.0
    assert found["tokens_per_s"] == pytest.approx(10.0)
    assert found["rows"][0]["sooner_s"] == pytest.approx(1200.0)
    assert found["rows"][1]["sooner_s"] == pytest.approx(400.0)
    assert found["rows"][1]["trained_s"] == 60.0


def test_claims_beyond_the_progress_make_shares_smaller_and_never_more_than_all() -> None:
    table = measured()
    for peer in ("a", "b"):
        table.take(Contribution(peer, tokens=6000))
    assert [row["share"] for row in by_peer(table).values()] == [0.5, 0.5]
    assert table.document(12_000, ())["others_tokens"] == 0.0


def test_a_peer_alone_has_nobody_to_compare_with() -> None:
    table = measured()
    table.take(Contribution("a", tokens=6000))
    assert by_peer(table)["a"]["share"] == 1.0
    assert by_peer(table)["a"]["sooner_s"] is None


def test_what_was_reported_never_falls() -> None:
    """Check a peer that returns with an older checkpoint, no nickname and another partner's signature."""
    table = ContributionTable()
    table.take(Contribution("a", "fox", 100, 50.0, 90, ("b",), 10.0))
    table.take(Contribution("a", "", 40, None, 30, ("c",), 20.0))
    assert table.rows["a"] == Contribution("a", "fox", 100, 50.0, 90, ("b", "c"), 20.0, observed_at=10.0)


def trained(table: ContributionTable, peer: str, times: int, begin: float = 1000.0) -> None:
    """Report work that grows, as often as counts as an observation."""
    for each in range(times + 1):
        table.take(Contribution(peer, tokens=100 * (1 + each), last_at=begin + OBSERVATION_S * each))


def test_work_is_observed_when_it_grew_once_in_a_while() -> None:
    table = ContributionTable()
    trained(table, "a", 3)
    for at in (1095.0, 1100.0, 1119.0):  # too soon
        table.take(Contribution("a", tokens=int(at), last_at=at))
    table.take(Contribution("a", tokens=50, last_at=2000.0))  # no more work
    assert table.rows["a"].observations == 3
    table.take(Contribution("a", tokens=5000, last_at=10.0))  # after the clock was set back
    assert table.rows["a"].observations == 4


def test_a_crowd_that_signs_for_itself_displaces_nobody_who_was_seen_at_work() -> None:
    table = ContributionTable()
    honest = [f"honest{each}" for each in range(MOST_CONTRIBUTORS - 1)]
    for at in (0.0, 2 * OBSERVATION_S):
        for peer in honest:
            table.take(Contribution(peer, tokens=100 + int(at), last_at=1000.0 + at))
    for each in range(2 * MOST_CONTRIBUTORS):
        table.take(Contribution(f"liar{each}", tokens=10**9, signed_tokens=10**9, last_at=2000.0 + each))
    assert len(table.rows) == MOST_CONTRIBUTORS
    assert set(honest) <= table.rows.keys()


def test_own_work_comes_first() -> None:
    table = measured()
    table.take(Contribution("me", tokens=6000, is_own=True))
    trained(table, "b", 500)
    assert [row["tokens"] for row in by_peer(table).values()] == [6000, 6000]


def test_all_claims_together_count_twice_the_progress_those_seen_most_first() -> None:
    """Check that a crowd takes no tokens from a peer that was seen at work, and at most halves its share."""
    table = measured()
    trained(table, "a", 29)
    for each in range(100):
        table.take(Contribution(f"key{each}", tokens=12_000, signed_tokens=12_000, signers=("x",)))
    table.take(Contribution("modest", tokens=500))
    rows = by_peer(table)
    assert (rows["a"]["tokens"], rows["modest"]["tokens"]) == (3000, 500)
    assert rows["a"]["share"] == 0.25
    assert sum(row["tokens"] for row in rows.values()) == MOST_TIMES * 6000
    assert all(row["signed_tokens"] <= row["tokens"] for row in rows.values())


def test_only_time_that_was_observed_is_measured() -> None:
    """Check looks between two steps, a long pause, in which it grew unseen, and a clock that is set back."""
    table = ContributionTable()
    for at, progress in ((0.0, 500.0), (1.0, 500.0), (30.0, 800.0), (31.0, 800.0), (60.0, 800.0), (90.0, 1400.0)):
        table.observe(progress, at)
    assert (table.measured_tokens, table.measured_s, table.tokens_per_s) == (900.0, 90.0, 10.0)
    table.observe(9000.0, 90.0 + GAP_S + 1)
    table.observe(9300.0, 20.0)
    assert table.tokens_per_s == 10.0
    assert table.progress == 9000.0  # no time has passed
    table.observe(0.0, 50.0)  # nobody is left who knows
    assert table.progress == 9000.0


def test_a_first_peers_false_progress_goes_when_others_know_better() -> None:
    """Check a claim of the whole run at once, and one that grows slowly and so has a measured speed."""
    honest = [(2000.0 + 30.0 * each, 100.0 * each) for each in range(1, 41)]
    for false in ([(1000.0, 1e9)], [(1000.0 + 30.0 * each, 1e9 + 10.0 * each) for each in range(20)]):
        table = ContributionTable()
        for at, progress in [*false, *honest]:
            table.observe(progress, at)
        assert table.progress == 4000.0
        assert table.tokens_per_s == pytest.approx(100 / 30)


@pytest.mark.parametrize("claim", [1e9, 1.0])
def test_a_later_majority_moves_progress_no_faster_than_the_speed_allows(claim: float) -> None:
    """Check a false claim for a minute, and that nothing is left of it a minute after."""
    table = measured(tokens=6e5, seconds=60_000.0)
    for second in range(3, 61, 3):
        table.observe(claim, 61_000.0 + second)
    assert abs(table.progress - 6e5) < 1.1 * MOST_SPEED * 10.0 * 60
    for second in range(63, 151, 3):
        table.observe(6e5, 61_000.0 + second)
    assert table.progress == 6e5
    assert table.tokens_per_s == pytest.approx(10.0, rel=0.01)


def test_a_stranger_alone_after_a_pause_lowers_progress_no_faster() -> None:
    table = measured(tokens=6e5, seconds=60_000.0)
    for second in range(3, 61, 3):
        table.observe(1.0, 1e6 + second)
    assert 0 < 6e5 - table.progress < MOST_SPEED * 10.0 * 60


def test_a_swarm_that_trained_while_nobody_looked_is_followed() -> None:
    table = measured(tokens=6e5, seconds=60_000.0)
    table.observe(6e6, 1e6)
    assert table.progress == 6e6
    assert table.tokens_per_s == 10.0


def test_a_swarm_that_grows_is_followed() -> None:
    """Check a slow peer that was alone for a quarter of an hour, then peers that are a thousand times as fast."""
    table = measured(tokens=900.0, seconds=900.0)
    for second in range(30, 1230, 30):
        table.observe(900.0 + 1000.0 * second, 1900.0 + second)
    assert table.progress == 900.0 + 1000.0 * 1200


def test_a_table_survives_a_restart(tmp_path: Path) -> None:
    table = measured()
    table.take(Contribution("a", "fox", 100, 50.0, 90, ("b",), 10.0))
    table.take(Contribution("me", "own", 50, 20.0, is_own=True))
    trained(table, "b", 7)
    PageMemory("run", tmp_path, table).save()
    again = PageMemory.load(tmp_path, "run").contributions
    assert again == table
    assert again.document(12_000, ()) == table.document(12_000, ())
    again.observe(1e6, 1e9)  # the first observation after a restart measures nothing
    assert again.measured_s == table.measured_s


def test_what_strangers_send_is_bounded() -> None:
    told = {"contributed": 1e15, "trained_s": -5, "receipt": b"x" * 10_000}
    row = reported(RunId("ab" * 32), PeerId("a" * 999), told, "n\u202e\n" + "x" * 99, 250.0, 7.0)
    assert row is not None
    assert (row.tokens, row.signed_tokens, row.trained_s, row.signers) == (MOST_TIMES * 250, 0, None, ())
    assert (len(row.peer), len(row.nickname), row.last_at) == (128, 32, 7.0)
    assert row.nickname.isprintable()
