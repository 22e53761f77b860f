"""How a peer's record with us decides when it is called and whether it is served."""

from __future__ import annotations

import pytest
from table import presence

from p2ptrain.ids import PeerId
from p2ptrain.swarm.membership import FAILURE_PAUSE_S, QUARANTINE_S, Fault, Membership

BIRCH = PeerId("birch")


@pytest.fixture
def members() -> Membership:
    members = Membership(PeerId("amber"))
    members.see(presence("birch"), live_until=1e9)
    return members


def test_pauses_double_up_to_a_bound_and_one_success_ends_them(members: Membership) -> None:
    first, longest = FAILURE_PAUSE_S
    for times in range(20):
        members.blame(BIRCH, 0.0, Fault.BROKEN)
        pause = min(first * 2**times, longest)
        assert not members.partners(pause - 0.1)
        assert members.partners(pause)
    members.praise(BIRCH)
    assert members.partners(0.0)
    assert not members.is_distrusted(BIRCH, 0.0)


def test_calls_that_came_to_nothing_cost_no_trust(members: Membership) -> None:
    for _ in range(8):
        members.blame(BIRCH, 0.0, Fault.UNANSWERED)
    assert not members.is_distrusted(BIRCH, 0.0)
    members.blame(BIRCH, 0.0, Fault.BROKEN)
    assert members.is_distrusted(BIRCH, FAILURE_PAUSE_S[0] - 0.1)
    assert not members.is_distrusted(BIRCH, FAILURE_PAUSE_S[0])


def test_broken_protocol_is_remembered_longer_and_not_forgotten(members: Membership) -> None:
    first, _ = QUARANTINE_S
    members.blame(BIRCH, 0.0, Fault.OFFENCE)
    assert members.is_distrusted(BIRCH, first - 0.1)
    members.praise(BIRCH)
    members.blame(BIRCH, 0.0, Fault.OFFENCE)
    assert members.is_distrusted(BIRCH, 2 * first - 0.1)
    assert not members.is_distrusted(BIRCH, 2 * first)
