"""Receipts: what a partner signs, and what a false receipt does not get."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from people import GUEST, ISSUER, NOW, OTHER_RUN, RUN, STRANGER, Somebody, somebody

from p2ptrain import receipts
from p2ptrain.base.errors import RemoteError
from p2ptrain.base.ids import PeerId
from p2ptrain.receipts import MAX_RECEIPT_BYTES, PERIOD_S, Book, Receipt, from_json, to_json, total

AMBER, BIRCH = GUEST, ISSUER


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
        proved = total(kept, RUN, AMBER.peer)
        assert (proved.exchanges, proved.sent, proved.received, proved.served, proved.tokens) == (2, 20, 40, 1000, 200)
        assert (proved.receipts, proved.first, proved.last) == (len(kept), NOW, NOW + 90)


def test_a_partner_that_began_anew_has_another_account() -> None:
    kept = []
    for start in (NOW, NOW + 1000):
        birch = book(BIRCH)
        for at in range(3):
            birch.exchanged(AMBER.peer, 20, 10, start + at)
        kept.append(signed(birch, 1, 100, start + 60))
    assert total(kept, RUN, AMBER.peer).partners == {BIRCH.peer: 6}


def test_a_peer_that_did_nothing_gets_no_receipt() -> None:
    birch = book(BIRCH)
    assert birch.receipt(STRANGER.peer, 1, 10**9, NOW) is None
    birch.served(STRANGER.peer, NOW)  # it got weights, and gave none
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
    amber.served(BIRCH.peer, NOW + 1e6)
    assert amber.open() == [BIRCH.peer]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts, "MAX_PARTNERS", 2)
    amber = book(AMBER)
    for number in range(5):
        amber.exchanged(somebody(30 + number).peer, 1, 1, NOW)
    assert len(amber.open()) == 2


def finished(signer: Somebody = BIRCH, run: Any = RUN, **changes: Any) -> Receipt:
    honest = Receipt(AMBER.peer, BIRCH.peer, NOW, NOW + 1, 5, 500, 2, 20, 40, 0)
    return dataclasses.replace(honest, **changes).signed(run, signer.state)


@pytest.mark.parametrize(
    ("receipt", "is_ours"),
    [
        (finished(), True),
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
    assert book(AMBER).is_ours(receipt, BIRCH.peer, 5, 500) is is_ours


def test_totals_count_what_holds_and_say_what_does_not() -> None:
    good, later = finished(), finished(since=NOW + 1, until=NOW + 9, tokens=600, served=5)
    bad = [
        dataclasses.replace(good, sent=10**6),  # increased after signing
        finished(since=NOW + 5, until=NOW + 6),  # overlaps
        finished(STRANGER),
        finished(AMBER, partner=AMBER.peer),
        finished(peer=STRANGER.peer),
        finished(run=OTHER_RUN),
    ]
    proved = total([later, good, good, *bad], RUN, AMBER.peer)
    assert (proved.exchanges, proved.sent, proved.received, proved.served) == (4, 40, 80, 5)
    assert (proved.tokens, proved.first, proved.last) == (600, NOW, NOW + 9)
    assert proved.partners == {BIRCH.peer: 4}
    assert sum(proved.faulty.values()) == len(bad)
    assert total([good], OTHER_RUN, AMBER.peer).receipts == 0
    assert total([good], RUN, PeerId(BIRCH.peer)).receipts == 0


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
