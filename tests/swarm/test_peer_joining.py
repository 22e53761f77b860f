"""Joining late, resuming, and the end of the run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, cast

import pytest
from run_rules import run_rules
from table import RULES, RUN, Seat, Table, presence

from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.swarm import PeerState, exchange_manager
from p2ptrain.swarm.catchup import PullUnderWay, steps_near
from p2ptrain.swarm.claims import supported
from p2ptrain.swarm.events import (
    Adopt,
    Adopted,
    Close,
    Donate,
    Effect,
    Event,
    Giving,
    LeaveRequested,
    LinkFailed,
    Note,
    OuterStepDone,
    Pull,
    Pulled,
    Received,
    Send,
    TrainingEnded,
    Unfit,
    Woke,
)
from p2ptrain.swarm.matching import STEPS_SLACK, implausible_step
from p2ptrain.swarm.messages import Acknowledge, Decline, DeclineReason, Offer, WeightsReply, WeightsRequest
from p2ptrain.swarm.partners import own_terms
from p2ptrain.swarm.peer_info import FailureKind, PeerInfo
from p2ptrain.swarm.rules import (
    BEGINNER_STEPS,
    FINAL_PACE_S,
    GIVEN_BYTES,
    GIVEN_TO_ONE,
    GIVING_WINDOW_S,
    MAX_CALLS,
    MAX_DONATIONS,
    ProgressBounds,
    SwarmRules,
)


def under_way(steps: int = 30, rules: SwarmRules = RULES) -> Table:
    table = Table("amber", "birch", rules=rules)
    table.start()
    table.run(3.0)
    for _ in range(steps):
        table.step("amber", "birch")
        table.run(0.5)
    return table


def test_the_first_peers_start_from_the_seed_without_pulling():
    table = Table("amber", "birch", "cedar")
    table.start()
    table.run(3.0)
    assert all(seat.begun for seat in table.seats.values())
    assert all(seat.core.counters.pulls == 0 for seat in table.seats.values())


def test_a_newcomer_pulls_before_it_trains_or_pushes():
    table = under_way()
    table.run(21.0)  # records are renewed
    newcomer = table.seat("cedar")
    table.start("cedar")
    table.run(0.05)
    assert not newcomer.begun
    table.run(2.0)
    assert newcomer.begun
    assert newcomer.core.settled
    assert newcomer.core.counters.pulls == 1
    assert newcomer.progress == pytest.approx(600.0, abs=40), "30 outer steps of two"
    assert newcomer.core.counters.exchanges_ok == 0  # none before it was settled
    for _ in range(5):
        table.step()
        table.run(0.5)
    assert newcomer.core.counters.exchanges_ok > 0
    assert newcomer.core.counters.pulls == 1  # exactly one


def test_a_donor_that_dies_is_replaced_by_another():
    table = under_way()
    table.run(21.0)
    newcomer = table.seat("cedar")
    table.start("cedar")
    table.run(0.045)
    asked = [name for name in ("amber", "birch") if f"cedar -> {name}: WeightsRequest" in " ".join(table.trace)]
    assert len(asked) == 1
    table.kill(asked[0])
    table.run(30.0)
    assert newcomer.core.counters.pulls == 1


def with_cedar_waiting_for_weights() -> tuple[Table, Seat]:
    """Return a table on which cedar's donor has just agreed, but sends nothing."""
    table = under_way()
    table.run(21.0)
    newcomer = table.seat("cedar")
    table.holds_back = lambda sender, receiver, what: isinstance(what, Donate)
    table.start("cedar")
    table.run(1.0)
    return table, newcomer


def test_a_frozen_donor_is_given_up_at_the_deadline():
    table, newcomer = with_cedar_waiting_for_weights()
    table.run(9.0)
    assert newcomer.core.counters.pulls == 0
    table.holds_back = lambda sender, receiver, what: False
    table.run(60.0)
    assert newcomer.core.counters.pulls == 1


def test_an_offer_from_a_newcomer_is_declined_until_it_caught_up():
    table = under_way()
    table.seat("cedar")
    newcomer = table["cedar"].core
    link = LinkId(PeerId("cedar"), 50, outbound=False)
    offer = Offer(table.rules.run, table.rules.protocol, (0,), own_terms(newcomer._core, PeerId("amber")))
    effects = table["amber"].core.handle(Received(link, offer), table.now)
    assert [e.message.reason for e in effects if isinstance(e, Send)] == [DeclineReason.CATCH_UP_FIRST]


def test_a_slow_peer_that_was_in_step_is_no_newcomer():
    table = under_way()
    for _ in range(30):
        table.step("amber")
        table.run(0.05)
    table.run(5.0)
    assert table["birch"].core.counters.pulls == 0
    assert table["birch"].core.counters.exchanges_ok > 0


def test_a_lone_starter_that_meets_a_run_under_way_pulls_while_it_trains():
    table = under_way()
    table.run(21.0)
    table.seat("cedar")
    table.directory_answers = False
    table.start("cedar")
    table.run(25.0)
    assert table["cedar"].begun
    table.step("cedar")
    table.directory_answers = True
    table.run(30.0)
    assert table["cedar"].core.counters.pulls == 1
    assert table["cedar"].core.state is PeerState.TRAINING


def test_a_resumed_peer_within_the_bound_goes_on_with_its_own_weights():
    table = under_way()
    table.run(21.0)
    resumed = table.seat("cedar", progress=560.0, step=28)
    table.start("cedar")
    table.run(3.0)
    assert resumed.begun
    assert resumed.core.counters.pulls == 0


def test_a_donor_gives_to_one_newcomer_at_a_time():
    table = under_way()
    request = WeightsRequest(table.rules.run, table.rules.protocol, 0.0)
    core = table["amber"].core
    first = core.handle(Received(LinkId(PeerId("x"), 1, outbound=False), request), table.now)
    second = core.handle(Received(LinkId(PeerId("y"), 2, outbound=False), request), table.now)
    assert [type(e.message) for e in first if isinstance(e, Send)] == [WeightsReply]
    assert [e.message.reason for e in second if isinstance(e, Send)] == [DeclineReason.BUSY]
    core.handle(LinkFailed(LinkId(PeerId("x"), 1, outbound=False), "reset"), table.now)
    third = core.handle(Received(LinkId(PeerId("y"), 3, outbound=False), request), table.now)
    assert [type(e.message) for e in third if isinstance(e, Send)] == [WeightsReply]


def test_who_has_nothing_to_give_is_busy_until_it_has():
    table = under_way()
    request, core, answers = WeightsRequest(table.rules.run, table.rules.protocol, 0.0), table["amber"].core, []
    for serial, gives in enumerate((False, True)):
        core.handle(Giving(gives), table.now)
        effects = core.handle(Received(LinkId(PeerId("x"), serial, outbound=False), request), table.now)
        answers += [effect.message for effect in effects if isinstance(effect, Send)]
    assert [type(each) for each in answers] == [Decline, WeightsReply]
    assert answers[0].reason is DeclineReason.BUSY


def test_a_lying_donor_progress_is_refused():
    table = Table("amber", "birch")
    table.records[PeerId("birch")] = presence("birch", progress=500.0)
    table.start("amber")
    table.run(0.035)
    link = next(iter(table["amber"].ends))
    table.handle(PeerId("amber"), Received(link, WeightsReply(1, 1e12)))
    assert table["amber"].core.counters.offences == 1


def test_the_run_ends_with_agreement_and_everybody_leaves():
    table = under_way()
    table.end_training()
    table.run(30.0)
    finished = [seat.finished for seat in table.seats.values()]
    assert "the swarm agrees" in finished
    assert set(finished) <= {"the swarm agrees", "nobody is left to exchange with"}


def concluding(evaluation_s: float = 60.0) -> Table:
    """Return a table whose two peers agreed at the run's end and read their final loss."""
    table = under_way()
    table.evaluation_s = evaluation_s
    for seat in table.seats.values():
        seat.progress = table.rules.run_tokens
    table.end_training()
    while not all(seat.core._core.is_over for seat in table.seats.values()):
        table.run(0.5)
    assert not any(seat.finished for seat in table.seats.values())
    return table


def test_a_latecomer_gets_the_weights_while_the_last_peers_read_their_final_loss():
    table = concluding()
    exchanged = table["amber"].core.counters.exchanges_ok
    cedar = table.seat("cedar")
    table.start("cedar")
    table.run(3.0)
    assert (cedar.progress, cedar.begun) == (table.rules.run_tokens, True)
    (ended,) = [note for note in table.notes if note.kind == "run ended"]
    assert ended.peer in table.seats
    table.end_training("cedar")
    table.run(10.0)
    assert cedar.core._core.is_over
    assert [note.why for note in table.notes if note.kind == "finished"][-1] == "nobody is left to exchange with"
    assert table["amber"].core.counters.exchanges_ok == exchanged, "their weights are final"
    table.run(60.0)
    assert all(seat.finished for seat in table.seats.values())


def test_a_peer_that_comes_after_the_others_have_left_says_that_the_run_was_trained_to_its_end():
    for progress_of_one, says in ((1.0, True), (0.5, False)):
        table = under_way()
        for seat in table.seats.values():
            seat.progress = progress_of_one * table.rules.run_tokens
            table.handle(seat.core._core.me, OuterStepDone(seat.core._core.step + 1, seat.progress, 1000))
        for name in list(table.seats):
            table.handle(PeerId(name), LeaveRequested())
        table.run(10.0)
        late = table.seat("cedar")
        table.start("cedar")
        table.run(10.0)
        assert late.begun
        told = [note.why for note in table.notes if note.kind == "ended before"]
        assert told == (["2 of its peers announced its end and left"] if says else [])
        assert [line for line in table.trace if "cedar found" in line] == []  # those that left are not there


def test_latecomers_hear_hours_later_that_the_run_was_trained_to_its_end():
    table = under_way()
    for seat in table.seats.values():
        seat.progress = table.rules.run_tokens
    table.end_training()
    table.run(3 * 3600.0)
    assert all(seat.finished for seat in table.seats.values())
    for name in ("cedar", "dune"):
        late = table.seat(name)
        table.start(name)
        table.run(30.0)
        assert late.begun
        told = [line for line in table.trace if f"{name} ended before" in line]
        assert [line.partition("before ")[2] for line in told] == ["2 of its peers announced its end and left"]


def test_a_peer_killed_before_its_first_checkpoint_returns_after_the_end_as_a_newcomer():
    """Check both: it gets the weights of peers that read their final loss, and later it hears that all have left."""
    table = under_way()
    table.evaluation_s = 60.0
    table.seat("cedar")
    table.start("cedar")
    table.run(5.0)
    table.kill("cedar")
    for name in ("amber", "birch"):
        table[name].progress = table.rules.run_tokens
    table.end_training("amber", "birch")
    while not all(table[name].core._core.is_over for name in ("amber", "birch")):
        table.run(0.5)
    back = table.seat("cedar")
    table.start("cedar")
    table.run(3.0)
    assert (back.progress, [note.kind for note in table.notes].count("run ended")) == (table.rules.run_tokens, 1)
    table.kill("cedar")
    table.run(3600.0)
    assert all(table[name].finished for name in ("amber", "birch"))
    table.seat("cedar")
    table.start("cedar")
    table.run(30.0)
    (ended,) = [note for note in table.notes if note.kind == "ended before"]
    assert ended.why == "2 of its peers announced its end and left"


def test_who_trains_beside_finished_peers_hears_of_no_end():
    """Check a peer that was in step, and a newcomer that pulls, while a peer still trains after others finished."""
    table = under_way()
    for seat in table.seats.values():
        seat.progress = 0.9 * table.rules.run_tokens
        table.handle(seat.core._core.me, OuterStepDone(seat.core._core.step + 1, seat.progress, 1000))
    table.run(25.0)  # their records say so
    table.finished[PeerId("elm")] = presence("elm", table.rules.run_tokens, PeerState.LEAVING)
    table.finished[PeerId("fir")] = presence("fir", 10.0, PeerState.LEAVING)
    table.seat("cedar")
    table.seat("dune", step=9, progress=0.9 * table.rules.run_tokens)
    table.start("cedar", "dune")
    table.run(30.0)
    assert [note.kind for note in table.notes if note.kind == "ended before"] == []


def test_a_goodbye_says_the_end_although_the_final_gossip_lowered_the_progress():
    table = under_way()
    for seat in table.seats.values():
        seat.progress = table.rules.run_tokens
    table.end_training()
    for seat in table.seats.values():
        seat.core._core.progress *= 0.99
    table.run(60.0)
    assert [record.progress for record in table.finished.values()] == [table.rules.run_tokens] * 2


def test_what_is_given_after_the_final_gossip_is_final_whatever_progress_its_averages_left():
    table = concluding(evaluation_s=6.0)
    table.run(2.5)
    core = table["amber"].core
    core._core.progress *= 0.99
    request = WeightsRequest(table.rules.run, table.rules.protocol, 0.0)
    answers = core.handle(Received(LinkId(PeerId("dune"), 1, outbound=False), request), table.now)
    (reply,) = [each.message for each in answers if isinstance(each, Send)]
    assert reply.progress == table.rules.run_tokens


def test_a_peer_after_its_final_gossip_leaves_once_a_download_has_ended_or_at_once_if_its_owner_stops_it():
    for stops in (False, True):
        table = concluding(evaluation_s=6.0)
        table.swap_s = 4.5
        table.run(2.5)
        cedar = table.seat("cedar")
        table.start("cedar")
        table.run(4.0)
        donor = next(
            seat for seat in table.seats.values() if seat.core.state is PeerState.LEAVING and not seat.finished
        )
        link = LinkId(PeerId("dune"), 1, outbound=False)
        request = WeightsRequest(table.rules.run, table.rules.protocol, 0.0)
        (refusal,) = [e.message for e in donor.core.handle(Received(link, request), table.now) if isinstance(e, Send)]
        assert refusal.reason is DeclineReason.LEAVING
        if stops:
            table.handle(donor.core._core.me, LeaveRequested())
            assert donor.finished == "the swarm agrees"
            continue
        table.run(8.0)
        assert cedar.progress == table.rules.run_tokens
        assert donor.finished


def test_a_newcomer_that_never_ends_its_download_does_not_keep_a_peer():
    table = concluding(evaluation_s=6.0)
    table.holds_back = lambda sender, receiver, what: isinstance(what, Donate)
    table.seat("cedar")
    table.start("cedar")
    table.run(6.0 + table.rules.final_gossip_s)
    assert table["amber"].finished
    assert table["birch"].finished


def test_partners_still_in_their_final_gossip_do_not_wait_for_one_that_is_over():
    table = Table("amber", "birch", "cedar", rules=run_rules(final_gossip_s=1000.0))
    table.evaluation_s = 500.0
    table.start()
    table.run(3.0)
    table.step()
    table.apart = lambda me, partner: (0.001 if PeerId("amber") in (me, partner) else 1.0, 0.0)
    table.end_training()
    table.run(20.0)
    assert table["amber"].core._core.is_over
    table.apart = lambda me, partner: (0.001, 0.0)
    table.run(20.0)
    assert all(seat.core._core.is_over for seat in table.seats.values())


def test_a_peer_that_was_paused_after_its_end_goes_on_with_the_final_gossip():
    table = under_way()
    seat = table.seat("cedar", step=100, progress=table.rules.run_tokens)
    table.start("cedar")
    table.end_training("cedar")
    table.run(5.0)
    assert seat.core.state is PeerState.FINISHING


def test_a_finisher_waits_for_those_who_train_but_not_for_ever():
    table = under_way()
    table.end_training("amber")
    for _ in range(10):
        table.step("birch")
        table.run(1.0)
    assert not table["amber"].finished
    table.run(table.rules.final_gossip_s)
    assert table["amber"].finished


def test_a_peer_left_alone_at_the_end_stops_soon():
    table = under_way()
    table.kill("birch")
    table.end_training("amber")
    table.run(table.rules.final_gossip_s + 5)
    assert table["amber"].finished


def test_acknowledgements_of_nothing_keep_nobody_from_its_final_gossip():
    """Check acknowledgements without an exchange: they must not delay the next exchange, as real ones do."""
    table = under_way()
    core = table["amber"].core
    before = core.counters.exchanges_ok
    table.end_training("amber")
    for number in range(40):
        stranger = LinkId(PeerId("stranger"), number, outbound=False)
        assert core.handle(Received(stranger, Acknowledge()), table.now)[0] == Close(stranger)
        table.run(FINAL_PACE_S / 2)
    assert core.counters.exchanges_ok >= before + 3


def test_a_finished_core_answers_nothing_but_close():
    table = under_way()
    table.end_training()
    table.run(40.0)
    link = LinkId(PeerId("birch"), 1000, outbound=False)
    offer = Offer(table.rules.run, table.rules.protocol, (0,), own_terms(table["birch"].core._core, PeerId("amber")))
    assert [type(e).__name__ for e in table["amber"].core.handle(Received(link, offer), table.now)] == ["Close"]


def pulled(table: Table) -> LinkId:
    """Return a pull of cedar whose weights have arrived, but which its trainer has not adopted yet."""
    table.run(21.0)
    table.seat("cedar")
    table.apply_s = 1000.0  # the trainer is slow
    table.start("cedar")
    table.run(1.0)
    pull = table["cedar"].core._catch_up.pull
    assert pull is not None
    assert pull.adopting
    return pull.link


def test_weights_that_are_worth_nothing_are_taken_from_somebody_else():
    table = under_way()
    link = pulled(table)
    [other] = {"amber", "birch"} - {link.peer}
    table.apply_s = 0.0
    table.handle(PeerId("cedar"), Unfit(link, "its weights do worse than guessing"))
    assert table["cedar"].core.state is PeerState.JOINING
    assert any(f"cedar failed {link.peer} its weights do worse than guessing" in line for line in table.trace)
    table.run(1.0)
    assert table["cedar"].core.counters.pulls == 1
    assert any(f"cedar caught up {other}" in line for line in table.trace)


def test_that_weights_are_worth_nothing_is_no_news_of_a_pull_that_is_over():
    table = under_way()
    link = pulled(table)
    table.handle(PeerId("cedar"), Adopted(link, 30, 300.0))
    table.handle(PeerId("cedar"), Unfit(link, "too late"))
    assert table["cedar"].core.settled
    assert not any("too late" in line for line in table.trace)


def busy_donors(*newcomers: str) -> Table:
    """Return a swarm of two whose donors are busy, and newcomers that have stopped waiting and train."""
    table = under_way()
    table.run(21.0)
    for donor in ("amber", "birch"):
        others = [LinkId(PeerId("ghost"), number, outbound=False) for number in range(MAX_DONATIONS)]
        table[donor].core._catch_up._donations = dict.fromkeys(others, float("inf"))
    for name in newcomers:
        table.seat(name)
        table.start(name)
    table.run(60.0)
    assert all(table.seats[PeerId(name)].begun for name in newcomers)
    for _ in range(5):
        table.step(*newcomers)
        table.run(0.5)
    return table


def test_two_newcomers_that_meet_are_not_in_step_for_it():
    """Check that they still pull: else they would stay near the start, as the swarm's slowest peers."""
    table = busy_donors("cedar", "dusk")
    newcomers = [table[name].core for name in ("cedar", "dusk")]
    assert all(each.counters.exchanges_ok > 0 for each in newcomers)
    assert not any(each.settled for each in newcomers)
    for donor in ("amber", "birch"):
        table[donor].core._catch_up._donations.clear()
    table.run(60.0)
    assert [each.counters.pulls for each in newcomers] == [1, 1]
    assert all(each.settled for each in newcomers)


def test_who_is_busy_is_asked_for_its_copies_all_the_same():
    """Check that busy donors compare weights: else a peer that keeps them busy would select a newcomer's donors."""
    table = under_way()
    table.run(21.0)
    table.seat("cedar")
    table.start("cedar")
    table.run(0.045)
    core = table["cedar"].core
    for donor in ("amber", "birch"):
        core._core.members.pause(PeerId(donor), table.now + 10.0, table.now)
    assert set(core.donors(table.now)) == {"amber", "birch"}
    core._core.members.record_failure(PeerId("birch"), table.now, FailureKind.OFFENCE)
    assert set(core.donors(table.now)) == {"amber"}


def test_who_is_in_step_beside_a_donor_is_asked_for_its_copy_though_it_need_not_give():
    """Check a young swarm in which one peer is just far enough ahead to be a donor, and the others almost are."""
    table = Table("cedar")
    bounds = ProgressBounds(table.rules, 5.0)
    bound, own = bounds.catch_up, bounds.beginner + 1.0
    table.records = {
        PeerId(name): presence(name, progress=own + progress, settled=settled)
        for name, progress, settled in (
            ("amber", 1.1 * bound, True),
            ("birch", 0.9 * bound, True),
            ("newcomer", 0.9 * bound, False),
            ("far behind", 0.5 * bound, True),
        )
    }
    core = table["cedar"].core
    core._core.progress = own  # it has weights of its own
    table.start()
    table.run(0.045)
    assert set(core.donors(table.now)) == {"amber", "birch"}
    core._core.members.record_failure(PeerId("birch"), table.now, FailureKind.OFFENCE)
    assert set(core.donors(table.now)) == {"amber"}


def test_where_nobody_is_far_ahead_nobody_is_asked_for_copies():
    table = Table("cedar")
    table.records[PeerId("amber")] = presence("amber", progress=0.9 * ProgressBounds(table.rules).beginner)
    table.start()
    table.run(0.045)
    assert table["cedar"].core.donors(table.now) == {}


@pytest.mark.parametrize(("progress", "pulls"), [(0.0, 1), (ProgressBounds(RULES, 3.0).beginner + 1.0, 0)])
def test_who_only_begins_takes_the_weights_of_a_young_swarm_and_who_has_begun_exchanges(progress, pulls):
    """Check a newcomer's initial weights: those of the others after a few outer steps may be unrelated to them."""
    table = under_way(steps=(BEGINNER_STEPS + 2) * 3 // 2)  # of two peers, in steps of three
    cedar = table.seat("cedar")
    cedar.progress = cedar.core._core.progress = progress
    table.start("cedar")
    table.run(2.0)
    for _ in range(5):
        table.step()
        table.run(1.0)
    assert cedar.core.counters.pulls == pulls
    assert cedar.core.counters.exchanges_ok > 0


def test_one_that_boasts_and_gives_nothing_does_not_keep_a_young_swarm_out_of_step():
    table = Table("amber", "birch")
    table.records[PeerId("liar")] = presence("liar", progress=900.0)
    table.start()
    table.run(30.0)
    for _ in range(20):
        table.step("amber", "birch")
        table.run(1.0)
    assert table["amber"].core.settled
    assert table["birch"].core.settled


@dataclass
class Busy:
    """A core that only declines."""

    me: str
    asked: int = 0

    def handle(self, event: Event, now: float) -> list[Effect]:
        if not isinstance(event, Received):
            return []
        self.asked += 1
        decline = Decline(DeclineReason.BUSY, PeerState.TRAINING, 90, 900.0, known=())
        return [Send(event.link, decline), Close(event.link)]


@pytest.mark.parametrize("liars", [1, 2])
def test_who_boasts_and_is_always_busy_keeps_nobody_from_exchanging(liars: int):
    """Check repeated requests to a busy donor: they must not interrupt exchanges, which take longer."""
    names = ("amber", "birch", "cedar", "daisy")
    table = Table(*names)
    table.swap_s = 4.0
    boasters = [f"liar{number}" for number in range(liars)]
    for each in boasters:
        table.seats[PeerId(each)] = Seat(cast(Any, Busy(each)))
    table.start(*names)
    for second in range(180):
        for each in boasters:
            table.records[PeerId(each)] = presence(each, progress=900.0, at=1.0 + table.now)
        if second >= 25 and second % 5 == 0:
            table.step(*names)
        table.run(1.0)
    for name in names:
        counters = table[name].core.counters
        assert counters.exchanges_ok >= 20
        assert counters.exchanges_failed <= 3
        assert len(table.announced[PeerId(name)]) < 15
        assert table[name].core.settled or liars > 1
    for each in boasters:
        assert 4 <= cast(Any, table[each].core).asked <= 100


def test_a_donor_that_does_not_deliver_leaves_time_to_exchange():
    """Check the pause after a donor fails: exchanges have as long as the donor has taken."""
    table = Table("amber", "birch", "donor", rules=run_rules(weights_bytes=8_000_000, fragment_bytes=(200_000,)))
    table.swap_s = 4.0
    table["donor"].progress = table["donor"].core._core.progress = 900.0
    table["donor"].core._core.settled = True
    table.holds_back = lambda sender, receiver, what: isinstance(what, Donate)
    table.start()
    for second in range(130):
        if second >= 25 and second % 10 == 0:
            table.step("amber", "birch", tokens=1.0)
        table.run(1.0)
    assert [table[name].core.settled for name in ("amber", "birch")] == [True, True]


def test_a_donor_whose_weights_we_slept_through_is_asked_again_soon():
    table, newcomer = with_cedar_waiting_for_weights()
    pull = newcomer.core._catch_up.pull
    assert pull is not None
    assert pull.replied_at is not None
    table.now += 8 * 3600.0
    newcomer.core.handle(LinkFailed(pull.link, "it broke meanwhile"), table.now)
    known = newcomer.core._core.members.get(pull.link.peer)
    assert known is None or known.not_before <= table.now + 121.0


def test_a_donor_that_trickles_is_left_alone_for_longer_each_time_and_as_long_as_it_held_us():
    table, newcomer = with_cedar_waiting_for_weights()
    core, pull = newcomer.core._core, newcomer.core._catch_up.pull
    assert pull is not None
    known, pauses = core.members.get(pull.link.peer), []
    assert known is not None
    for attempt in range(5):
        table.now += 1000.0
        newcomer.core._catch_up.pull = replace(pull, replied_at=table.now - 1000.0)
        newcomer.core._catch_up.failed(LinkFailed(pull.link, "too slow"), table.now)
        pauses.append(known.not_before - table.now)
        assert known.unanswered + known.broken == attempt + 1
    assert pauses == [120.0, 240.0, 480.0, 960.0, 1000.0]


def test_an_owner_who_stops_while_weights_are_adopted_gets_a_peer_that_stops():
    table = under_way()
    link = pulled(table)
    table.handle(PeerId("cedar"), LeaveRequested())
    assert not table["cedar"].finished
    table.handle(PeerId("cedar"), Adopted(link, 30, 300.0))
    assert table["cedar"].finished == "stopped by its owner"


def test_the_runs_end_while_weights_are_adopted_is_the_end():
    table = under_way()
    link = pulled(table)
    table.handle(PeerId("cedar"), TrainingEnded(30, 1000.0))
    table.handle(PeerId("cedar"), Adopted(link, 30, 1000.0))
    assert table["cedar"].core.state is PeerState.FINISHING


def test_weights_that_a_finished_trainer_does_not_take_are_nobodys_fault():
    table = under_way()
    link = pulled(table)
    core = table["cedar"].core
    table.handle(PeerId("cedar"), TrainingEnded(30, 1000.0))
    table.handle(PeerId("cedar"), Unfit(link, "the run's end came first"))
    assert core.state is PeerState.FINISHING
    assert core._catch_up.pull is None
    known = core._core.members.get(link.peer)
    assert known.broken == 0
    assert known.distrusted_until <= table.now


def test_a_joiner_whose_donors_never_deliver_trains_all_the_same():
    table, newcomer = with_cedar_waiting_for_weights()
    table.run(119.0)
    assert newcomer.begun


def test_weights_are_given_to_those_who_are_behind_only():
    table = under_way()
    link = LinkId(PeerId("x"), 1, outbound=False)
    request = WeightsRequest(table.rules.run, table.rules.protocol, 590.0)
    effects = table["amber"].core.handle(Received(link, request), table.now)
    assert [e.message.reason for e in effects if isinstance(e, Send)] == [DeclineReason.NOT_BEHIND]
    nan = WeightsRequest(table.rules.run, table.rules.protocol, float("nan"))
    effects = table["amber"].core.handle(Received(LinkId(PeerId("x"), 2, outbound=False), nan), table.now)
    assert [e.message.reason for e in effects if isinstance(e, Send)] == [DeclineReason.NOT_BEHIND]


def test_a_partner_of_another_run_is_no_member():
    table = Table("amber")
    table.start()
    table.run(3.0)
    offer = Offer("cd" * 32, table.rules.protocol, (0,), own_terms(table["amber"].core._core, PeerId("amber")))
    table["amber"].core.handle(Received(LinkId(PeerId("x"), 1, outbound=False), offer), table.now)
    assert table["amber"].core.live_peers(table.now) == []


def test_a_caller_is_found_when_its_record_is_and_looked_for_until_then():
    table = Table("amber", "birch")
    table.directory_answers = False
    table.start()
    table.run(1.0)
    amber, birch = PeerId("amber"), PeerId("birch")
    offer = Offer(RUN, table.rules.protocol, (0,), own_terms(table["birch"].core._core, PeerId("amber")))
    table.handle(amber, Received(LinkId(birch, 1, outbound=False), offer))
    assert table["amber"].core.live_peers(table.now) == [birch]
    assert not [line for line in table.trace if "amber found birch" in line]
    table.directory_answers = True
    table.run(5.0)  # an initiator that has no record is not remembered, so the search continues
    assert [line for line in table.trace if "amber found birch" in line]


def test_who_could_not_be_reached_for_long_is_served_as_soon_as_it_calls():
    table = under_way()
    table.kill("birch")
    for _ in range(60):
        table.step("amber")
        table.run(1.0)
    table.records[PeerId("birch")] = presence("birch", at=table.now)  # back under the same identity
    returned = table.seat("birch")
    table.start("birch")
    table.run(1.0)
    assert returned.core.counters.pulls == 1
    assert returned.core.settled


def test_who_is_behind_asks_again_until_it_is_given_weights_and_exchanges_nothing_meanwhile():
    table = under_way(rules=run_rules(run_tokens=10_000.0))
    table.run(21.0)
    table.seat("cedar")
    table.holds_back = lambda sender, receiver, what: isinstance(what, WeightsRequest)
    table.start("cedar")
    for _ in range(60):  # all train, and no donor gives weights
        table.step()
        table.run(1.0)
    assert table["cedar"].begun
    assert table["cedar"].core.counters.exchanges_ok == 0
    table.holds_back = lambda sender, receiver, what: False
    for _ in range(60):
        table.step()
        table.run(1.0)
    assert table["cedar"].core.counters.pulls == 1
    assert table["cedar"].core.counters.exchanges_ok > 0


def with_cedar_in_step(rules: SwarmRules = RULES) -> Table:
    """Return three peers that have exchanged; cedar joined last."""
    table = under_way(5, rules)
    table.seat("cedar")
    table.run(21.0)
    table.start("cedar")
    table.run(3.0)
    for _ in range(5):
        table.step()
        table.run(1.0)
    assert table["cedar"].core.settled
    return table


def test_a_peer_that_was_cut_off_for_long_catches_up_like_a_newcomer():
    table = with_cedar_in_step(run_rules(run_tokens=3000.0))
    cedar = table["cedar"]
    exchanged, pulled_before = cedar.core.counters.exchanges_ok, cedar.core.counters.pulls
    table.holds_back = lambda sender, receiver, what: "cedar" in (sender, receiver)
    for _ in range(70):
        table.step("amber", "birch")
        table.step("cedar", tokens=0.1)
        table.run(1.0)
    table.holds_back = lambda sender, receiver, what: False
    for _ in range(150):  # the backoff for peers that could not be dialed is up to two minutes
        table.step(tokens=0.1)
        table.run(1.0)
    assert any("cedar out of step" in line for line in table.trace)
    assert not any("cedar slept" in line for line in table.trace)
    assert cedar.core.counters.pulls == pulled_before + 1
    assert cedar.progress == pytest.approx(table["amber"].progress, abs=100)
    assert cedar.core.counters.exchanges_ok > exchanged
    assert cedar.core.counters.offences == table["amber"].core.counters.offences == 0


@pytest.mark.parametrize(("steps_ahead", "pulls"), [(70, 1), (12, 1), (6, 0)])
def test_a_peer_that_slept_catches_up_where_the_swarm_has_gone_on_and_goes_on_where_it_has_not(steps_ahead, pulls):
    table = with_cedar_in_step(run_rules(run_tokens=3000.0))
    cedar = table["cedar"]
    exchanged, pulled_before = cedar.core.counters.exchanges_ok, cedar.core.counters.pulls
    cedar.frozen = True
    for second in range(80):
        if second < steps_ahead:
            table.step("amber", "birch")
        table.run(1.0)
    cedar.frozen = False
    table.step("cedar", tokens=1.0)
    assert not cedar.core.settled
    for _ in range(15):
        table.step(tokens=1.0)
        table.run(1.0)
    woken = next(place for place, line in enumerate(table.trace) if "cedar slept" in line)
    kinds = ("cedar caught up", "cedar exchanged")
    first = next(kind for line in table.trace[woken:] for kind in kinds if kind in line)
    assert first == kinds[0 if pulls else 1], "old weights are mixed into nobody's"
    assert cedar.core.counters.pulls == pulled_before + pulls
    assert cedar.core.settled
    assert cedar.progress == pytest.approx(table["amber"].progress, abs=100)
    assert cedar.core.counters.exchanges_ok > exchanged
    assert cedar.core.counters.offences == table["amber"].core.counters.offences == 0


def test_one_that_boasts_takes_nobody_in_who_wakes_among_others():
    table = Table("amber", "birch", "cedar", "delta", "liar", rules=run_rules(run_tokens=5000.0), seed=5)
    table.start()
    table.run(1.0)
    for _ in range(5):
        table.step("amber", "birch", "cedar", "delta")
        table.run(1.0)
    cedar = table["cedar"]
    assert cedar.core.settled
    cedar.frozen = True
    for _ in range(80):
        table.run(1.0)
    table["liar"].step, table["liar"].progress = 90, 4500.0
    table.handle(PeerId("liar"), OuterStepDone(90, 4500.0, 10))
    for name in table.seats:
        table.records[name] = presence(name, table[name].progress, at=table.now)
    cedar.frozen = False
    for _ in range(15):
        table.step("amber", "birch", "cedar", "delta")
        table.step("liar", tokens=0.0)
        table.run(1.0)
    assert any("cedar slept" in line for line in table.trace)
    assert cedar.core.counters.pulls == 0
    assert cedar.core.settled
    assert cedar.progress < 2500.0


def test_who_waits_for_nothing_long_has_not_slept():
    table = with_cedar_in_step()
    for _ in range(300):  # no outer step ends for five minutes
        table.run(1.0)
    assert not any("slept" in line for line in table.trace)


def with_a_pull_begun() -> tuple[Table, Seat, PullUnderWay]:
    """Return a table on which cedar has joined late and asked for weights."""
    table = under_way()
    table.run(21.0)
    cedar = table.seat("cedar")
    table.start("cedar")
    table.run(0.03)
    pull = cedar.core._catch_up.pull
    assert pull is not None
    return table, cedar, pull


def test_weights_older_than_our_own_are_not_taken():
    table, cedar, pull = with_a_pull_begun()
    cedar.core._core.progress = 50.0
    table["cedar"].core.handle(Received(pull.link, WeightsReply(0, 40.0)), table.now)
    assert cedar.core._catch_up.pull is None or cedar.core._catch_up.pull.link != pull.link
    assert cedar.core.counters.offences == 0  # the donor was ahead at the request


def test_pairs_that_meet_nobody_else_are_not_a_swarm_that_agrees(monkeypatch):
    mates = {"amber": "birch", "birch": "amber", "cedar": "dune", "dune": "cedar"}

    def only_the_mate(core, engaged, now):
        mate = PeerId(mates[core.me])
        return next((known for known in core.members.partners(now, excluding=engaged) if known.peer == mate), None)

    table = Table(*mates, rules=run_rules(final_gossip_s=90.0))
    table.start(*mates)
    table.run(3.0)
    table.step(*mates)
    with monkeypatch.context() as patched:
        patched.setattr(exchange_manager, "choose", only_the_mate)
        patched.setattr(exchange_manager.ExchangeManager, "_next_turned_away", lambda manager, now: None)
        table.end_training()
        table.run(40.0)  # all have read the others' records
        assert min(table[name].core.counters.exchanges_ok for name in mates) > 5
        assert {table[name].core.state for name in mates} == {PeerState.FINISHING}
    table.run(10.0)
    assert "the swarm agrees" in {table[name].finished for name in mates}


@pytest.mark.parametrize(
    ("claims", "believed"),
    [
        ([100, 101, 99, 102], [100, 101, 99, 102]),
        ([100, 101, 99, 1000], [100, 101, 99]),  # one liar
        ([100, 101, 99, 1000, 1001], [100, 101, 99]),  # two that agree
        ([100, 140, 180, 220], [100, 140, 180, 220]),  # a spread-out swarm: each has two others near
        ([100, 101, 1000], [100, 101]),
        ([100, 1000], [100, 1000]),  # no majority
        ([100], [100]),
        ([], []),
    ],
)
def test_a_claim_counts_where_others_are_near(claims, believed):
    assert [known.progress for known in supported(claiming(*claims), near=80.0)] == believed


def claiming(*progress: float) -> list[PeerInfo]:
    return [PeerInfo(PeerId(f"peer {each}"), 1e9, progress=float(each)) for each in progress]


@pytest.mark.parametrize(
    ("claims", "here", "believed"),
    [
        ([1000], [0], [1000]),  # one against one decides nothing
        ([1000], [0, 1], []),
        ([1000], [0, 1, 2], []),
        ([1000, 1001], [0, 1], [1000, 1001]),  # as many as contradict
        ([1000, 1001], [0, 1, 2], []),
        ([1000, 1001, 1002], range(20), [1000, 1001, 1002]),  # newcomers that could not pull yet exclude no donor
        ([1000, 1001, 1002, 5000], [0, 1, 2], [1000, 1001, 1002]),
    ],
)
def test_who_is_in_step_where_a_newcomer_is_contradicts(claims, here, believed):
    found = supported(claiming(*claims), near=80.0, others=claiming(*here))
    assert [known.progress for known in found] == believed


def test_to_whom_was_in_step_its_own_progress_contradicts_too():
    assert supported(claiming(1000), 80.0, claiming(0), was_in_step=True) == []
    assert len(supported(claiming(1000, 1001), 80.0, claiming(0), was_in_step=True)) == 2
    assert supported(claiming(1000, 1001), 80.0, claiming(0, 1), was_in_step=True) == []
    assert len(supported(claiming(1000, 1001, 1002), 80.0, claiming(0, 1, 2), was_in_step=True)) == 3


def in_the_directory(table: Table, settled: bool, **progress: float) -> None:
    """Return records of peers that announce themselves and do not answer."""
    for name, tokens in progress.items():
        table.records[PeerId(name)] = presence(name, tokens, at=1.0 + table.now, settled=settled)


def test_one_that_boasts_takes_no_newcomer_into_its_weights_while_a_swarm_is_young():
    table = Table("amber", "birch", "delta")
    table.start()
    table.run(3.0)
    for _ in range(3):
        table.step()
        table.run(1.0)
    assert all(seat.core.settled and seat.progress < seat.core._core.bounds.catch_up for seat in table.seats.values())
    newcomer = table.seat("cedar")
    in_the_directory(table, settled=True, liar=1000.0)
    table.start("cedar")
    for second in range(60):
        if second % 20 == 0:
            in_the_directory(table, settled=True, liar=1000.0)
        if newcomer.begun:
            table.step("cedar")
        table.run(1.0)
    why = "others contradict the peers that claim to be far ahead; training starts and the search continues"
    assert any(line.endswith(f"cedar alone {why}") for line in table.trace)
    assert newcomer.core.counters.pulls == 0
    assert not any("catching up" in line for line in table.trace)
    assert newcomer.core.settled
    assert newcomer.core.counters.exchanges_ok > 0


def test_before_any_two_of_a_swarm_have_met_nobody_contradicts():
    table = Table("cedar")
    in_the_directory(table, settled=False, amber=0.0, birch=0.0)
    in_the_directory(table, settled=True, liar=1000.0)
    table.start("cedar")
    table.run(1.0)
    assert any("cedar catching up liar" in line for line in table.trace)


def test_newcomers_that_come_together_contradict_nobody_and_all_pull():
    table = Table(*(old := ("amber", "birch", "delta", "elm")))
    table.start()
    table.run(3.0)
    for _ in range(30):
        table.step()
        table.run(0.5)
    table.run(21.0)
    new = [table.seat(name) for name in ("cedar", "fir", "hazel", "juniper", "larch", "maple")]
    table.start("cedar", "fir", "hazel", "juniper", "larch", "maple")
    for _ in range(15):
        table.step(*old)
        table.run(1.0)
    assert [seat.core.counters.pulls for seat in new] == [1] * 6
    assert all(seat.core.settled for seat in new)


def test_two_young_ones_that_met_keep_nobody_out_of_an_old_swarm_of_two():
    table = under_way()
    table.run(21.0)
    in_the_directory(table, settled=True, fir=5.0, hazel=5.0)
    newcomer = table.seat("cedar")
    table.start("cedar")
    table.run(3.0)
    assert newcomer.core.counters.pulls == 1
    assert newcomer.progress == pytest.approx(600.0, abs=40)


def test_liars_who_say_that_they_are_in_step_near_the_beginning_keep_nobody_out_of_an_old_swarm():
    table = Table("amber", "birch", "delta", "elm")
    table.start()
    table.run(3.0)
    for _ in range(30):
        table.step()
        table.run(0.5)
    table.run(21.0)
    in_the_directory(table, settled=True, liar=0.0, other=3.0, third=6.0)
    newcomer = table.seat("cedar")
    table.start("cedar")
    table.run(3.0)
    assert newcomer.core.counters.pulls == 1


def test_that_a_peer_is_in_step_now_is_announced_at_once_and_not_at_every_step():
    table = Table("amber", "birch")
    table.start()
    table.run(3.0)
    assert not table["amber"].core.settled
    table.announced.clear()
    for _ in range(8):
        table.step()
        table.run(2.0)
    assert table["amber"].core.settled
    assert table.announced[PeerId("amber")] == [True]
    assert table.records[PeerId("amber")].settled
    assert table["birch"].core._core.members.get(PeerId("amber")).settled  # from the terms, before any lookup


def test_who_dropped_out_of_step_says_so_when_it_announces_itself_next():
    table = with_cedar_in_step()
    table.announced.clear()
    table["cedar"].core._core.drop_out()
    table.holds_back = lambda sender, receiver, what: "cedar" in (sender, receiver)
    table.run(25.0)
    assert table.announced[PeerId("cedar")] == [False]


def test_a_newcomer_does_not_run_after_a_liar_that_claims_the_end():
    rules = run_rules(run_tokens=3000.0)
    table = Table("amber", "birch", "delta", *(liars := ("liar", "other liar")), rules=rules)
    table.start("amber", "birch", "delta")
    table.run(0.1)
    for _ in range(30):
        table.step("amber", "birch", "delta")
        table.run(0.5)
    for name in liars:  # they only announce themselves
        table.records[PeerId(name)] = presence(name, progress=rules.run_tokens, at=1.0 + table.now)
    table.run(21.0)
    for name in liars:
        table.records[PeerId(name)] = presence(name, progress=rules.run_tokens, at=1.0 + table.now)
    newcomer = table.seat("cedar")
    table.start("cedar")
    table.run(1.0)
    assert newcomer.core.settled
    assert newcomer.progress == pytest.approx(900.0, abs=60)
    assert not any("catching up liar" in line or "catching up other" in line for line in table.trace)


@pytest.mark.parametrize("most", [GIVEN_TO_ONE, 2 * GIVEN_TO_ONE])
def test_who_takes_weights_again_and_again_is_declined_for_an_hour(most):
    table = under_way(rules=run_rules(weights_bytes=GIVEN_BYTES // most))
    core, given = table["amber"].core, []
    for attempt in range(2 * most):
        link = LinkId(PeerId("greedy"), 500 + attempt, outbound=False)
        effects = core.handle(Received(link, WeightsRequest(RUN, RULES.protocol, 0.0)), table.now)
        given.append(any(isinstance(effect, Donate) for effect in effects))
        core.handle(LinkFailed(link, "gone"), table.now)
        table.now += 150.0  # its pause is over
    assert given == [True] * most + [False] * most
    link = LinkId(PeerId("greedy"), 900, outbound=False)
    effects = core.handle(Received(link, WeightsRequest(RUN, RULES.protocol, 0.0)), table.now + GIVING_WINDOW_S)
    assert any(isinstance(effect, Donate) for effect in effects)


@pytest.mark.parametrize(("weights_bytes", "times"), [(GIVEN_BYTES, 6), (GIVEN_BYTES // 45, 45), (1, 60)])
def test_small_weights_are_given_more_often(weights_bytes, times):
    """Check a tiny run: an owner who tries settings restarts often, and each time the run is far ahead."""
    assert run_rules(weights_bytes=weights_bytes).given_to_one == times


def test_whose_weights_have_nothing_in_common_with_anybodys_takes_others():
    """Check a peer that trained alone for long on a bad connection, with about as much progress as the others."""
    table = with_cedar_in_step()
    cedar = table["cedar"]
    others = [table[name].core.counters for name in ("amber", "birch")]
    exchanged, pulled = cedar.core.counters.exchanges_ok, cedar.core.counters.pulls
    table.apart = lambda me, partner: (2.0 if "cedar" in (me, partner) and not pulled_again() else 0.05, 10.0)

    def pulled_again() -> bool:
        return cedar.core.counters.pulls > pulled

    for _ in range(150):  # a peer taken for adversarial is avoided for a while
        table.step(tokens=1.0)
        table.run(1.0)
    assert any("cedar out of step our weights differ from those of most peers" in line for line in table.trace)
    assert cedar.core.counters.pulls == pulled + 1
    assert cedar.core.settled
    assert cedar.core.counters.exchanges_ok > exchanged
    assert all(counters.pulls == 0 for counters in others)


def lost_cedar(run_tokens: float = RULES.run_tokens, holds_back: type = NoneType) -> tuple[Table, Seat]:
    """Return a table on which cedar, once settled, finds all others unrelated until it pulls.

    Drops such messages to cedar.
    """
    table = with_cedar_in_step(run_rules(run_tokens=run_tokens))
    table.holds_back = lambda sender, receiver, what: receiver == "cedar" and isinstance(what, holds_back)
    cedar = table["cedar"]
    pulled = cedar.core.counters.pulls
    table.apart = lambda me, partner: (
        2.0 if "cedar" in (me, partner) and cedar.core.counters.pulls == pulled else 0.05,
        10.0,
    )
    for _ in range(30):
        table.step(tokens=1.0)
        for _ in range(20):  # before it has others' weights
            if cedar.core._core.is_outlier:
                return table, cedar
            table.run(0.01)
    raise AssertionError("nobody seemed strange")


@pytest.mark.parametrize("offers_before", [0, int(MAX_CALLS) - 1])
def test_who_is_told_that_it_is_behind_asks_for_weights_at_once(offers_before: int):
    """Check that the request follows at once, however many offers were made: after a pause, the claims would be
    old.

    The peer would take itself for as far, offer again, and so on.
    """
    table = Table("amber", "birch")
    table.holds_back = lambda sender, receiver, what: isinstance(what, Offer)
    table.start()
    table.run(3.0)
    for _ in range(2 * BEGINNER_STEPS):
        table.step("amber")
    table.holds_back = lambda sender, receiver, what: False
    for _ in range(offers_before):
        table["birch"].core._core.members.called(PeerId("amber"), table.now)
    table.step("birch")
    table.run(0.5)
    assert DeclineReason.CATCH_UP_FIRST.value in [note.why for note in table.notes if note.kind == "skipped"]
    assert table["birch"].core.counters.pulls == 1
    assert table["birch"].core.settled


def test_who_is_lost_has_others_weights_as_soon_as_they_trust_it_again():
    """Check partners that take the last exchange for broken off, and decline for two seconds."""
    table, cedar = lost_cedar()
    pulls = cedar.core.counters.pulls
    for _ in range(8):
        table.step(tokens=1.0)
        table.run(1.0)
    declined = [note.why for note in table.notes if note.kind == "skipped"]
    assert DeclineReason.DISTRUSTED.value in declined
    assert cedar.core.counters.pulls == pulls + 1


def test_who_is_lost_and_sleeps_until_the_swarm_is_far_ahead_takes_its_weights_and_blames_nobody():
    table, cedar = lost_cedar(run_tokens=1280.0)
    blamed, pulled = cedar.core.counters.offences, cedar.core.counters.pulls
    cedar.frozen = True
    for _ in range(45):
        table.step("amber", "birch")
        table.run(1.0)
    assert table["amber"].progress - cedar.progress > cedar.core._core.bounds.implausible_distance
    cedar.frozen = False
    for _ in range(100):
        table.step(tokens=1.0)
        table.run(1.0)
    assert cedar.core.counters.pulls == pulled + 1
    assert cedar.core.settled
    assert not cedar.core._core.is_outlier
    assert cedar.core.counters.offences == blamed


def test_a_lost_peer_takes_no_weights_that_are_far_from_what_their_donor_announced():
    table, cedar = lost_cedar(run_tokens=12800.0, holds_back=WeightsReply)
    while (pull := cedar.core._catch_up.pull) is None:
        table.run(0.01)
        assert table.now < 100.0
    blamed = cedar.core.counters.offences
    effects = cedar.core.handle(Received(pull.link, WeightsReply(1, 12700.0)), table.now)
    assert not any(isinstance(each, Pull) for each in effects)
    assert Close(pull.link) in effects
    assert cedar.core.counters.offences == blamed


def test_who_is_lost_gives_nobody_its_weights():
    table, cedar = lost_cedar()
    link = LinkId(PeerId("newcomer"), 500, outbound=False)
    cedar.core._catch_up.pull = None
    cedar.core._core.state = PeerState.TRAINING
    effects = cedar.core.handle(Received(link, WeightsRequest(RUN, RULES.protocol, 0.0)), table.now)
    [answer] = [each.message for each in effects if isinstance(each, Send) and each.link == link]
    assert answer == Decline(DeclineReason.NO_WEIGHTS, answer.state, answer.step, answer.progress)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [2, 3])
def test_of_two_equal_halves_nobody_takes_the_others_weights(size: int, seed: int):
    west, east = ([f"{side} {number}" for number in range(size)] for side in ("west", "east"))
    table = Table(*west, *east, rules=run_rules(run_tokens=100_000.0), seed=seed)
    table.start()
    table.run(3.0)
    for _ in range(10):
        table.step()
        table.run(1.0)
    before = [table[name].core.counters.pulls for name in (*west, *east)]
    table.apart = lambda me, partner: (0.05 if me.split()[0] == partner.split()[0] else 2.0, 10.0)
    for _ in range(120):
        table.step()
        table.run(1.0)
    assert any("nothing in common" in line for line in table.trace)
    assert [table[name].core.counters.pulls for name in (*west, *east)] == before


def test_who_meets_strangers_that_are_few_keeps_its_weights():
    """Check two adversarial peers of six."""
    names = ("amber", "birch", "cedar", "dogwood")
    table = Table(*names, "liar 1", "liar 2")
    table.start()
    table.run(3.0)
    for _ in range(5):
        table.step()
        table.run(1.0)
    assert all(table[name].core.settled for name in names)
    table.apart = lambda me, partner: (2.0 if "liar" in me or "liar" in partner else 0.05, 10.0)
    for _ in range(100):
        table.step(tokens=1.0)
        table.run(1.0)
    assert any("nothing in common" in line for line in table.trace)
    assert all(table[name].core.counters.pulls == 0 for name in names)


def test_a_newcomer_that_trained_alone_for_too_long_takes_others_weights():
    """Check a peer that is not far behind, but whose weights are unrelated to all others."""
    table = under_way(steps=10)
    cedar = table.seat("cedar")
    cedar.progress = cedar.core._core.progress = ProgressBounds(RULES).beginner + 10.0
    table.apart = lambda me, partner: (
        2.0 if "cedar" in (me, partner) and not cedar.core.counters.pulls else 0.05,
        10.0,
    )
    table.start("cedar")
    for _ in range(120):
        table.step(tokens=1.0)
        table.run(1.0)
    assert cedar.core.counters.pulls == 1
    assert cedar.core.settled
    assert not cedar.core._core.is_outlier


def test_a_boast_of_a_few_steps_takes_no_newcomer_of_a_young_swarm():
    table = Table("cedar")
    step = table.rules.tokens_per_outer_step
    table.records = {
        PeerId(name): presence(name, progress=steps * step, settled=True)
        for name, steps in (("amber", 1.0), ("birch", 1.0), ("liar", 5.0))
    }
    table.start()
    table.run(0.045)
    assert table["cedar"].core.donors(table.now) == {}


def test_a_donor_whose_weights_are_older_than_it_announced_gives_none():
    table, cedar, pull = with_a_pull_begun()
    effects = cedar.core.handle(Received(pull.link, WeightsReply(1, 10.0)), table.now)
    assert [each.why for each in effects if isinstance(each, Note) and each.peer == pull.link.peer][:1] == [
        "its weights are older than it announced"
    ]
    assert Close(pull.link) in effects


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (
            WeightsReply(30, 620.0 + ProgressBounds(RULES, 3.0).implausible_distance),
            "its weights are further ahead than any peer announced",
        ),
        (WeightsReply(2**53, 600.0), "outer steps, but equally far peers have made"),
        (WeightsReply(STEPS_SLACK * (30 + BEGINNER_STEPS) + 1, 600.0), "outer steps, but equally far peers have made"),
    ],
)
def test_a_donor_says_of_its_weights_what_can_be_true(reply: WeightsReply, why: str):
    """Check a donor's progress and outer steps, which the newcomer takes over for its own."""
    table, cedar, pull = with_a_pull_begun()
    effects = cedar.core.handle(Received(pull.link, reply), table.now)
    assert any(why in each.why for each in effects if isinstance(each, Note) and each.peer == pull.link.peer)
    assert Close(pull.link) in effects
    assert not any(isinstance(each, Pull) for each in effects)


@pytest.mark.parametrize(("honest", "liars"), [(2, 1), (3, 2), (4, 3)])
def test_a_minority_that_names_few_outer_steps_makes_no_honest_donors_count_implausible(honest: int, liars: int):
    """Check that honest donors stay available: otherwise only the adversarial ones would be left."""
    table, given = Table("cedar"), set()
    said = [(f"honest {number}", 700) for number in range(honest)] + [(f"liar {number}", 0) for number in range(liars)]
    table.records = {PeerId(name): presence(name, progress=500.0, step=step) for name, step in said}
    table.start()
    table.run(0.045)
    core = table["cedar"].core
    while len(given) < honest:  # each request fails in the end, and another donor is asked
        pull = core._catch_up.pull
        if pull is None:
            table.now += 1.0
            core.handle(Woke(), table.now)
            continue
        if pull.link.peer.startswith("honest"):
            effects = core.handle(Received(pull.link, WeightsReply(705, 510.0)), table.now)
            assert any(isinstance(each, Pull) for each in effects)
            given.add(pull.link.peer)
        core.handle(LinkFailed(pull.link, "gone"), table.now)
        for name, step in said:
            core._core.members.see(presence(name, 500.0, step=step, at=table.now + 2.0), table.now + 75.0)
    assert core.counters.offences == 0


def test_how_many_outer_steps_a_donor_may_have_made_those_say_who_are_about_as_far():
    """Check that peers elsewhere do not count: they may have made few long steps, or many."""
    table, step = Table("cedar"), 700
    names = {"donor": (900.0, step), "beside": (880.0, step - 2), "behind": (400.0, 2), "further behind": (390.0, 1)}
    known = []
    for name, (progress, steps) in names.items():
        table["cedar"].core._core.members.see(presence(name, progress, step=steps), 75.0)
        known.append(table["cedar"].core._core.members.get(PeerId(name)))
    assert steps_near(known[0], known, ProgressBounds(RULES).catch_up) == step
    assert steps_near(known[2], known, ProgressBounds(RULES).catch_up) == 2


def test_that_a_donors_outer_steps_cannot_be_is_no_offence():
    """Check that such a donor is not blamed: the others' claims may be the false ones."""
    table, cedar, pull = with_a_pull_begun()
    effects = cedar.core.handle(Received(pull.link, WeightsReply(2**53, 300.0)), table.now)
    assert Close(pull.link) in effects
    assert cedar.core.counters.offences == 0


def test_a_donor_that_makes_most_of_the_swarms_steps_gives_its_weights():
    table, cedar, pull = with_a_pull_begun()
    effects = cedar.core.handle(Received(pull.link, WeightsReply(30 * STEPS_SLACK, 640.0)), table.now)
    assert any(isinstance(each, Pull) and each.reply.step == 30 * STEPS_SLACK for each in effects)


def test_where_outer_steps_are_planned_a_donor_is_about_where_the_others_are():
    rules = run_rules(topology="ring", run_tokens=100_000.0)
    assert implausible_step(30 + 2500, 30, ProgressBounds(rules)) == ""
    assert implausible_step(30 + 2501, 30, ProgressBounds(rules))
    assert implausible_step(700 - 8, 700, ProgressBounds(rules)) == ""
    assert implausible_step(700 - 9, 700, ProgressBounds(rules))
    assert implausible_step(0, 700, ProgressBounds(RULES)) == "", "elsewhere they say nothing"


def test_no_donor_puts_a_newcomer_out_of_the_others_outer_step_for_good():
    """Check right weights and progress with step 0: the newcomer would have no planned partner, and never pull."""
    rules = run_rules(exchanges_per_step=0, free=(), between=(0,), topology="ring", run_tokens=100_000.0)
    table = Table("cedar", rules=rules)
    names = ("amber", "birch", "liar")
    table.records = {PeerId(name): presence(name, progress=7000.0, step=700) for name in names}
    table.start()
    table.run(0.045)
    core = table["cedar"].core
    pull = core._catch_up.pull
    assert pull is not None
    effects = core.handle(Received(pull.link, WeightsReply(0, 7000.0)), table.now)
    assert Close(pull.link) in effects
    assert not any(isinstance(each, Pull) for each in effects)


def progress_taken(table, cedar, pull, progress: float, counted_at: float = 0.0) -> float:
    """Let the donor reply and give its weights; return the progress to continue from."""
    cedar.core.handle(Received(pull.link, WeightsReply(30, progress, counted_at=counted_at)), table.now)
    [adopt] = [each for each in cedar.core.handle(Pulled(pull.link, 4000), table.now) if isinstance(each, Adopt)]
    return adopt.progress


@pytest.mark.parametrize(("counted_at", "taken"), [(0.0, 50.0), (200.0, 250.0), (1e300, 360.0)])
def test_a_newcomer_that_others_count_adds_its_own_progress(counted_at: float, taken: float):
    """Check a donor that counted it from the start, later, and one that lies."""
    table, cedar, pull = with_a_pull_begun()
    cedar.core._core.progress = 50.0
    assert progress_taken(table, cedar, pull, 360.0, counted_at) == taken

    table, cedar, pull = with_a_pull_begun()
    cedar.core._core.progress, cedar.core._core.was_in_step = 50.0, True
    assert progress_taken(table, cedar, pull, 360.0, counted_at) == 360.0, "its progress is not all its own"


def test_nobodys_word_alone_ends_a_newcomers_run():
    """Check a donor that alone claims the end: one outer step is left, in which the newcomer exchanges."""
    table, cedar, pull = with_a_pull_begun()
    bounds, end = cedar.core._core.bounds, RULES.run_tokens
    cedar.core._catch_up.pull = replace(pull, furthest=end - bounds.catch_up - 1.0)
    assert progress_taken(table, cedar, pull, 1000.0) == end - bounds.step

    table, cedar, pull = with_a_pull_begun()
    cedar.core._catch_up.pull = replace(pull, furthest=end - bounds.catch_up)
    assert progress_taken(table, cedar, pull, 1000.0) == 1000.0
