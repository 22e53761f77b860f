"""Offences are counted, decay, and are remembered for peers that have left."""

from __future__ import annotations

import pytest
from table import presence

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm.membership import Membership
from p2ptrain.swarm.offences import HALF_LIFE_S, MAX_REMEMBERED, Offences
from p2ptrain.swarm.peer_info import FAR_S, QUARANTINE_S, FailureKind

BIRCH = PeerId("birch")


def test_pauses_double_to_the_longest_and_forgiveness_comes_with_time() -> None:
    offences = Offences()
    assert [offences.add(BIRCH, 0.0, (30.0, 100.0)) for _ in range(4)] == [30.0, 60.0, 100.0, 100.0]
    assert offences.count(BIRCH, HALF_LIFE_S) == pytest.approx(2.0)
    later = 40 * HALF_LIFE_S
    assert offences.add(BIRCH, later, (30.0, 100.0)) == pytest.approx(later + 30.0)


def test_a_shorter_pause_does_not_end_a_longer_one() -> None:
    offences = Offences()
    offences.add(BIRCH, 0.0, (500.0, 500.0))
    offences.add(BIRCH, 1.0, (30.0, 60.0))
    assert offences.until(BIRCH) == 500.0


def test_who_offends_at_every_chance_gets_about_one_an_hour() -> None:
    offences, now, chances = Offences(), 0.0, 0
    while now < 48 * 3600.0:
        now, chances = offences.add(BIRCH, now, QUARANTINE_S), chances + 1
    assert chances < 48 * 1.5


def test_a_crowd_of_offenders_is_bounded_and_the_last_ones_are_kept() -> None:
    offences = Offences()
    for number in range(2 * MAX_REMEMBERED):
        offences.add(PeerId(f"peer {number}"), 0.0, QUARANTINE_S)
    remembered = [number for number in range(2 * MAX_REMEMBERED) if offences.until(PeerId(f"peer {number}"))]
    assert remembered == list(range(MAX_REMEMBERED, 2 * MAX_REMEMBERED))


@pytest.mark.parametrize("failure", [FailureKind.OFFENCE, FailureKind.FAR])
def test_who_was_a_stranger_or_went_away_meanwhile_is_known_when_it_comes_back(failure: FailureKind) -> None:
    members = Membership(PeerId("amber"))
    members.record_failure(BIRCH, 0.0, failure)
    assert members.is_distrusted(BIRCH, 29.0)
    members.see(presence("birch"), live_until=100.0)
    assert members.is_distrusted(BIRCH, 29.0)
    assert not members.partners(29.0)
    assert members.partners(30.0)
    members.record_failure(BIRCH, 30.0, failure)
    assert members.expire(200.0) == [BIRCH]
    members.see(presence("birch", at=2.0), live_until=1e9)
    members.record_failure(BIRCH, 200.0, failure)
    third = min(FAR_S if failure is FailureKind.FAR else QUARANTINE_S)
    assert members.is_distrusted(BIRCH, 200.0 + 3 * third)
    assert not members.is_distrusted(BIRCH, 200.0 + 4 * third)
