"""What is known of a peer decides when it is dialed and whether it is served."""

from __future__ import annotations

from random import Random

import pytest
from plain_membership import PlainMembership
from table import presence

from p2ptrain.base.ids import PeerId
from p2ptrain.net.rate_limiter import RateLimiter
from p2ptrain.swarm.membership import Membership
from p2ptrain.swarm.messages import PeerState
from p2ptrain.swarm.peer_info import FAILURE_PAUSE_S, LONE_PAUSE_S, MISFITS_FORGIVEN, QUARANTINE_S, REST, FailureKind
from p2ptrain.swarm.rules import CALLS_PER_S, MAX_CALLS

BIRCH = PeerId("birch")
PEERS = 12


@pytest.fixture
def members() -> Membership:
    members = Membership(PeerId("amber"))
    members.see(presence("birch"), live_until=1e9)
    members.see(presence("cedar"), live_until=1e9)
    return members


def calls(members: Membership, now: float) -> bool:
    """Whether birch may be called."""
    return BIRCH in [known.peer for known in members.partners(now)]


def test_pauses_double_up_to_a_bound_and_one_success_ends_them(members: Membership) -> None:
    first, longest = FAILURE_PAUSE_S
    for times in range(20):
        members.record_failure(BIRCH, 0.0, FailureKind.BROKEN)
        pause = min(first * 2**times, longest)
        assert not calls(members, pause - 0.1)
        assert calls(members, pause)
    members.record_success(BIRCH)
    assert calls(members, 0.0)
    assert not members.is_distrusted(BIRCH, 0.0)


def test_calls_that_came_to_nothing_cost_no_trust(members: Membership) -> None:
    for _ in range(8):
        members.record_failure(BIRCH, 0.0, FailureKind.UNANSWERED)
    assert not members.is_distrusted(BIRCH, 0.0)
    members.record_failure(BIRCH, 0.0, FailureKind.BROKEN)
    assert members.is_distrusted(BIRCH, FAILURE_PAUSE_S[0] - 0.1)
    assert not members.is_distrusted(BIRCH, FAILURE_PAUSE_S[0])


def test_an_offer_taken_back_is_forgiven_once_in_a_row(members: Membership) -> None:
    for _ in range(3):
        members.record_failure(BIRCH, 0.0, FailureKind.WITHDRAWN)
        assert calls(members, 0.0)
        assert not members.is_distrusted(BIRCH, 0.0)
        members.record_failure(BIRCH, 0.0, FailureKind.WITHDRAWN)
        assert members.is_distrusted(BIRCH, FAILURE_PAUSE_S[0] - 0.1)
        members.record_success(BIRCH)


def test_offers_taken_back_cost_by_how_long_they_held_us_and_not_longer_each_time(members: Membership) -> None:
    """Check withdrawn offers, which honest partners make again and again if our connection is slow."""
    members.record_failure(BIRCH, 0.0, FailureKind.WITHDRAWN, 0.1)
    for now, held_s in [(0.0, 0.1), (10.0, 0.1), (20.0, 0.1), (30.0, 0.3), (40.0, 1.5)]:
        members.record_failure(BIRCH, now, FailureKind.WITHDRAWN, held_s)
        pause_s = max(FAILURE_PAUSE_S[0], REST * held_s)
        assert members.is_distrusted(BIRCH, now + pause_s - 0.1)
        assert not members.is_distrusted(BIRCH, now + pause_s)
    members.record_failure(BIRCH, 100.0, FailureKind.BROKEN)
    assert not members.is_distrusted(BIRCH, 100.0 + FAILURE_PAUSE_S[0])


def test_payloads_that_do_not_fit_are_forgiven_while_step_widths_are_learnt(members: Membership) -> None:
    for _ in range(MISFITS_FORGIVEN):
        members.record_failure(BIRCH, 0.0, FailureKind.MISFIT)
        assert calls(members, 0.0)
    members.record_failure(BIRCH, 0.0, FailureKind.MISFIT)
    assert members.is_distrusted(BIRCH, FAILURE_PAUSE_S[0] - 0.1)
    members.record_success(BIRCH)
    for _ in range(MISFITS_FORGIVEN - (MISFITS_FORGIVEN + 1) // 2):  # one fit among many misfits does not help for long
        assert calls(members, 0.0)
        members.record_failure(BIRCH, 0.0, FailureKind.MISFIT)
    members.record_failure(BIRCH, 0.0, FailureKind.MISFIT)
    assert not calls(members, 0.0)


def alone_with_birch() -> Membership:
    members = Membership(PeerId("amber"))
    members.see(presence("birch"), live_until=1e9)
    return members


def test_pauses_after_unrelated_weights_do_not_double(members: Membership) -> None:
    for meeting in range(20):
        members.record_failure(BIRCH, float(meeting), FailureKind.UNRELATED)
    assert not calls(members, 19.0 + FAILURE_PAUSE_S[0] - 0.1)
    assert calls(members, 19.0 + FAILURE_PAUSE_S[0])


@pytest.mark.parametrize("failure", [FailureKind.BROKEN, FailureKind.WITHDRAWN])
def test_pauses_are_short_while_no_other_partner_can_be_called(failure: FailureKind) -> None:
    members = alone_with_birch()
    for _ in range(8):
        members.record_failure(BIRCH, 0.0, failure, held_s=5.0)
    assert not calls(members, LONE_PAUSE_S - 0.1)
    assert calls(members, LONE_PAUSE_S)
    assert members.draw(Random(1), LONE_PAUSE_S, ()) is members.get(BIRCH)
    assert members.next_change(0.0) == LONE_PAUSE_S
    assert not members.is_distrusted(BIRCH, 0.0)
    members.see(presence("cedar"), live_until=1e9)
    assert not calls(members, LONE_PAUSE_S)
    assert members.is_distrusted(BIRCH, LONE_PAUSE_S)
    members.record_failure(PeerId("cedar"), LONE_PAUSE_S, FailureKind.UNANSWERED)
    assert calls(members, LONE_PAUSE_S)


def test_a_lone_partner_that_does_not_answer_is_called_less_often_until_it_is_heard() -> None:
    members = alone_with_birch()
    for times in range(4):
        members.record_failure(BIRCH, 0.0, FailureKind.UNANSWERED)
        assert not calls(members, LONE_PAUSE_S * 2**times - 0.1)
        assert calls(members, LONE_PAUSE_S * 2**times)
    members.hear(BIRCH, PeerState.TRAINING, 1, 1.0, now=1.0)
    assert calls(members, 1.0 + LONE_PAUSE_S)


def test_a_partner_waits_for_others_only_if_there_are_any(members: Membership) -> None:
    alone, oak = alone_with_birch(), PeerId("oak")
    alone.pause_for_others(PeerId("birch"), until=3.0, now=1.0)
    assert [each.peer for each in alone.partners(now=1.0)] == ["birch"]
    alone.hear(oak, PeerState.TRAINING, 0, 0.0, now=1.0)
    alone.pause_for_others(PeerId("birch"), until=3.0, now=1.0)
    alone.pause(oak, until=9.0, now=1.0)
    assert alone.partners(now=1.2) == [], "not even while the others are busy"
    assert [each.peer for each in alone.partners(now=3.0)] == ["birch"]


def test_a_lone_partner_that_broke_the_protocol_is_not_called() -> None:
    members = alone_with_birch()
    members.record_failure(BIRCH, 0.0, FailureKind.OFFENCE)
    members.hear(BIRCH, PeerState.TRAINING, 1, 1.0, now=1.0)
    assert not calls(members, QUARANTINE_S[0] - 0.1)
    assert members.is_distrusted(BIRCH, QUARANTINE_S[0] - 0.1)
    assert calls(members, QUARANTINE_S[0])


def test_unrelated_exchanges_are_forgotten_by_half_with_each_that_commits(members: Membership) -> None:
    for _ in range(4):
        members.count_unrelated(BIRCH)
    assert members.times_unrelated(BIRCH) == 4
    members.record_success(BIRCH)
    assert members.times_unrelated(BIRCH) == 2


def test_nobody_is_called_more_often_than_it_admits(members: Membership) -> None:
    """Check dials that all succeed."""
    limiter: RateLimiter[PeerId] = RateLimiter()
    times, now = 0, 0.0
    while now < 100.0:
        if calls(members, now):
            members.called(BIRCH, now)
            assert limiter.admits(BIRCH, now)
            members.record_success(BIRCH)
            times += 1
        now += 0.01
    assert times == pytest.approx(MAX_CALLS + 100 * CALLS_PER_S, abs=20)


def test_who_was_called_often_may_be_asked_for_its_weights_all_the_same(members: Membership) -> None:
    for _ in range(100):
        members.called(BIRCH, 0.0)
    known = members.get(BIRCH)
    assert known is not None
    assert not calls(members, 0.1)
    assert known.may_be_asked(0.1)
    members.called(BIRCH, 100.0)
    assert calls(members, 100.0)
    members.record_failure(BIRCH, 100.0, FailureKind.UNANSWERED)
    assert not known.may_be_asked(100.0)


def test_who_calls_seldom_is_never_held_up(members: Membership) -> None:
    for call in range(200):
        members.called(BIRCH, call / CALLS_PER_S)
        assert calls(members, call / CALLS_PER_S)


def test_broken_protocol_is_remembered_longer_and_not_forgotten(members: Membership) -> None:
    first, _ = QUARANTINE_S
    members.record_failure(BIRCH, 0.0, FailureKind.OFFENCE)
    assert members.is_distrusted(BIRCH, first - 0.1)
    members.record_success(BIRCH)
    members.record_failure(BIRCH, 0.0, FailureKind.OFFENCE)
    assert members.is_distrusted(BIRCH, 2 * first - 0.1)
    assert not members.is_distrusted(BIRCH, 2 * first)


def compare(members: Membership, plain: PlainMembership, now: float, seed: int) -> None:
    """Compare the answers of both to every query."""
    excluding = {PeerId(f"peer {each}") for each in Random(seed).sample(range(PEERS), 3)}
    one, other = Random(seed), Random(seed)
    live = [(known.peer, known.settled) for known in members.live(now)]
    assert live == [(entry.peer, entry.settled) for entry in plain.live(now)]
    partners = [known.peer for known in members.partners(now, excluding)]
    assert partners == [entry.peer for entry in plain.partners(now, excluding)]
    drawn, plainly = members.draw(one, now, excluding), plain.draw(other, now, excluding)
    assert (drawn and drawn.peer) == (plainly and plainly.peer)
    assert members.next_change(now) == plain.next_change(now)
    assert members.sample(one, 4, now, min(excluding)) == plain.sample(other, 4, now, min(excluding))
    assert members.records(now) == plain.records(now)
    assert one.getstate() == other.getstate()
    for progress in (0.0, 50.0, 90.0):
        assert members.none_beyond(progress, now) == plain.none_beyond(progress, now)
    for peer in excluding:
        assert members.is_distrusted(peer, now) == plain.is_distrusted(peer, now)


@pytest.mark.parametrize("seed", range(20))
def test_it_agrees_with_looking_at_everybody(seed: int) -> None:
    """Check any order of events: ordered lists, alarms and bounds only make the result faster."""
    random, now = Random(seed), 100.0
    members, plain = Membership(PeerId("peer 0")), PlainMembership(PeerId("peer 0"))
    for step in range(600):
        now += random.choice([0.0, 0.0, 0.1, 1.0, 20.0])
        peer = PeerId(f"peer {random.randrange(PEERS)}")
        state, progress = random.choice(list(PeerState)), random.uniform(0.0, 100.0)
        match random.randrange(9):
            case 0 | 1 | 2:
                record = presence(peer, progress, state, now - random.uniform(0.0, 70.0), random.choice([False, True]))
                until = record.issued_at + record.lifetime_s
                assert members.see(record, until) == plain.see(record, until)
            case 3:
                settled = random.choice([None, False, True])
                members.hear(peer, state, 0, progress, now, settled)
                plain.hear(peer, state, 0, progress, now, settled)
            case 4:
                members.pause(peer, now + 3.0, now)
                plain.pause(peer, now + 3.0, now)
            case 5:
                failure, held_s = random.choice(list(FailureKind)), random.choice([0.0, 0.3, 5.0])
                members.record_failure(peer, now, failure, held_s)
                plain.record_failure(peer, now, failure, held_s)
            case 6:
                members.record_success(peer)
                plain.record_success(peer)
            case 7:
                for _ in range(random.choice([1, 30])):
                    members.called(peer, now)
                    plain.called(peer, now)
            case 8:
                assert members.expire(now) == plain.expire(now)
        compare(members, plain, now, step)


def test_it_is_bounded_and_forgets_whom_it_heard_of_least_recently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.swarm.membership.MAX_KNOWN", 3)
    members = Membership(PeerId("amber"))
    for at, name in enumerate(("birch", "cedar", "dune")):
        members.see(presence(name, at=1.0 + at), 76.0 + at)
    members.hear(PeerId("birch"), PeerState.TRAINING, 0, 0.0, 50.0)
    members.see(presence("elm", at=5.0), 80.0)
    assert [known.peer for known in members.live(51.0)] == ["birch", "dune", "elm"]
    assert len(members) == 3
