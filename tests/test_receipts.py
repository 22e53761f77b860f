"""Receipts: what a partner signs, and what a false receipt does not get."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from people import GUEST, ISSUER, NOW, OTHER_RUN, RUN, STRANGER, Somebody, somebody

from p2ptrain import receipts
from p2ptrain.base.errors import RemoteError
from p2ptrain.base.ids import PeerId
from p2ptrain.receipts import (
    LONGEST_PERIOD_S,
    MAX_RECEIPT_BYTES,
    PERIOD_S,
    Book,
    Receipt,
    from_json,
    newest,
    to_json,
    total,
)

AMBER, BIRCH = GUEST, ISSUER
LATER = NOW + 10_000


def book(who: Somebody) -> Book:
    return Book(RUN, who.peer, who.state)


def signed(birch: Book, step: int, tokens: int, now: float) -> Receipt:
    """Return birch's receipt for amber."""
    found = birch.receipt(AMBER.peer, step, tokens, now)
    assert found is not None
    assert Receipt.decode(found.encode()) == found
    return found


def test_each_receipt_has_everything_since_the_first_exchange() -> None:
    birch = book(BIRCH)
    birch.exchanged(AMBER.peer, 20, 10, NOW)
    first = signed(birch, 1, 100, NOW + 60)
    assert (first.exchanges, first.sent, first.received, first.served) == (1, 10, 20, 0)
    assert (first.since, first.until, first.step, first.tokens) == (NOW, NOW + 60, 1, 100)
    birch.exchanged(AMBER.peer, 20, 10, NOW + 70)
    birch.was_served(AMBER.peer, 1000, NOW + 70)
    second = signed(birch, 2, 200, NOW + 90)
    assert (second.exchanges, second.sent, second.received, second.served) == (2, 20, 40, 1000)
    assert birch.signed() == [second]
    for kept in ([first, second], [second]):  # a lost receipt costs nothing
        proved = total(kept, RUN, AMBER.peer, LATER)
        assert (proved.exchanges, proved.sent, proved.received, proved.served, proved.tokens) == (2, 20, 40, 1000, 200)
        assert (proved.receipts, proved.first, proved.last) == (len(kept), NOW, NOW + 90)


def test_a_partner_that_began_anew_has_another_account() -> None:
    kept = []
    for start in (NOW, NOW + 1000):
        birch = book(BIRCH)
        for at in range(3):
            birch.exchanged(AMBER.peer, 20, 10, start + at)
        kept.append(signed(birch, 1, 100, start + 60))
    assert total(kept, RUN, AMBER.peer, LATER).partners == {BIRCH.peer: 6}


def test_a_peer_that_did_nothing_gets_no_receipt() -> None:
    birch = book(BIRCH)
    assert birch.receipt(STRANGER.peer, 1, 10**9, NOW) is None
    birch.served(STRANGER.peer, 1000, NOW)  # it got weights, and gave none
    assert birch.receipt(STRANGER.peer, 1, 10**9, NOW) is None


def test_partners_are_due_once_when_an_exchange_is_old_enough() -> None:
    amber = book(AMBER)
    amber.exchanged(BIRCH.peer, 1, 1, NOW)
    assert (amber.due(NOW + PERIOD_S - 1), amber.open()) == ([], [BIRCH.peer])
    amber.exchanged(BIRCH.peer, 1, 1, NOW + PERIOD_S - 1)
    assert amber.due(NOW + PERIOD_S) == [BIRCH.peer]
    assert amber.due(NOW - 3600) == [BIRCH.peer]  # the clock was set back
    amber.close(BIRCH.peer)
    assert amber.due(NOW + 1e6) == amber.open() == []
    amber.served(BIRCH.peer, 1000, NOW + 1e6)
    assert amber.open() == [BIRCH.peer]


def test_a_partner_that_does_not_answer_is_asked_less_and_less_often() -> None:
    amber, now = book(AMBER), float(NOW)
    for each in (STRANGER, BIRCH):
        amber.exchanged(each.peer, 1, 1, now)
    for failures in range(12):
        period_s = min(PERIOD_S * 2**failures, LONGEST_PERIOD_S)
        assert BIRCH.peer not in amber.due(now + period_s - 1)
        now += period_s
        assert BIRCH.peer in amber.due(now)
        amber.close(BIRCH.peer)
        amber.reopen(BIRCH.peer, now)
    assert amber.open() == [STRANGER.peer, BIRCH.peer]  # who answers comes first
    amber.exchanged(BIRCH.peer, 1, 1, now)
    assert amber.open() == [BIRCH.peer, STRANGER.peer]
    assert BIRCH.peer in amber.due(now + PERIOD_S)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts, "MAX_PARTNERS", 2)
    amber = book(AMBER)
    for number in range(5):
        amber.exchanged(somebody(30 + number).peer, 1, 1, NOW)
    assert len(amber.open()) == 2


def finished(signer: Somebody = BIRCH, run: Any = RUN, **changes: Any) -> Receipt:
    honest = Receipt(AMBER.peer, BIRCH.peer, NOW, NOW + 1, 5, 500, 2, 20, 40, 0)
    return dataclasses.replace(honest, **changes).signed(run, signer.state)


def counting() -> Book:
    """Return a book with the exchanges of ``finished``."""
    amber = book(AMBER)
    for _ in range(2):
        amber.exchanged(BIRCH.peer, 10, 20, NOW)
    return amber


@pytest.mark.parametrize(
    ("receipt", "is_ours"),
    [
        (finished(), True),
        (finished(exchanges=4, sent=40, received=80), True),  # some failed here at the last moment
        (finished(exchanges=5), False),
        (finished(sent=41), False),
        (finished(received=81), False),
        (finished(served=1), False),
        (finished(until=NOW + 300), True),
        (finished(until=NOW + 301), False),
        (finished(until=2**53), False),
        (finished(until=NOW), False),
        (finished(until=0), False),
        (finished(tokens=501), False),
        (finished(step=6), False),
        (finished(peer=STRANGER.peer), False),
        (finished(partner=STRANGER.peer), False),
        (finished(STRANGER, partner=STRANGER.peer), False),
        (finished(STRANGER), False),
        (finished(run=OTHER_RUN), False),
        (dataclasses.replace(finished(), sent=21), False),
        (dataclasses.replace(finished(), signature=bytes(64)), False),
    ],
)
def test_only_what_the_partner_signed_for_us_is_ours(receipt: Receipt, is_ours: bool) -> None:
    assert counting().is_ours(receipt, BIRCH.peer, 5, 500, NOW) is is_ours


def test_a_stranger_can_sign_nothing_for_us() -> None:
    receipt = finished(STRANGER, partner=STRANGER.peer)
    assert not counting().is_ours(receipt, STRANGER.peer, 5, 500, NOW)


@pytest.mark.parametrize(
    ("receipt", "is_ours"),
    [
        (finished(until=NOW + 9), True),
        (finished(until=NOW + 9, exchanges=1), False),
        (finished(until=NOW + 9, sent=19), False),
        (finished(since=NOW - 9, until=NOW + 9), False),  # overlaps
        (finished(since=NOW - 9, until=NOW - 8), False),
        (finished(since=NOW + 1, until=NOW + 9), True),
        (finished(since=NOW + 1, until=NOW + 9, exchanges=3), False),  # everything again, and more
    ],
)
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_receipt_takes_nothing_back_and_claims_nothing_twice(
    receipt: Receipt, is_ours: bool, is_restarted: bool
) -> None:
    amber = counting()
    if is_restarted:
        amber = Book(RUN, AMBER.peer, AMBER.state, [finished()])
        amber.exchanged(BIRCH.peer, 10, 20, NOW)
    else:
        amber.accept(finished())
    assert amber.is_ours(receipt, BIRCH.peer, 5, 500, NOW) is is_ours


class Sides:
    """Amber and birch in any interleaving of exchanges, receipts, lost answers and restarts of either side."""

    def __init__(self) -> None:
        self.now = NOW
        self.kept: list[Receipt] = []
        """Amber's ledger."""
        self.amber, self.birch = book(AMBER), book(BIRCH)
        self.counted = 0
        """Exchanges that birch has counted in this session."""
        self.proven = 0
        """Exchanges that birch signed in earlier sessions, and amber accepted."""
        self.newest = 0
        """Exchanges of the newest receipt of this session that amber accepted."""

    def exchange(self) -> None:
        self.amber.exchanged(BIRCH.peer, 10, 20, self.now)
        self.birch.exchanged(AMBER.peer, 20, 10, self.now)
        self.counted += 1

    def sign(self, is_lost: bool = False) -> None:
        receipt = self.birch.receipt(AMBER.peer, 1, 100, self.now)
        if receipt is not None and not is_lost and self.amber.is_ours(receipt, BIRCH.peer, 1, 100, self.now):
            self.amber.accept(receipt)
            self.kept.append(receipt)
            self.newest = self.counted

    def restart_birch(self) -> None:
        self.birch, self.proven = book(BIRCH), self.proven + self.newest
        self.counted = self.newest = 0

    def restart_amber(self) -> None:
        self.kept = newest(self.kept)  # as the ledger is rewritten
        self.amber = Book(RUN, AMBER.peer, AMBER.state, self.kept)

    def check(self) -> None:
        proved = total(self.kept, RUN, AMBER.peer, self.now)
        assert proved.faulty == {}
        assert (proved.exchanges, proved.sent, proved.received) == tuple(
            factor * (self.proven + self.newest) for factor in (1, 10, 20)
        )


STEPS = ["exchange", "sign", "lose", "restart amber", "restart birch"]


@given(some.lists(some.sampled_from(STEPS), max_size=60))
def test_any_interleaving_claims_everything_at_most_once_and_loses_nothing_that_was_signed(steps: list[str]) -> None:
    sides = Sides()
    for step in steps:
        sides.now += 2
        match step:
            case "exchange":
                sides.exchange()
            case "sign" | "lose":
                sides.sign(is_lost=step == "lose")
            case "restart amber":
                sides.restart_amber()
            case "restart birch":
                sides.restart_birch()
        sides.check()
    for _ in range(sides.counted - sides.newest + 1):  # what was unsigned when amber restarted takes as many again
        sides.now += 2
        sides.exchange()
        sides.sign()
    sides.check()
    assert sides.newest == sides.counted


@given(some.lists(some.sampled_from(STEPS[:2]), max_size=60))
def test_without_restarts_every_receipt_is_accepted(steps: list[str]) -> None:
    sides = Sides()
    for step in steps:
        sides.now += 2
        if step == "exchange":
            sides.exchange()
        else:
            sides.sign()
            assert sides.newest == sides.counted


@given(some.permutations([(until, count) for until in (1, 2, 3) for count in (1, 2, 3)]))
def test_no_order_of_receipts_lowers_what_one_of_them_proved(order: list[tuple[int, int]]) -> None:
    lying = [finished(until=NOW + until, exchanges=count, sent=10 * count) for until, count in order]
    assert total(lying, RUN, AMBER.peer, LATER).exchanges == 3
    assert total(newest(lying), RUN, AMBER.peer, LATER).sent == 30


def test_totals_count_what_holds_and_say_what_does_not() -> None:
    good, later = finished(), finished(since=NOW + 1, until=NOW + 9, tokens=600, served=5)
    bad = [
        dataclasses.replace(good, sent=10**6),  # increased after signing
        finished(since=NOW + 5, until=NOW + 6),  # overlaps
        finished(STRANGER),
        finished(AMBER, partner=AMBER.peer),
        finished(peer=STRANGER.peer),
        finished(run=OTHER_RUN),
        finished(since=NOW + 20, until=0),
        finished(since=NOW + 20, until=2**53),
    ]
    proved = total([later, good, good, *bad], RUN, AMBER.peer, LATER)
    assert (proved.exchanges, proved.sent, proved.received, proved.served) == (4, 40, 80, 5)
    assert (proved.tokens, proved.first, proved.last) == (600, NOW, NOW + 9)
    assert proved.partners == {BIRCH.peer: 4}
    assert sum(proved.faulty.values()) == len(bad)
    assert total([good], OTHER_RUN, AMBER.peer, LATER).receipts == 0
    assert total([good], RUN, PeerId(BIRCH.peer), LATER).receipts == 0


def test_they_read_back_and_nothing_else_does() -> None:
    receipt = finished(tokens=2**53, sent=2**53)
    assert Receipt.decode(receipt.encode()) == receipt
    assert len(receipt.encode()) <= MAX_RECEIPT_BYTES
    assert from_json(to_json(receipt)) == receipt
    for spoil in (
        {"tokens": -1},
        {"tokens": "1"},
        {"tokens": True},
        {"peer": "fox"},
        {"signature": "zz"},
        {"step": 1.5},
    ):
        with pytest.raises(RemoteError):
            from_json(to_json(receipt) | spoil)
    for body in (b"", receipt.encode()[:-1], receipt.encode() + b"\0", b"\x90"):
        with pytest.raises(RemoteError):
            Receipt.decode(body)
