"""The reason of a failed dial is repeated as long as p2pd's backoff for the address lasts."""

from __future__ import annotations

from p2ptrain.base.ids import PeerId
from p2ptrain.net.p2pd.error_text import LONGEST_S, MAX_LETTERS, MAX_REMEMBERED, BackoffReasons

ONE, OTHER = PeerId("one"), PeerId("other")
HERE, THERE = "/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/2/p2p/abc/p2p-circuit"


def failed(**reasons: str) -> str:
    places = {"here": HERE, "there": THERE}
    return "failed to dial: all dials failed" + "".join(f" * [{places[at]}] {why}" for at, why in reasons.items())


def test_what_came_before_a_backoff_is_told_behind_it() -> None:
    reasons = BackoffReasons()
    first = failed(here="dial tcp4: connect: connection refused", there="peer id mismatch: expected a, but b")
    assert reasons.completed(ONE, first) == first
    both = reasons.completed(ONE, failed(here="dial backoff", there="dial backoff"))
    assert both == failed(
        here="dial backoff after: dial tcp4: connect: connection refused",
        there="dial backoff after: peer id mismatch: expected a, but b",
    )
    newer = failed(here="i/o timeout", there="dial backoff after: peer id mismatch: expected a, but b")
    assert reasons.completed(ONE, failed(here="i/o timeout", there="dial backoff")) == newer
    assert reasons.completed(ONE, failed(here="dial backoff")) == failed(here="dial backoff after: i/o timeout")


def test_what_was_not_heard_is_not_told() -> None:
    reasons = BackoffReasons()
    reasons.completed(ONE, failed(here="i/o timeout"))
    for words in failed(here="dial backoff"), "failed to find any peer in table", "":
        assert reasons.completed(OTHER, words) == words
    assert reasons.completed(ONE, failed(there="dial backoff")) == failed(there="dial backoff")


def test_who_was_reached_meanwhile_has_no_reason() -> None:
    reasons = BackoffReasons()
    for peer in ONE, OTHER:
        reasons.completed(peer, failed(here="connection refused", there="i/o timeout"))
    reasons.forget(ONE)
    bare = failed(here="dial backoff", there="dial backoff")
    assert reasons.completed(ONE, bare) == bare
    assert "after: connection refused" in reasons.completed(OTHER, bare)


def test_what_was_heard_longer_ago_than_a_backoff_lasts_is_not_why() -> None:
    now = 0.0
    reasons = BackoffReasons(lambda: now)
    reasons.completed(ONE, failed(here="connection refused"))
    now = LONGEST_S
    assert "after: connection refused" in reasons.completed(ONE, failed(here="dial backoff"))
    now = LONGEST_S + 1
    assert "after" not in reasons.completed(ONE, failed(here="dial backoff"))


def test_little_is_remembered() -> None:
    reasons = BackoffReasons()
    reasons.completed(ONE, failed(here="x" * 10 * MAX_LETTERS))
    assert reasons.completed(ONE, failed(here="dial backoff")).endswith(f": {'x' * MAX_LETTERS}")
    for number in range(MAX_REMEMBERED):
        reasons.completed(PeerId(str(number)), failed(here="i/o timeout"))
    assert len(reasons._heard) == MAX_REMEMBERED
    assert reasons.completed(ONE, failed(here="dial backoff")) == failed(here="dial backoff")
