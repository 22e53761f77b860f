"""The decision about an offer: each check, and the precedence of two."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
from run_rules import run_rules

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm.matching import OfferView, PlannedView, Violation, answer
from p2ptrain.swarm.messages import MAX_RATIO, DeclineReason, Offer, PeerState, Terms
from p2ptrain.swarm.rules import MAX_EXCHANGES, ProgressBounds

ME, SMALLER, LARGER = PeerId("birch"), PeerId("amber"), PeerId("cedar")
RULES = run_rules(fragment_bytes=(1000,) * 4, fragments_per_exchange=2)
TERMS = Terms(5, 50.0, 1.0, inf, settled=True, state=PeerState.TRAINING)
OFFER = Offer(RULES.run, RULES.protocol, (0, 1, 2), TERMS)
VIEW = OfferView(
    me=ME,
    bounds=ProgressBounds(RULES),
    state=PeerState.TRAINING,
    settled=True,
    progress=50.0,
    effective_progress=50.0,
    distrusts_sender=False,
    is_crossing=False,
    is_offering=False,
    is_engaged=False,
    free_fragments=(3, 2, 1, 0),
    exchanges=0,
    planned=None,
)
PLANNED = PlannedView(fragments=(0, 1, 2), will_offer=True, is_skipped=False, can_meet=True)


def terms(**changes) -> Offer:
    return replace(OFFER, terms=replace(TERMS, **changes))


CHECKS = [
    (terms(weight=2.0), {}, Violation("it claims a mixing weight of 2")),
    (replace(OFFER, run="cd" * 32), {}, DeclineReason.OTHER_RUN),
    (replace(OFFER, protocol=0), {}, DeclineReason.OTHER_PROTOCOL),
    (OFFER, {"state": PeerState.LEAVING}, DeclineReason.LEAVING),
    (OFFER, {"distrusts_sender": True}, DeclineReason.DISTRUSTED),
    (terms(progress=nan), {}, DeclineReason.IMPLAUSIBLE_PROGRESS),
    (OFFER, {"state": PeerState.JOINING}, DeclineReason.CATCHING_UP),
    (terms(progress=300.0), {"settled": False}, DeclineReason.CATCHING_UP),
    (terms(progress=0.0, settled=False), {}, DeclineReason.CATCH_UP_FIRST),
]
"""Checks that planned and unplanned offers share, in the order of their precedence."""


@pytest.mark.parametrize("planned", [None, PLANNED])
@pytest.mark.parametrize(("offer", "changes", "expected"), CHECKS)
def test_each_check_declines(offer, changes, expected, planned):
    assert answer(offer, LARGER, replace(VIEW, planned=planned, **changes)) == expected


def test_the_first_check_decides():
    offer = replace(terms(weight=2.0, progress=nan), run="cd" * 32, protocol=0)
    view = replace(VIEW, state=PeerState.LEAVING, distrusts_sender=True, is_engaged=True)
    assert answer(offer, LARGER, view) == CHECKS[0][2]
    offer = replace(offer, terms=replace(offer.terms, weight=1.0))
    assert answer(offer, LARGER, view) is DeclineReason.OTHER_RUN
    offer = replace(offer, run=RULES.run)
    assert answer(offer, LARGER, view) is DeclineReason.OTHER_PROTOCOL
    offer = replace(offer, protocol=RULES.protocol)
    assert answer(offer, LARGER, view) is DeclineReason.LEAVING
    view = replace(view, state=PeerState.JOINING)
    assert answer(offer, LARGER, view) is DeclineReason.DISTRUSTED
    view = replace(view, distrusts_sender=False)
    assert answer(offer, LARGER, view) is DeclineReason.IMPLAUSIBLE_PROGRESS
    assert answer(OFFER, LARGER, view) is DeclineReason.CATCHING_UP
    assert answer(OFFER, LARGER, replace(view, state=PeerState.TRAINING)) is DeclineReason.BUSY


@pytest.mark.parametrize(
    ("sender", "changes", "expected"),
    [
        (LARGER, {}, (1, 2)),
        (LARGER, {"free_fragments": (0,)}, (0,)),
        (LARGER, {"free_fragments": (3,)}, DeclineReason.BUSY),
        (LARGER, {"is_crossing": True, "is_offering": True}, DeclineReason.CROSSING),
        (SMALLER, {"is_crossing": True, "is_offering": True}, (1, 2)),
        (LARGER, {"is_offering": True}, DeclineReason.BUSY),
        (SMALLER, {"is_offering": True}, (1, 2)),
        (LARGER, {"is_engaged": True}, DeclineReason.BUSY),
        (LARGER, {"exchanges": MAX_EXCHANGES}, DeclineReason.BUSY),
        (LARGER, {"settled": False, "effective_progress": 0.0}, DeclineReason.CATCHING_UP),
    ],
)
def test_unplanned_offers(sender, changes, expected):
    assert answer(OFFER, sender, replace(VIEW, **changes)) == expected


@pytest.mark.parametrize(
    ("sender", "crossing", "changes", "expected"),
    [
        (LARGER, False, {}, (0, 1, 2)),
        (LARGER, False, {"fragments": None}, DeclineReason.NOT_YET),
        (LARGER, False, {"fragments": None, "will_offer": False, "is_skipped": True}, DeclineReason.NOT_PLANNED),
        (LARGER, False, {"is_skipped": True, "can_meet": False}, DeclineReason.BUSY),
        (LARGER, False, {"fragments": (0, 1, 2, 3)}, DeclineReason.NOT_PLANNED),
        (LARGER, True, {"can_meet": False}, DeclineReason.NOT_PLANNED),
        (LARGER, True, {}, DeclineReason.CROSSING),
        (SMALLER, True, {}, (0, 1, 2)),
    ],
)
def test_planned_offers(sender, crossing, changes, expected):
    view = replace(VIEW, is_crossing=crossing, is_engaged=True, planned=replace(PLANNED, **changes))
    assert answer(OFFER, sender, view) == expected


def test_both_sides_shares_add_up_and_the_heavier_peer_moves_less() -> None:
    heavy, light = replace(TERMS, weight=3.0), TERMS
    assert (heavy.share(light), light.share(heavy)) == (0.25, 0.75)
    assert TERMS.share(TERMS) == 0.5


def test_a_share_is_smaller_the_more_partners_mix_a_snapshot() -> None:
    assert replace(TERMS, partners=3).share(TERMS) == TERMS.share(replace(TERMS, partners=3)) == 0.25


def test_whatever_weight_a_partner_claims_it_moves_us_by_a_bounded_share() -> None:
    assert TERMS.share(replace(TERMS, weight=1e9)) == MAX_RATIO / (1 + MAX_RATIO)
