"""Two and more protocol cores back to back: exchanges, failures at each step, and the rules of stability."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from statistics import fmean

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from run_rules import run_rules
from table import RULES, Table, presence

from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.net.rate_limiter import RateLimiter
from p2ptrain.swarm import Offer, Peer, PeerState, Terms
from p2ptrain.swarm.deadlines import PAYLOAD_BOUNDS_S, REPLY_BOUNDS_S
from p2ptrain.swarm.events import (
    Applied,
    BeginTraining,
    Close,
    Commit,
    ExchangeDue,
    LeaveRequested,
    LinkFailed,
    Note,
    Open,
    OuterStepDone,
    PeersSeen,
    Received,
    Send,
    Started,
    Swap,
    SwapDone,
    Woke,
)
from p2ptrain.swarm.exchange import MAX_UNAPPLIED, Exchange, ExchangeBook
from p2ptrain.swarm.matching import implausible_progress
from p2ptrain.swarm.messages import Accept, Acknowledge, Decline, DeclineReason, WeightsReply
from p2ptrain.swarm.rules import CALLS_PER_S, MAX_KNOWN, ProgressBounds


def in_step(*names: str, **options) -> Table:
    """Return a table of settled peers that know each other."""
    table = Table(*names, **options)
    table.start()
    table.run(3.0)
    assert all(seat.begun for seat in table.seats.values())
    return table


def counts(table: Table, name: str):
    return table[name].core.counters


def test_golden_trace_of_one_exchange():
    table = in_step("amber", "birch")
    table.trace.clear()
    table.step("amber")
    table.run(1.0)
    assert [line.split(" ", 1)[1] for line in table.trace] == [
        "amber -> birch: Offer",
        "birch -> amber: Accept",
        "amber -> birch: Acknowledge",
        "birch -> amber: Acknowledge",
        "birch exchanged amber",
        "amber exchanged birch",
    ]
    assert counts(table, "amber").exchanges_ok == counts(table, "birch").exchanges_ok == 1
    assert not table["amber"].core._exchanges.book.engaged()


def test_progress_is_averaged_and_its_sum_kept():
    table = in_step("amber", "birch")
    table.step("amber", tokens=20)
    table.run(1.0)
    assert table["amber"].progress == table["birch"].progress == 20.0, "the tokens of both"


def test_nobody_is_lifted_beyond_the_end_by_what_was_agreed_on_before_it_came_there():
    """Check an exchange agreed on before the end: progress beyond it would be refused by others."""
    table = in_step("amber", "birch")
    table.swap_s = 0.5
    table["amber"].progress, table["birch"].progress = 930.0, 1000.0
    table.end_training("birch")
    table.step("amber")
    table.run(0.1)
    assert table["amber"].swaps
    table.step("amber", tokens=22.5)
    assert table["amber"].progress == 995.0
    table.run(1.0)
    assert counts(table, "amber").exchanges_ok > 0
    assert 995.0 <= table["amber"].progress <= 1000.0


def test_the_progress_of_who_came_to_the_end_meanwhile_is_not_lowered_any_more():
    table = in_step("amber", "birch")
    table.swap_s = 2.0
    table.step("amber", tokens=20)
    table.run(1.0)
    assert table["amber"].core._exchanges.book.engaged() == {0}
    assert table["amber"].core.exchanges_under_way == table["birch"].core.exchanges_under_way == 1
    table.end_training("amber")
    table.run(1.5)
    assert table["amber"].core.exchanges_under_way == table["birch"].core.exchanges_under_way == 0
    assert counts(table, "amber").exchanges_ok == counts(table, "birch").exchanges_ok == 1
    assert (table["amber"].progress, table["birch"].progress) == (40.0, 20.0)


def test_crossing_offers_are_settled_by_the_smaller_peer_id():
    table = in_step("amber", "birch")
    table.step("amber", "birch")
    table.run(0.3)
    crossed = [line for line in table.trace if "our offers crossed" in line]
    assert len(crossed) <= 1
    assert "0 birch -> amber: Accept" in " ".join(table.trace) or counts(table, "birch").exchanges_ok >= 1
    assert counts(table, "amber").exchanges_ok == counts(table, "birch").exchanges_ok >= 1


def test_crossing_answers():
    """The larger id accepts and withdraws its own offer; the smaller one declines."""
    table = in_step("amber", "birch")
    terms = Terms(1, 10.0, 1.0, float("inf"), True, PeerState.TRAINING)
    table.latency = 1000.0  # offers stay on their way
    table.step("amber", "birch")
    for me, other, expected in (("amber", "birch", Decline), ("birch", "amber", Accept)):
        link = LinkId(PeerId(other), 99, outbound=False)
        offer = Offer(RULES.run, RULES.protocol, (0,), terms)
        sent = [e.message for e in table[me].core.handle(Received(link, offer), table.now) if isinstance(e, Send)]
        assert isinstance(sent[0], expected)


def test_a_fragment_is_free_at_its_commit_until_too_much_is_unapplied():
    table = in_step("amber", "birch")
    table.apply_s = 5.0
    table.step("amber")
    table.run(0.04)
    assert table["amber"].core._exchanges.book.engaged() == {0}  # under way
    table.run(0.5)
    assert counts(table, "amber").exchanges_ok == 1
    assert not table["amber"].core._exchanges.book.engaged()
    assert (
        table["amber"].core._core.progress == table["birch"].core._core.progress == 10.0
    )  # the cores count it before the trainers do
    assert (table["amber"].progress, table["birch"].progress) == (20.0, 0.0)
    table.step("birch")
    table.run(0.5)
    assert counts(table, "amber").exchanges_ok == MAX_UNAPPLIED == 2
    table.step("amber", "birch")
    table.run(2.0)
    assert counts(table, "amber").exchanges_ok == MAX_UNAPPLIED  # both are busy, and say so
    assert table["amber"].core._exchanges.book.engaged() == {0}
    table.run(10.0)
    assert counts(table, "amber").exchanges_ok > MAX_UNAPPLIED
    assert fmean((table["amber"].progress, table["birch"].progress)) == pytest.approx(4 * 10.0)


def test_a_fragment_of_pseudo_gradients_is_engaged_until_applied():
    book = ExchangeBook(range(4), weights=2)
    for serial, fragments in enumerate([(0, 2), (1, 3)]):
        terms = Terms(1, 10.0, 1.0, float("inf"), True, PeerState.TRAINING)
        exchange = Exchange(LinkId(PeerId("birch"), serial, outbound=True), fragments, terms, 0.0, 1.0)
        exchange.swap(fragments, terms, 0.0, 1.0)
        book.put(exchange)
    assert book.engaged() == {0, 1, 2, 3}
    for exchange in book:
        exchange.confirm(SwapDone(exchange.link, 1, 1, 0.0))
        book.commit(exchange)
    assert book.engaged() == {2, 3}
    assert not book.partners()


def test_an_unanswered_offer_does_not_make_a_peer_busy():
    table = in_step("amber", "birch", "cedar")
    called = []

    def holds_back(sender, receiver, what):
        if sender == "amber" and isinstance(what, Offer):
            called.append(receiver)
        return isinstance(what, Offer) and receiver in called[:1]

    table.holds_back = holds_back
    table.step("amber")
    third = ({"birch", "cedar"} - {called[0]}).pop()
    table.run(1.5)
    assert counts(table, "amber").exchanges_ok == 1  # with the other one, offered when the first was late
    for _ in range(6):  # a random partner each time
        table.step(third)
        table.run(0.5)
    assert counts(table, "amber").exchanges_ok > 3


@pytest.mark.parametrize("lost", [Offer, Accept, Swap, Acknowledge])
@pytest.mark.parametrize("loser", ["amber", "birch"])
def test_a_message_lost_at_any_step_costs_one_exchange_and_nothing_else(lost, loser):
    """Check a partner that freezes at each step: no error, no message, and the deadline ends the exchange."""
    table = in_step("amber", "birch")
    table.holds_back = lambda sender, receiver, what: sender == loser and isinstance(what, lost)
    table.step("amber", "birch")
    table.run(0.01)
    table.run(60.0)
    if lost is Swap:
        assert counts(table, "amber").exchanges_ok == counts(table, "birch").exchanges_ok == 0
        assert counts(table, "amber").exchanges_failed == counts(table, "birch").exchanges_failed > 0
    table.holds_back = lambda sender, receiver, what: False
    table.run(60.0)
    assert not table["amber"].core._exchanges.book.engaged()
    assert not table["birch"].core._exchanges.book.engaged()
    before = counts(table, "amber").exchanges_ok
    for _ in range(4):
        table.step("amber", "birch")
        table.run(60.0)
    assert counts(table, "amber").exchanges_ok > before


@pytest.mark.parametrize(("lost", "has_agreed"), [(Offer, False), (Swap, True)])
def test_what_fails_says_for_how_long_both_had_agreed(lost, has_agreed):
    table = in_step("amber", "birch")
    table.holds_back = lambda sender, receiver, what: isinstance(what, lost)
    table.step("amber")
    table.run(60.0)
    lasted = [note.seconds for note in table.notes if note.kind == "failed"][:2]
    assert lasted
    assert [seconds >= PAYLOAD_BOUNDS_S[0] for seconds in lasted] == [has_agreed] * len(lasted)
    assert has_agreed or not any(lasted)


def test_a_lost_acknowledgement_is_counted_as_a_possible_half_commit():
    table = in_step("amber", "birch")
    table.holds_back = lambda sender, receiver, what: sender == "amber" and isinstance(what, Acknowledge)
    table.step("amber")
    table.run(60.0)
    assert counts(table, "amber").exchanges_ok == 1  # with each of both
    assert counts(table, "birch").exchanges_failed == counts(table, "birch").half_commits == 1


@pytest.mark.parametrize("seconds", [0.001, 0.012, 0.025, 0.04, 0.075, 0.085, 0.095])
@pytest.mark.parametrize("victim", ["amber", "birch"])
def test_a_partner_killed_at_any_moment_leaves_the_survivor_free(seconds, victim):
    table = in_step("amber", "birch", "cedar")
    table.step("amber")
    table.run(seconds)
    table.kill(victim)
    survivors = [name for name in ("amber", "birch", "cedar") if name != victim]
    for _ in range(6):
        table.run(30.0)
        table.step(*survivors)
    table.run(30.0)
    for name in survivors:
        assert not table[name].core._exchanges.book.engaged()
        assert counts(table, name).exchanges_ok > 0
        assert table[name].core.live_peers(table.now) == [other for other in survivors if other != name]


def test_a_killed_peer_is_not_counted_once_it_does_not_answer():
    table = in_step("amber", "birch")
    core = table["amber"].core
    assert core.peers_that_answer(table.now) == 1
    table.kill("birch")
    for _ in range(3):
        table.step("amber")
        table.run(3.0)
    assert core.live_peers(table.now) == ["birch"]
    assert core.peers_that_answer(table.now) == 0


def test_solo_steps_are_counted():
    table = in_step("amber", "birch")
    table.kill("birch")
    for _ in range(3):
        table.step("amber")
        table.run(1.0)
    assert counts(table, "amber").solo_steps >= 2


def test_a_peer_alone_trains_and_says_so():
    table = Table("amber")
    table.directory_answers = False
    table.start()
    table.run(5.0)
    assert not table["amber"].begun
    table.run(30.0)
    assert table["amber"].begun
    assert any("alone" in line for line in table.trace)


def test_how_far_a_donor_is_ahead_is_told_with_separators():
    rules = replace(RULES, run_tokens=1e6)
    peer = Peer(PeerId("amber"), rules, Random(0))
    peer.handle(Started(), 0.0)
    effects = peer.handle(PeersSeen(((presence("birch", progress=12_345.0), 60.0),)), 1.0)
    assert [each.why for each in effects if isinstance(each, Note) and each.why] == ["it is 12,345 tokens ahead"]
    why = implausible_progress(9e5, 1000.0, settled=True, bounds=ProgressBounds(rules))
    assert why == "progress 900,000 is too far ahead of ours, 1,000"


def test_a_peer_whose_run_is_over_does_not_say_that_it_trains():
    peer = Peer(PeerId("amber"), RULES, Random(0), step=9, progress=RULES.run_tokens)
    peer.handle(Started(), 0.0)
    effects = peer.handle(Woke(), 30.0)
    assert BeginTraining() in effects
    assert not [each for each in effects if isinstance(each, Note) and each.kind == "alone"]


def protocol_breakers():
    link = LinkId(PeerId("birch"), 77, outbound=False)
    terms = Terms(1, 10.0, 1.0, float("inf"), True, PeerState.TRAINING)
    far = Terms(1, 1e9, 1.0, float("inf"), True, PeerState.TRAINING)
    yield "another run", Offer("cd" * 32, RULES.protocol, (0,), terms), DeclineReason.OTHER_RUN
    yield "another protocol", Offer(RULES.run, 999, (0,), terms), DeclineReason.OTHER_PROTOCOL
    yield "progress beyond the end", Offer(RULES.run, RULES.protocol, (0,), far), DeclineReason.IMPLAUSIBLE_PROGRESS
    nan = Terms(1, float("nan"), 1.0, float("inf"), True, PeerState.TRAINING)
    yield "progress NaN", Offer(RULES.run, RULES.protocol, (0,), nan), DeclineReason.IMPLAUSIBLE_PROGRESS
    yield "an unknown fragment", Offer(RULES.run, RULES.protocol, (7,), terms), DeclineReason.BUSY
    assert link


@pytest.mark.parametrize(("name", "offer", "reason"), list(protocol_breakers()), ids=lambda value: str(value)[:20])
def test_bad_offers_are_declined_with_the_reason(name, offer, reason):
    table = in_step("amber", "birch")
    link = LinkId(PeerId("birch"), 77, outbound=False)
    effects = table["amber"].core.handle(Received(link, offer), table.now)
    assert [e.message.reason for e in effects if isinstance(e, Send)] == [reason]
    assert Close(link) in effects
    assert not any(isinstance(effect, Swap) for effect in effects)


def test_claims_far_ahead_of_a_settled_peer_are_declined_however_often_and_whoever_makes_them():
    table = in_step("amber", "birch")
    for _ in range(4):
        table.step("amber", "birch")
        table.run(1.0)
    far = table["amber"].progress + 1.5 * table["amber"].core._core.bounds.implausible_distance
    for number, settled in enumerate((False, True, False, False)):
        terms = Terms(9, far, 1.0, float("inf"), settled, PeerState.TRAINING)
        link = LinkId(PeerId(f"liar{number % 2}"), 78 + number, outbound=False)
        effects = table["amber"].core.handle(Received(link, Offer(RULES.run, RULES.protocol, (0,), terms)), table.now)
        assert [e.message.reason for e in effects if isinstance(e, Send)] == [DeclineReason.IMPLAUSIBLE_PROGRESS]


def raised(table: Table, peer: str, progress: float) -> float:
    """Return by how much an exchange that this peer initiates raises amber's progress."""
    core = table["amber"].core
    terms = Terms(9, progress, 1.0, float("inf"), True, PeerState.TRAINING)
    link = LinkId(PeerId(peer), len(table.trace) + int(progress), outbound=False)
    core.handle(Received(link, Offer(RULES.run, RULES.protocol, (0,), terms)), table.now)
    core.handle(SwapDone(link, 1000, 1000, 0.1, 1.0, peer.encode()), table.now)
    [commit] = [each for each in core.handle(Received(link, Acknowledge()), table.now) if isinstance(each, Commit)]
    core.handle(Applied(link, core._core.progress + commit.progress_displacement), table.now)
    return float(commit.progress_displacement)


def test_whose_boast_was_refused_is_not_believed_once_it_could_be_true():
    table = in_step("amber", "birch", rules=run_rules(run_tokens=1000.0))
    for _ in range(4):
        table.step("amber", "birch")
        table.run(1.0)
    core = table["amber"].core
    mine = table["amber"].progress
    assert raised(table, "honest", mine + 20.0) > 0
    boast = Terms(9, 900.0, 1.0, float("inf"), True, PeerState.TRAINING)
    offer = Offer(RULES.run, RULES.protocol, (0,), boast)
    core.handle(Received(LinkId(PeerId("liar"), 70, outbound=False), offer), table.now)
    table.now += 60.0
    assert raised(table, "liar", core._core.progress + 20.0) == 0.0
    assert raised(table, "liar", core._core.progress - 20.0) < 0
    assert raised(table, "honest", core._core.progress + 20.0) > 0


def test_who_seemed_to_boast_is_believed_where_we_have_come_as_far():
    """Check a claim that was implausible only because we were behind."""
    table = in_step("amber", "birch", rules=run_rules(run_tokens=1000.0))
    core = table["amber"].core._core
    core.settled = True
    for claim in (900.0, 800.0):
        core.record_claim(PeerId("cedar"), claim)
    core.progress = 899.0
    assert not core.trusts_progress(PeerId("cedar"))
    core.progress = 901.0
    assert core.trusts_progress(PeerId("cedar"))
    core.record_claim(PeerId("cedar"), float("nan"))
    assert not core.trusts_progress(PeerId("cedar"))


def test_boasts_of_many_are_forgotten_oldest_first():
    core = in_step("amber", "birch")["amber"].core._core
    core.settled = True
    for number in range(MAX_KNOWN + 1):
        core.record_claim(PeerId(f"liar {number}"), 900.0)
    assert len(core.implausible_claims) == MAX_KNOWN
    assert core.trusts_progress(PeerId("liar 0"))
    assert not core.trusts_progress(PeerId("liar 1"))


def test_a_swarm_with_one_that_stays_at_the_beginning_goes_on():
    """Check a peer with honest weights and a progress that stays at the start: the run must still end."""
    table = in_step("amber", "birch", "cedar", rules=run_rules(run_tokens=1000.0))
    for _ in range(60):
        table["cedar"].progress = table["cedar"].core._core.progress = 0.0
        table.step()
        table.run(0.7)
    for name in ("amber", "birch"):
        assert counts(table, name).exchanges_ok >= 30
        assert table[name].progress >= 0.45 * 600.0


def test_a_partner_that_never_delivers_engages_our_fragments_once_a_pause():
    table = in_step("amber", "birch")
    terms = Terms(1, 10.0, 1.0, float("inf"), True, PeerState.TRAINING)
    accepted = 0
    for attempt in range(20):
        link = LinkId(PeerId("drip"), 100 + attempt, outbound=False)
        table["amber"].ends[link] = (PeerId("birch"), link)
        effects = table["amber"].core.handle(Received(link, Offer(RULES.run, RULES.protocol, (0,), terms)), table.now)
        accepted += any(isinstance(effect, Swap) for effect in effects)
        table["amber"].core.handle(LinkFailed(link, "it sent nothing"), table.now)
        table.now += 0.05
    assert accepted == 1


def test_one_partner_engages_one_exchange_of_ours_however_often_it_calls():
    rules = run_rules(fragment_bytes=(1000,) * 4, fragments_per_exchange=1)
    table = in_step("amber", "birch", rules=rules)
    terms = Terms(1, 10.0, 1.0, float("inf"), True, PeerState.TRAINING)
    offer, engaged = Offer(RULES.run, RULES.protocol, (0, 1, 2, 3), terms), {}
    for caller in ("drip", "drip", "drip", "cedar"):
        link = LinkId(PeerId(caller), 100 + len(engaged), outbound=False)
        effects = table["amber"].core.handle(Received(link, offer), table.now)
        engaged[link] = any(isinstance(effect, Swap) for effect in effects)
    assert list(engaged.values()) == [True, False, False, True]


def test_garbage_in_place_of_an_opening_message_costs_trust_once_a_quarantine():
    table = in_step("amber", "birch")
    core = table["amber"].core
    for serial in range(50):
        core.handle(LinkFailed(LinkId(PeerId("liar"), serial, outbound=False), "garbage", their_fault=True), table.now)
    assert core.counters.offences == 1
    terms = Terms(1, 10.0, 1.0, float("inf"), True, PeerState.TRAINING)
    link = LinkId(PeerId("liar"), 77, outbound=False)
    effects = core.handle(Received(link, Offer(RULES.run, RULES.protocol, (0,), terms)), table.now)
    assert [e.message.reason for e in effects if isinstance(e, Send)] == [DeclineReason.DISTRUSTED]


def test_an_offer_of_everything_engages_no_more_than_one_exchange_holds():
    rules = run_rules(fragment_bytes=(1000,) * 4, fragments_per_exchange=1)
    table = in_step("amber", "birch", rules=rules)
    terms = Terms(1, 10.0, 1.0, float("inf"), True, PeerState.TRAINING)
    link = LinkId(PeerId("birch"), 90, outbound=False)
    offer = Offer(RULES.run, RULES.protocol, (0, 1, 2, 3), terms)
    effects = table["amber"].core.handle(Received(link, offer), table.now)
    assert [len(effect.fragments) for effect in effects if isinstance(effect, Swap)] == [1]


@pytest.mark.parametrize("state", ["offered", "swapping", "confirming"])
@pytest.mark.parametrize("message", [WeightsReply(1, 1.0), Decline(DeclineReason.BUSY, PeerState.TRAINING, 1, 1.0)])
def test_an_answer_that_does_not_fit_ends_the_exchange_and_is_remembered(state, message):
    table = in_step("amber", "birch")
    if state == "offered" and isinstance(message, Decline):
        return  # that is how offers are declined
    if state == "swapping":
        table.holds_back = lambda sender, receiver, what: isinstance(what, Swap)
    if state == "confirming":
        table.holds_back = lambda sender, receiver, what: isinstance(what, Acknowledge)
    table.step("amber")
    link = next(iter(table["amber"].ends))
    if state != "offered":
        table.run(0.2)
    assert table["amber"].core._exchanges.book.get(link).state.value == state
    effects = table["amber"].core.handle(Received(link, message), table.now)
    assert Close(link) in effects
    assert table["amber"].core._exchanges.book.get(link) is None
    assert counts(table, "amber").offences == 1
    assert counts(table, "amber").half_commits == int(state == "confirming")


def test_broken_protocol_costs_trust_for_a_while():
    table = in_step("amber", "birch")
    table.step("amber")
    link = next(iter(table["amber"].ends))
    table.handle(PeerId("amber"), LinkFailed(link, "garbage", their_fault=True))
    offer = Offer(RULES.run, RULES.protocol, (0,), Terms(1, 10.0, 1.0, float("inf"), True, PeerState.TRAINING))
    inbound = LinkId(PeerId("birch"), 79, outbound=False)
    effects = table["amber"].core.handle(Received(inbound, offer), table.now)
    assert [e.message.reason for e in effects if isinstance(e, Send)] == [DeclineReason.DISTRUSTED]
    effects = table["amber"].core.handle(Received(LinkId(PeerId("birch"), 80, outbound=False), offer), table.now + 31.0)
    assert any(isinstance(effect, Swap) for effect in effects)


def test_messages_out_of_turn_end_the_link_and_are_remembered():
    table = in_step("amber", "birch")
    table.step("amber")
    link = next(iter(table["amber"].ends))
    effects = table["amber"].core.handle(Received(link, Acknowledge()), table.now)
    assert Close(link) in effects
    assert counts(table, "amber").offences == 1
    effects = table["amber"].core.handle(SwapDone(link, 1, 1, 0.0), table.now)
    assert not any(isinstance(effect, Send) for effect in effects)


def test_an_accept_of_what_was_not_offered_is_an_offence():
    table = in_step("amber", "birch")
    table.step("amber")
    link = next(iter(table["amber"].ends))
    terms = Terms(1, 10.0, 1.0, float("inf"), True, PeerState.TRAINING)
    effects = table["amber"].core.handle(Received(link, Accept((0, 1), terms)), table.now)
    assert Close(link) in effects
    assert counts(table, "amber").offences == 1


def test_leaving_drops_offers_says_goodbye_and_stops():
    table = in_step("amber", "birch")
    table.step("amber")
    table.handle(PeerId("amber"), LeaveRequested())
    table.run(3.0)
    assert table["amber"].finished == "stopped by its owner"
    assert table.records[PeerId("amber")].state is PeerState.LEAVING
    table.step("birch")
    table.run(25.0)
    assert table["birch"].core.live_peers(table.now) == []


@pytest.mark.parametrize("says_goodbye", [True, False])
def test_who_said_goodbye_is_not_lost(says_goodbye: bool) -> None:
    table = in_step("amber", "birch")
    if says_goodbye:
        table.handle(PeerId("amber"), LeaveRequested())
        table.run(3.0)
    else:
        table.kill("amber")
    table.run(300.0)
    assert table["birch"].core._core.members.get(PeerId("amber")) is None
    assert [note.peer for note in table.notes if note.kind == "lost"] == ([] if says_goodbye else [PeerId("amber")])


def test_of_offers_in_a_circle_one_is_accepted_at_once():
    """Check equal latencies and steps at the same time: every initiator has an unanswered offer."""
    names = ("amber", "birch", "cedar")
    table = in_step(*names)
    for _ in range(20):
        before = sum(counts(table, name).exchanges_ok for name in names)
        table.step()
        table.run(0.11)  # Offer, Accept, payload, Acknowledge
        assert sum(counts(table, name).exchanges_ok for name in names) == before + 2
        table.run(2.0)
    for name in names:
        assert counts(table, name).exchanges_ok >= 20
        assert counts(table, name).exchanges_failed == 0


def test_an_offer_that_is_taken_back_while_our_accept_is_on_its_way_costs_no_trust():
    """Check a slow answer: amber accepts cedar's offer before it comes, and birch has accepted by then."""
    table = in_step("amber", "birch", "cedar")
    table["amber"].core._core.members.pause(PeerId("cedar"), table.now + 1.5, table.now)
    table.lag_s = lambda sender, link: 3.0 if sender == "birch" and not link.outbound else 0.0
    table.step("amber")
    table.run(1.2)
    table["cedar"].core._core.members.pause(PeerId("birch"), table.now + 1.0, table.now)
    table.step("cedar")
    table.run(0.5)
    assert counts(table, "cedar").exchanges_ok == 1
    assert counts(table, "birch").offers_withdrawn == 1
    assert counts(table, "birch").exchanges_failed == 0
    assert not table["birch"].core._core.members.is_distrusted(PeerId("amber"), table.now)
    assert [note.why for note in table.notes if note.kind == "skipped"] == [
        "it took back its offer, and we had accepted"
    ]


@pytest.mark.parametrize(("waits_s", "exchanges"), [(0.2, False), (4.9, False), (4.9, True)])
def test_who_takes_its_offers_back_holds_nobody_for_most_of_the_time(waits_s, exchanges):
    """Check a peer that withdraws each offer, late or early, and may exchange in between."""
    table = in_step("amber", "birch", "cedar")
    core, held_s = table["amber"].core, 0.0
    terms = Terms(1, 10.0, 1.0, float("inf"), True, PeerState.TRAINING)
    until = table.now + 300.0
    core._core.members.get(PeerId("cedar")).live_until = until  # while another one can be called
    for serial in range(100, 10_000):
        link = LinkId(PeerId("birch"), serial, outbound=False)
        effects = core.handle(Received(link, Offer(RULES.run, RULES.protocol, (0,), terms)), table.now)
        is_held = any(isinstance(effect, Swap) for effect in effects)
        if is_held and (serial % 2 or not exchanges):
            held_s += waits_s
            table.now += waits_s
            core.handle(LinkFailed(link, "it ended", unbegun=True), table.now)
        elif is_held:
            core.handle(SwapDone(link, 1000, 1000, 0.01, 1.0), table.now)
            core.handle(Received(link, Acknowledge()), table.now)
            core.handle(Applied(link, 10.0), table.now)
        table.now += 0.05
        if table.now >= until:
            break
    assert 0 < held_s < 0.3 * 300.0


def test_two_peers_that_stalled_exchange_again_within_a_second_of_the_last_failure():
    """For forty seconds no payload arrives, as on a computer that other programs keep busy."""
    table = in_step("amber", "birch")
    stalled_until = table.now + 40.0
    table.holds_back = lambda sender, receiver, what: isinstance(what, Swap) and table.now < stalled_until
    while table.now < stalled_until + 10.0:
        table.step(tokens=0.1)
        table.run(2.0)
    failures = [line for line in table.trace if " failed " in line]
    failed_at = float(failures[-1].split()[0])
    assert len(failures) >= 10
    exchanged = [float(line.split()[0]) for line in table.trace if " exchanged " in line]
    assert min(time for time in exchanged if time > failed_at) < failed_at + 1.0


def test_who_declines_with_a_progress_that_cannot_be_is_left_alone():
    table = in_step("amber", "birch")
    core = table["amber"].core
    core._core.settled = False
    table.step("amber")
    link = next(iter(table["amber"].ends))
    no = Decline(DeclineReason.CATCH_UP_FIRST, PeerState.TRAINING, 1, 1e300, ())
    core.handle(Received(link, no), table.now)
    known = core._core.members.get(PeerId("birch"))
    assert known is not None
    assert known.not_before >= table.now + 1.0


@pytest.mark.parametrize(("unbegun", "outbound"), [(False, False), (True, True), (False, True)])
def test_what_breaks_off_otherwise_is_an_exchange_that_failed(unbegun, outbound):
    """After a byte of the payload, or where the offer was ours, nothing was taken back."""
    table = in_step("amber", "birch", "cedar")
    table.holds_back = lambda sender, receiver, what: isinstance(what, Swap)
    table.step("birch" if outbound else "amber")
    table.run(0.05)
    link = next(iter(table["birch"].swaps))
    assert link.outbound is outbound
    table.handle(PeerId("birch"), LinkFailed(link, "it ended", unbegun=unbegun))
    assert counts(table, "birch").exchanges_failed == 1
    assert counts(table, "birch").offers_withdrawn == 0
    assert table["birch"].core._core.members.is_distrusted(PeerId("amber"), table.now)


def test_the_fast_turn_nobody_into_a_flood():
    """Check fifty outer steps a second: dials stay within the rate limit, and all peers exchange."""
    table, calls = in_step("amber", "birch", rules=run_rules(run_tokens=1e6), latency=0.001), RateLimiter()
    table.swap_s = table.apply_s = 0.001
    table.holds_back = lambda sender, receiver, what: (
        isinstance(what, Offer) and not calls.admits((sender, receiver), table.now)
    )
    for step in range(1500):
        table.step("amber" if step % 2 else "birch")
        table.run(0.01)
    for name in "amber", "birch":
        assert counts(table, name).exchanges_ok >= 2 * 15 * CALLS_PER_S
        assert counts(table, name).offers_unanswered == 0


@settings(max_examples=40, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    seed=st.integers(0, 10_000),
    peers=st.integers(2, 6),
    steps=st.lists(st.tuples(st.integers(0, 5), st.floats(0.0, 0.4)), min_size=10, max_size=60),
    lossiness=st.floats(0.0, 0.3),
)
def test_any_schedule_keeps_fragments_engaged_once_and_loses_no_progress(seed, peers, steps, lossiness):
    """Check random outer steps and random payload losses.

    No fragment is ever in two exchanges. Exchanges lower no peer's progress by more than they raise another's, and
    raise none beyond all others by more than an outer step, which may end during an exchange. (Payloads are lost
    before a commit, no peer joins, and none is far enough behind to pull.)
    """
    names = [f"peer{n}" for n in range(peers)]
    table = in_step(*names, seed=seed, rules=run_rules(catch_up_outer_steps=1000.0))
    for seat in table.seats.values():
        seat.progress = seat.core._core.progress = ProgressBounds(RULES).beginner + 10.0
    random = Random(seed)
    table.holds_back = lambda sender, receiver, what: isinstance(what, Swap) and random.random() < lossiness
    trained = sum(seat.progress for seat in table.seats.values())
    furthest = 0.0
    for who, pause in steps:
        table.step(names[who % peers])
        trained += 10.0
        furthest = max(furthest, *(seat.progress for seat in table.seats.values()))
        table.run(pause)
        for seat in table.seats.values():
            engaged = [fragment for fragments in seat.snapshots for fragment in fragments]
            assert len(engaged) == len(set(engaged))
    table.holds_back = lambda sender, receiver, what: False
    table.run(120.0)
    assert sum(seat.progress for seat in table.seats.values()) >= trained - 1e-6
    for seat in table.seats.values():
        assert seat.progress <= furthest + RULES.tokens_per_outer_step
        assert not seat.snapshots
        assert not len(seat.core._exchanges.book)


def test_more_is_offered_than_is_exchanged_so_that_the_partner_can_choose():
    """Check partners with different fragments engaged: the responder selects from those that are free on both sides."""
    rules = run_rules(fragment_bytes=(1000,) * 8, fragments_per_exchange=2)
    table = in_step("amber", "birch", rules=rules)
    seen = []
    table.holds_back = lambda sender, receiver, what: seen.append(what) or False
    table.step("amber")
    table.run(1.0)
    (offer,) = (each for each in seen if isinstance(each, Offer))
    (accept,) = (each for each in seen if isinstance(each, Accept))
    assert offer.fragments == tuple(range(8))
    assert len(accept.fragments) == 2
    assert table["amber"].core.counters.exchanges_ok == 1


def test_who_accepts_more_than_an_exchange_may_hold_broke_the_protocol():
    rules = run_rules(fragment_bytes=(1000,) * 8, fragments_per_exchange=2)
    core = Peer(PeerId("amber"), rules, Random(1))
    core.handle(Started(), 0.0)
    core.handle(PeersSeen(((presence("birch"), 100.0),)), 0.1)
    effects = core.handle(OuterStepDone(1, 10.0, 10), 5.0)
    (opened,) = (effect for effect in effects if isinstance(effect, Open))
    assert isinstance(opened.message, Offer)
    terms = replace(opened.message.terms, settled=True)
    effects = core.handle(Received(opened.link, Accept((0, 1, 2), terms)), 5.1)
    assert any(isinstance(effect, Note) and effect.kind == "broke protocol" for effect in effects)
    assert core.counters.offences == 1


def test_what_is_opened_and_closed_in_one_breath_is_not_opened():
    """Check a finished peer whose displacement was applied: it leaves without opening another link."""
    for seed in range(12):
        table = in_step("amber", "birch", "cedar", seed=seed, rules=run_rules(exchanges_per_step=3))
        for seat in table.seats.values():
            seat.core.handle = _watched(seat.core.handle)
        table.step()
        table.end_training()
        table.run(30.0)
        assert all(seat.finished for seat in table.seats.values())


def test_exchanges_that_fall_due_within_a_phase_begin_when_the_trainer_says_so():
    table = in_step("amber", "birch", rules=run_rules(exchanges_per_step=2, due_in_phase=True))
    done = table["amber"].core.counters
    table.step("amber")
    table.run(1.0)
    assert done.exchanges_ok == 0
    for exchanges in 1, 2:
        table.handle(PeerId("amber"), ExchangeDue())
        table.run(1.0)
        assert done.exchanges_ok == exchanges


def test_what_falls_due_and_finds_nobody_is_not_piled_up():
    table = in_step("amber", "birch", rules=run_rules(due_in_phase=True))
    table.holds_back = lambda sender, receiver, what: True
    for _ in range(5):
        table.handle(PeerId("amber"), ExchangeDue())
    table.run(0.1)
    table.holds_back = lambda sender, receiver, what: False
    table.run(60.0)
    assert table["amber"].core.counters.exchanges_ok == 1


def _watched(handle):
    def handle_and_look(event, now):
        effects = handle(event, now)
        links = [{effect.link for effect in effects if isinstance(effect, kind)} for kind in (Open, Close)]
        assert not links[0] & links[1]
        return effects

    return handle_and_look


def test_a_frozen_partner_keeps_nobody_from_the_others():
    """Check that each outer step has its exchange soon, also if the frozen peer is called first."""
    table = in_step("amber", "birch", "cedar")
    for name in "amber", "birch":
        for _ in range(10):
            table[name].core._core.deadlines.replied(0.02)
    table["cedar"].frozen = True
    late_s = table["amber"].core._core.deadlines.prompt_reply_s()
    made, called = 0, 0
    for _ in range(12):
        table.trace.clear()
        before = counts(table, "amber").exchanges_ok
        table["amber"].core._core.members.record_success(PeerId("cedar"))  # it may be called again
        table.step("amber")
        table.run(late_s + 0.2)
        made += counts(table, "amber").exchanges_ok > before
        called += any("amber -> cedar: Offer" in line for line in table.trace)
        table.run(2 * REPLY_BOUNDS_S[0])  # the offer to the frozen peer has failed
    assert made == 12
    assert called > 2
