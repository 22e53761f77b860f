"""Receipts: what two honest peers agree on, and what a false claim does not get."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from people import GUEST, ISSUER, NOW, OTHER_RUN, RUN, STRANGER, Somebody

from p2ptrain import receipts
from p2ptrain.base.errors import RemoteError
from p2ptrain.receipts import MAX_RECEIPT_BYTES, Book, Objection, Receipt, from_json, to_json, total

AMBER, BIRCH = GUEST, ISSUER
PER_STEP = 100


def book(who: Somebody) -> Book:
    return Book(RUN, who.peer)


def pair(exchanges: int = 1) -> tuple[Book, Book]:
    """Return two receipt books after some exchanges with each other."""
    amber, birch = book(AMBER), book(BIRCH)
    for _ in range(exchanges):
        amber.exchanged(BIRCH.peer, 10, 20, NOW)
        birch.exchanged(AMBER.peer, 20, 10, NOW)
    return amber, birch


def settle(one: Book, who: Somebody, other: Book, partner: Somebody, now: float, step: int = 1) -> Receipt | Objection:
    """Make one claim, have it judged, and take the answer."""
    claim = one.claim(partner.peer, step, step * PER_STEP, now, who.state, is_last=True)
    assert claim is not None
    objection = other.judge(Receipt.decode(claim.encode()), who.peer, now)
    if objection is not None:
        return objection
    receipt = one.agreed(claim, claim.countersigned(RUN, partner.state).countersignature)
    assert receipt is not None
    return receipt


def test_honest_books_agree() -> None:
    amber, birch = pair(3)
    birch.served(AMBER.peer, 1000, NOW)
    amber.was_served(BIRCH.peer, 1000, NOW)
    got = settle(amber, AMBER, birch, BIRCH, NOW + 60)
    assert isinstance(got, Receipt)
    assert (got.exchanges, got.sent, got.received, got.served) == (3, 30, 60, 0)
    assert (got.since, got.until) == (NOW, NOW + 60)
    got = settle(birch, BIRCH, amber, AMBER, NOW + 60)
    assert isinstance(got, Receipt)
    assert (got.exchanges, got.sent, got.received, got.served) == (3, 60, 30, 1000)
    assert amber.claim(BIRCH.peer, 1, 1, NOW + 61, AMBER.state) is None  # everything is claimed


def test_any_interleaving_claims_everything_once() -> None:
    """Check exchanges between claims and lost answers: in the end both have proved exactly what was transferred."""
    for seed in range(30):
        rng = random.Random(seed)
        books, names = list(pair(0)), [AMBER, BIRCH]
        kept: list[list[Receipt]] = [[], []]
        exchanges, now = 0, float(NOW)
        for turn in range(80):
            now += rng.uniform(0, 3)
            ending = turn >= 60  # from then on nothing is new, and nothing is lost
            if not ending and rng.random() < 0.6:
                exchanges += 1
                sent = rng.randrange(1000)
                books[0].exchanged(BIRCH.peer, sent, 7, now)
                books[1].exchanged(AMBER.peer, 7, sent, now)
                continue
            one = rng.randrange(2)
            claim = books[one].claim(names[1 - one].peer, 1, 1, now, names[one].state, is_last=True)
            if claim is None:
                continue
            assert books[1 - one].judge(claim, names[one].peer, now) is None
            if ending or rng.random() < 0.7:  # else the answer is lost
                answer = claim.countersigned(RUN, names[1 - one].state).countersignature
                receipt = books[one].agreed(claim, answer)
                assert receipt is not None
                kept[one].append(receipt)
        for one, who in enumerate(names):
            proved = total(kept[one], RUN, who.peer)
            assert proved.faulty == {}
            assert proved.exchanges == exchanges


def test_a_lost_answer_is_given_again() -> None:
    amber, birch = pair(2)
    claim = amber.claim(BIRCH.peer, 1, 1, NOW, AMBER.state, is_last=True)
    assert claim is not None
    assert birch.judge(claim, AMBER.peer, NOW) is None
    assert birch.judge(claim, AMBER.peer, NOW + 5) is None


def claim_of(**changes: Any) -> Receipt:
    honest = Receipt(AMBER.peer, BIRCH.peer, NOW, NOW + 1, 5, 5 * PER_STEP, 2, 20, 40, 0)
    return dataclasses.replace(honest, **changes).signed(RUN, AMBER.state)


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        (claim_of(), None),
        (claim_of(exchanges=3), Objection.MORE),
        (claim_of(sent=21), Objection.MORE),
        (claim_of(received=41), Objection.MORE),
        (claim_of(served=1), Objection.MORE),
        (claim_of(until=NOW + 302), Objection.TIMES),
        (claim_of(until=NOW - 1), Objection.TIMES),
        (claim_of(until=NOW), Objection.TIMES),  # an empty time span overlaps none
        (claim_of(partner=STRANGER.peer), Objection.NOT_GENUINE),
        (claim_of(peer=STRANGER.peer), Objection.NOT_GENUINE),
        (dataclasses.replace(claim_of(), exchanges=1), Objection.NOT_GENUINE),
        (dataclasses.replace(claim_of(), signature=bytes(64)), Objection.NOT_GENUINE),
    ],
)
def test_what_is_countersigned(claim: Receipt, said: Objection | None) -> None:
    _, birch = pair(2)
    assert birch.judge(claim, AMBER.peer, NOW) is said


def test_nothing_is_claimed_twice() -> None:
    _, birch = pair(2)
    assert birch.judge(claim_of(), AMBER.peer, NOW) is None
    assert birch.judge(claim_of(since=NOW + 1, until=NOW + 2), AMBER.peer, NOW) is Objection.MORE
    birch.exchanged(AMBER.peer, 20, 10, NOW)
    again = claim_of(exchanges=1, sent=10, received=20)
    assert birch.judge(again, AMBER.peer, NOW) is Objection.TIMES  # its span overlaps the last
    later = dataclasses.replace(again, since=NOW + 1, until=NOW + 2).signed(RUN, AMBER.state)
    assert birch.judge(later, AMBER.peer, NOW) is None


def test_a_partner_that_began_anew_is_not_asked_for_the_old_for_ever() -> None:
    amber, _ = pair(5)
    birch = book(BIRCH)
    claimed = []
    while (claim := amber.claim(BIRCH.peer, 1, 1, NOW + 1, AMBER.state, is_last=True)) is not None:
        claimed.append(claim.exchanges)
        assert birch.judge(claim, AMBER.peer, NOW + 1) is Objection.MORE
        amber.objected(claim, NOW + 1)
    assert claimed == [5, 5, 4, 3, 1]
    assert amber.claim(BIRCH.peer, 1, 1, NOW + 3, AMBER.state, is_last=True) is None
    amber.exchanged(BIRCH.peer, 10, 20, NOW + 4)
    birch.exchanged(AMBER.peer, 20, 10, NOW + 4)
    assert isinstance(settle(amber, AMBER, birch, BIRCH, NOW + 5), Receipt)


def test_one_objection_may_be_chance() -> None:
    """Check one rejected claim: the partner counts an exchange a moment after us."""
    amber, birch = pair(1)
    amber.exchanged(BIRCH.peer, 10, 20, NOW)
    claim = amber.claim(BIRCH.peer, 1, 1, NOW + 1, AMBER.state, is_last=True)
    assert claim is not None
    assert birch.judge(claim, AMBER.peer, NOW + 1) is Objection.MORE
    amber.objected(claim, NOW + 1)
    birch.exchanged(AMBER.peer, 20, 10, NOW + 1)
    got = settle(amber, AMBER, birch, BIRCH, NOW + 2)
    assert isinstance(got, Receipt)
    assert got.exchanges == 2


def test_what_a_donor_counted_twice_does_not_cost_it_its_exchanges() -> None:
    """Check a piece that was given but not used, since another donor's copy came first."""
    amber, birch = pair(3)
    amber.served(BIRCH.peer, 2000, NOW)
    birch.was_served(AMBER.peer, 1000, NOW)
    claim = amber.claim(BIRCH.peer, 1, 1, NOW + 1, AMBER.state, is_last=True)
    assert claim is not None
    assert birch.judge(claim, AMBER.peer, NOW + 1) is Objection.MORE
    amber.objected(claim, NOW + 1)
    got = settle(amber, AMBER, birch, BIRCH, NOW + 2)
    assert isinstance(got, Receipt)
    assert (got.exchanges, got.served) == (3, 0)
    assert (
        amber.claim(BIRCH.peer, 1, 1, NOW + 3, AMBER.state, is_last=True) is None
    )  # what it gave is no longer claimed
    for book, partner in ((amber, BIRCH), (birch, AMBER)):
        book.exchanged(partner.peer, 10, 10, NOW + 4)
    claim = amber.claim(BIRCH.peer, 1, 1, NOW + 5, AMBER.state, is_last=True)
    assert claim is not None
    assert (claim.exchanges, claim.served) == (1, 0)


def test_a_stranger_gets_nothing() -> None:
    _, birch = pair(2)
    stranger = dataclasses.replace(claim_of(), peer=STRANGER.peer).signed(RUN, STRANGER.state)
    assert birch.judge(stranger, STRANGER.peer, NOW) is Objection.MORE
    assert birch.judge(claim_of(), STRANGER.peer, NOW) is Objection.NOT_GENUINE


def test_a_partner_that_signs_something_else_changes_nothing() -> None:
    amber, birch = pair(2)
    claim = amber.claim(BIRCH.peer, 1, 1, NOW, AMBER.state, is_last=True)
    assert claim is not None
    assert amber.agreed(claim, bytes(64)) is None
    assert amber.agreed(claim, claim.countersigned(OTHER_RUN, BIRCH.state).countersignature) is None
    assert amber.agreed(claim, claim.countersigned(RUN, STRANGER.state).countersignature) is None
    assert isinstance(settle(amber, AMBER, birch, BIRCH, NOW), Receipt)


def test_an_exchange_that_only_one_side_completed_costs_no_other() -> None:
    amber, birch = pair(4)
    amber.exchanged(BIRCH.peer, 15, 15, NOW)
    for _ in range(2):
        assert settle(amber, AMBER, birch, BIRCH, NOW + 60) is Objection.MORE
        claim = amber.claim(BIRCH.peer, 1, 1, NOW + 60, AMBER.state)
        assert claim is not None
        amber.objected(claim, NOW + 60)
    got = settle(amber, AMBER, birch, BIRCH, NOW + 60)
    assert isinstance(got, Receipt)
    assert (got.exchanges, got.sent, got.received) == (4, 40, 75)
    assert amber.open() == []


def test_partners_are_asked_when_an_exchange_is_old_enough_and_ever_later_if_in_vain() -> None:
    amber = book(AMBER)
    amber.exchanged(BIRCH.peer, 1, 1, NOW)
    asked = []
    for at in range(600):
        for partner in amber.due(NOW + at):
            claim = amber.claim(partner, 1, 1, NOW + at, AMBER.state)
            assert claim is not None
            asked.append(at)
            amber.unanswered(claim, NOW + at)
    assert asked == [30, 35, 45, 65, 105]
    assert amber.open() == []
    amber.exchanged(STRANGER.peer, 1, 1, NOW)
    assert amber.due(NOW - 3600) == [STRANGER.peer]  # the clock was set back
    assert amber.claim(STRANGER.peer, 1, 1, NOW + 1, AMBER.state) is None  # the partner may not have counted it yet


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts, "MAX_PARTNERS", 2)
    amber = book(AMBER)
    for number in range(5):
        amber.exchanged(partner(number), 1, 1, NOW)
    assert len(amber._accounts) == 2


def partner(number: int) -> Any:
    from people import somebody

    return somebody(30 + number).peer


def finished(**changes: Any) -> Receipt:
    return claim_of(**changes).countersigned(RUN, BIRCH.state)


def test_totals_count_what_holds_and_say_what_does_not() -> None:
    good, later = finished(), finished(since=NOW + 1, until=NOW + 9, tokens=600, served=5)
    own = dataclasses.replace(claim_of(), partner=AMBER.peer).signed(RUN, AMBER.state)
    bad = [
        dataclasses.replace(good, sent=10**6),  # increased after signing
        dataclasses.replace(good, countersignature=bytes(64)),
        finished(since=NOW, until=NOW + 5),  # overlaps
        finished(since=NOW + 9, until=NOW + 9),  # an empty span, which could be repeated a thousand times
        own.countersigned(RUN, AMBER.state),
        claim_of().countersigned(OTHER_RUN, BIRCH.state),
    ]
    proved = total([later, good, *bad], RUN, AMBER.peer)
    assert (proved.receipts, proved.exchanges, proved.sent, proved.received, proved.served) == (2, 4, 40, 80, 5)
    assert (proved.tokens, proved.first, proved.last) == (600, NOW, NOW + 9)
    assert proved.partners == {BIRCH.peer: 4}
    assert sum(proved.faulty.values()) == len(bad)
    assert total([good], OTHER_RUN, AMBER.peer).receipts == 0
    assert total([good], RUN, BIRCH.peer).receipts == 0


def test_they_read_back_and_nothing_else_does() -> None:
    receipt = finished(tokens=2**53, sent=2**53)
    assert Receipt.decode(receipt.encode()) == dataclasses.replace(receipt, countersignature=b"")
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
