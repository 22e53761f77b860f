"""Rounds: exchanges that both sides planned for an outer step, and trainers that wait for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from run_rules import run_rules
from table import RULES, Table, presence

from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.swarm import Peer, PeerState
from p2ptrain.swarm.events import (
    Adopted,
    Applied,
    Close,
    Effect,
    Event,
    LinkFailed,
    Note,
    Open,
    PhaseDone,
    Proceed,
    Received,
    Send,
    SwapDone,
    Woke,
)
from p2ptrain.swarm.messages import Accept, Acknowledge, Decline, DeclineReason, Offer
from p2ptrain.swarm.partners import own_terms
from p2ptrain.swarm.rounds import EXCHANGES_TO_FORGIVE, MAX_OURS, RoundCommitments
from p2ptrain.swarm.rules import MAX_KNOWN, ROUND_PATIENCE_S, ROUND_RECALL_S

WAITING = run_rules(exchanges_per_step=0, free=(), between=(0,), topology="ring")


def in_step(*names: str) -> Table:
    table = Table(*names, rules=WAITING)
    table.start()
    table.run(3.0)
    assert all(seat.begun for seat in table.seats.values())
    table.trace.clear()
    return table


def test_the_later_of_two_finds_the_earlier_one_waiting() -> None:
    table = in_step("amber", "birch")
    table.end_phase("amber")
    table.run(0.5)
    assert table["amber"].waits_since is not None
    table.end_phase("birch")
    table.run(0.5)
    assert table["amber"].waited_s == pytest.approx([0.65], abs=0.15)
    assert table["birch"].waited_s == pytest.approx([0.15], abs=0.1)


@pytest.mark.parametrize(("first", "second"), [("amber", "birch"), ("birch", "amber")])
def test_an_answer_that_an_offer_overtook_makes_nobody_wait(first: str, second: str) -> None:
    """Check a decline "not yet" that arrives after the partner's own offer."""
    table = in_step("amber", "birch")
    table.end_phase(first)
    table.lag_s = lambda sender, link: 0.0 if link.outbound else 0.05
    table.run(0.012)  # the offer has arrived and is answered
    table.lag_s = lambda sender, link: 0.0
    table.end_phase(second)
    table.run(1.0)
    assert max(table[first].waited_s + table[second].waited_s) < 0.5
    assert table["amber"].core.counters.exchanges_ok == 1


def test_who_knows_us_not_makes_no_promise() -> None:
    """Check a partner that does not know us: its outer step would pass while our trainer waits."""
    table = Table("amber", "birch", rules=WAITING)
    table.start("amber", "birch")
    table.run(3.0)
    table["amber"].core = Peer(PeerId("amber"), WAITING, Random(1))  # restarted, without knowledge of others
    table.directory_answers = False
    table.start("amber")
    table.run(25.0)
    table.trace.clear()
    table.end_phase("birch")
    table.run(0.5)
    assert table["birch"].waited_s == pytest.approx([0.02], abs=0.02)
    assert "birch skipped amber it planned this outer step without us" in "\n".join(table.trace)


def test_whose_run_ends_meanwhile_is_not_waited_for() -> None:
    table = in_step("amber", "birch")
    table.end_phase("amber")
    table.run(0.5)
    table.end_training("birch")
    table.run(2 * ROUND_RECALL_S)
    assert table["amber"].waited_s
    assert table["amber"].waited_s[0] < 2 * ROUND_RECALL_S


def test_who_does_not_come_is_asked_ever_less_often_and_given_up_at_last() -> None:
    table = in_step("amber", "birch")
    table.end_phase("amber")
    table.run(ROUND_PATIENCE_S + 1.0)
    offers = sum(line.endswith("amber -> birch: Offer") for line in table.trace)
    assert 3 <= offers <= 6
    assert table["amber"].waited_s == pytest.approx([ROUND_PATIENCE_S], abs=1.0)
    assert "it did not reach this outer step in time" in "\n".join(table.trace)


def test_an_answer_slower_than_the_pause_is_no_reason_to_ask_at_once() -> None:
    table = in_step("amber", "birch")
    table.end_phase("amber")
    table.lag_s = lambda sender, link: 0.0 if link.outbound else 1.5 * ROUND_RECALL_S
    table.run(2.2 * ROUND_RECALL_S)  # the table rejects a wake-up in the past
    assert sum(line.endswith("amber -> birch: Offer") for line in table.trace) == 1
    table.run(ROUND_RECALL_S)
    assert sum(line.endswith("amber -> birch: Offer") for line in table.trace) == 2


def test_an_answer_that_comes_when_patience_is_over_ends_the_waiting() -> None:
    table = in_step("amber", "birch")
    table.lag_s = lambda sender, link: 0.0 if link.outbound else 1.5
    table.end_phase("amber")
    table.run(ROUND_PATIENCE_S + 12.0)
    assert len(table["amber"].waited_s) == 1
    assert table["amber"].waited_s[0] <= ROUND_PATIENCE_S + 10.0


def test_who_crosses_and_puts_us_off_for_ever_has_two_offers_of_ours() -> None:
    """Check an adversarial peer that alternates "not yet" and offers, which lose against ours by its id."""
    table = in_step("amber", "birch")
    core, birch = table["amber"].core, PeerId("birch")

    [ours] = opened(core.handle(PhaseDone(1, 10.0), table.now))
    offers = 1
    for number in range(100, 150):
        theirs = LinkId(birch, number, outbound=False)
        core.handle(Received(theirs, replace(ours.message, known=())), table.now)
        again = opened(core.handle(Received(ours.link, postpone(DeclineReason.NOT_YET)), table.now))
        if not again:
            break
        offers, ours = offers + 1, again[0]
    assert offers == 2


def test_nobody_promises_to_offer_in_a_round_that_is_over() -> None:
    """Check a round that ends before its outer step: the trainer mixes first, and makes no other offer."""
    core, now = in_step("amber", "birch")["amber"].core, 3.0
    birch = PeerId("birch")
    [ours] = opened(core.handle(PhaseDone(1, 10.0), now))
    assert Proceed(1) in core.handle(LinkFailed(ours.link, "connection reset"), now)
    theirs = replace(ours.message, known=())
    later = replace(theirs, round=2)
    for number, (offer, reason) in enumerate([(theirs, DeclineReason.NOT_PLANNED), (later, DeclineReason.NOT_YET)]):
        effects = core.handle(Received(LinkId(birch, 100 + number, outbound=False), offer), now)
        assert answers(effects) == [reason]


def waiting_for_two() -> tuple[Peer, Open, Open, float]:
    """Return a core between two inner phases with two open offers, and its time."""
    table = in_step("amber", "birch", "cedar")
    core = table["amber"].core
    to_birch, to_cedar = sorted(opened(core.handle(PhaseDone(1, 10.0), table.now)), key=lambda each: each.link.peer)
    assert [to_birch.link.peer, to_cedar.link.peer] == ["birch", "cedar"]
    return core, to_birch, to_cedar, table.now


def test_a_partner_whose_exchange_failed_has_no_other_in_this_round() -> None:
    """Check that two partners cannot take turns to keep the trainer waiting."""
    core, to_birch, _, now = waiting_for_two()
    core.handle(Received(to_birch.link, Accept(to_birch.message.fragments, to_birch.message.terms, known=())), now)
    core.handle(LinkFailed(to_birch.link, "connection reset"), now)
    again, offer = LinkId(PeerId("birch"), 100, outbound=False), replace(to_birch.message, known=())
    now += ROUND_PATIENCE_S - 1.0  # it is trusted again
    assert answers(core.handle(Received(again, offer), now)) == [DeclineReason.NOT_PLANNED]


@pytest.mark.parametrize(("seconds", "reason"), [(1.0, None), (ROUND_PATIENCE_S, DeclineReason.NOT_PLANNED)])
def test_who_comes_when_patience_is_over_is_not_waited_for(seconds: float, reason: DeclineReason | None) -> None:
    """Check a late offer during another exchange, which keeps the round open."""
    core, to_birch, to_cedar, now = waiting_for_two()
    core.handle(LinkFailed(to_birch.link, "connection reset"), now)
    core.handle(Received(to_cedar.link, Accept(to_cedar.message.fragments, to_cedar.message.terms, known=())), now)
    for exchange in core._exchanges.book:  # a long one
        exchange.deadline = now + 2 * ROUND_PATIENCE_S
    core._wake_at = now + 2 * ROUND_PATIENCE_S  # else the core would seem to have been stopped
    again = LinkId(PeerId("birch"), 100, outbound=False)
    offer = replace(to_birch.message, known=())
    assert answers(core.handle(Received(again, offer), now + seconds)) == [reason]


def opened(effects: list[Effect]) -> list[Open]:
    return [effect for effect in effects if isinstance(effect, Open)]


def answers(effects: list[Effect]) -> list[DeclineReason | None]:
    """Return the reason to decline for each answer; None: accepted."""
    sent = [effect.message for effect in effects if isinstance(effect, Send)]
    return [message.reason if isinstance(message, Decline) else None for message in sent]


def postpone(reason: DeclineReason) -> Decline:
    return Decline(reason, PeerState.TRAINING, 0, 0.0, known=())


def test_who_promises_and_never_comes_is_waited_for_ever_more_rarely() -> None:
    """Check commitments that are broken: patience follows the time of training, not the time spent waiting."""
    table = in_step("amber", "birch")
    for seat in table.seats.values():
        seat.progress = seat.core._core.progress = 40.0  # else birch would be a newcomer that pulls
    for _ in range(7):
        table.end_phase("amber")
        table.run(0.5)
        while table["amber"].waits_since is not None:
            table.run(1.0)
    waits = table["amber"].waited_s
    assert [step for step, seconds in enumerate(waits, 1) if seconds > 1.0] == [1, 3, 7]
    assert max(waits) == pytest.approx(ROUND_PATIENCE_S, abs=1.0)


def test_who_comes_after_all_is_believed_again() -> None:
    table = in_step("amber", "birch")
    table.end_phase("amber")
    table.run(ROUND_PATIENCE_S + 1.0)
    table.step("birch")
    table.end_phase("birch")
    table.run(0.5)
    table.end_phase("amber")  # birch waits for amber
    table.run(1.0)
    assert table["amber"].core.counters.exchanges_ok == 1
    table.end_phase("amber")
    table.run(0.5)
    assert table["amber"].waits_since is not None


def waits_of(
    answer: Callable[[int, Open], list[Event]], me: str = "amber", other: str = "birch", rounds: int = 12
) -> list[float]:
    """Return the trainer's waiting time per round, in seconds, with a partner that answers offers by ``answer``."""
    table = in_step(me, other)
    core, waits = table[me].core, list[float]()
    for name in (me, other):
        table[name].core._core.progress = 40.0
    for number in range(1, rounds + 1):
        core._core.members.see(presence(other, progress=40.0, at=table.now), table.now + 75.0)
        began, effects = table.now, core.handle(PhaseDone(number, 40.0), table.now)
        while not any(isinstance(each, Proceed) for each in effects):
            events = [event for each in effects if isinstance(each, Open) for event in answer(number, each)]
            effects = [each for event in events for each in core.handle(event, table.now)]
            if not effects:
                table.now += 0.1
                effects = core.handle(Woke(), table.now)
        waits.append(round(table.now - began))
        table.now += 1.0
    return waits


def passes(table: Table, seconds: float, name: str = "amber") -> list[Effect]:
    """Let time pass with timers only, and return their effects."""
    effects, until = list[Effect](), table.now + seconds
    while table.now < until:
        table.now = min(table.now + 0.25, until)
        effects += table[name].core.handle(Woke(), table.now)
    return effects


def used_to_fast_lines() -> tuple[Table, Peer]:
    """Return a core with one planned partner, and measurements of fast earlier ones."""
    table = in_step("amber", "birch")
    core = table["amber"].core
    for _ in range(64):
        core._core.deadlines.transferred(1000, 0.5)
    for name in ("amber", "birch"):
        table[name].core._core.progress = 40.0
    return table, core


def met_for(table: Table, rounds: int, held: Callable[[float], float], trains_s: float, fails: bool = False) -> list:
    """Return the seconds of each round's exchange; None if there was none.

    The partner accepts at once and then takes ``held`` of the patience that both agreed on.
    """
    core, took = table["amber"].core, []
    for number in range(1, rounds + 1):
        passes(table, trains_s)
        core._core.members.see(presence("birch", progress=40.0, at=table.now), table.now + 75.0)
        effects = core.handle(PhaseDone(number, 40.0), table.now)
        if not (calls := opened(effects)):
            assert Proceed(number) in effects, "the trainer goes on at once"
            took.append(None)
            continue
        [ours] = calls
        slow = replace(ours.message.terms, seconds_per_byte=0.02)
        core.handle(Received(ours.link, Accept(ours.message.fragments, slow, known=())), table.now)
        [exchange] = core._exchanges.book
        took.append(held(exchange.deadline - table.now))
        effects = passes(table, took[-1])
        if fails:
            effects += core.handle(LinkFailed(ours.link, "connection reset"), table.now)
        else:
            core.handle(SwapDone(ours.link, 1000, 1000, 0.1, 1.0, b""), table.now)
            effects += core.handle(Received(ours.link, Acknowledge()), table.now)
            core.handle(Applied(ours.link, 40.0), table.now)
        assert Proceed(number) in effects
    return took


@pytest.mark.parametrize("fails", [False, True])
def test_who_accepts_and_drags_on_until_just_before_its_deadline_is_met_ever_more_rarely(fails: bool) -> None:
    table, _ = used_to_fast_lines()
    took = met_for(table, 20, lambda patience_s: patience_s - 1.0, trains_s=150.0, fails=fails)
    assert [number for number, each in enumerate(took, 1) if each] == [1, 3, 7, 15]


def test_whose_line_is_slow_and_steady_is_met_in_every_round() -> None:
    """Check a partner ten times slower than others, as it stated."""
    table, core = used_to_fast_lines()
    took = met_for(table, 20, lambda patience_s: 5.0, trains_s=30.0)
    assert took == [5.0] * 20
    assert core.counters.exchanges_ok == 20


def test_who_is_slow_has_no_more_than_a_fifth_of_a_trainers_time_beyond_its_due() -> None:
    """Check short inner phases, with the same limit as for unplanned exchanges."""
    table, core = used_to_fast_lines()
    began = table.now
    took = met_for(table, 60, lambda patience_s: 5.0, trains_s=1.0)
    core._core.members.record_success(PeerId("birch"))
    beyond = sum(each - 2.0 for each in took if each)
    assert len([each for each in took if each]) > 2, "it is met, and not ever more rarely"
    assert 0 < beyond <= 0.25 * (table.now - began)


def test_who_is_slow_and_holds_a_trainer_for_less_than_it_trains_is_met_in_every_round() -> None:
    """Check a recipe that waits for the slowest; between unplanned exchanges others would come first."""
    table, core = used_to_fast_lines()
    core._core.seconds_per_outer_step = 4.0
    assert met_for(table, 20, lambda patience_s: 5.0, trains_s=4.0) == [5.0] * 20
    table, core = used_to_fast_lines()
    core._core.seconds_per_outer_step = 1.0
    assert None in met_for(table, 20, lambda patience_s: 5.0, trains_s=1.0)


def test_who_dragged_on_is_declined_when_it_calls_and_is_promised_nothing() -> None:
    table, core = used_to_fast_lines()
    birch, fragments = PeerId("birch"), WAITING.between
    passes(table, 1.0)
    core._core.members.see(presence("birch", progress=40.0, at=table.now), table.now + 75.0)

    def answer_to(serial: int, step: int) -> list[DeclineReason | None]:
        offer = Offer(
            RULES.run, RULES.protocol, fragments, own_terms(table["birch"].core._core, PeerId("amber")), round=step
        )
        return answers(core.handle(Received(LinkId(birch, serial, outbound=False), offer), table.now))

    assert answer_to(100, 1) == [DeclineReason.NOT_YET]
    core._exchanges.rounds._swap_commitments.broke(birch)
    assert answer_to(101, 1) == [DeclineReason.BUSY]
    assert Proceed(1) in core.handle(PhaseDone(1, 40.0), table.now)
    assert answer_to(102, 2) == [DeclineReason.NOT_YET], "it rested in one round"
    core._exchanges.rounds._slow_partners._until[birch] = table.now + 10.0
    assert answer_to(103, 2) == [DeclineReason.BUSY]


def test_whose_offers_cross_ours_for_ever_is_waited_for_ever_more_rarely() -> None:
    """Check a partner that claims that its own offer comes first, but sends none."""

    def crosses(number: int, ours: Open) -> list[Event]:
        return [Received(ours.link, postpone(DeclineReason.CROSSING))]

    waits = waits_of(crosses, me="birch", other="amber")
    assert [number for number, each in enumerate(waits, 1) if each > 1] == [1, 3, 7]
    assert not any(waits_of(crosses)), "of the larger id it cannot be true"


def test_a_crossing_that_cannot_be_true_is_told_as_what_was_said() -> None:
    table = in_step("amber", "birch")
    core = table["amber"].core
    for name in ("amber", "birch"):
        table[name].core._core.progress = 40.0
    core._core.members.see(presence("birch", progress=40.0, at=table.now), table.now + 75.0)
    [ours] = [each for each in core.handle(PhaseDone(1, 40.0), table.now) if isinstance(each, Open)]
    notes = [
        each
        for each in core.handle(Received(ours.link, postpone(DeclineReason.CROSSING)), table.now)
        if isinstance(each, Note)
    ]
    assert [(each.kind, each.why) for each in notes] == [("skipped", "our offers crossed")]


def test_who_meets_us_in_every_other_round_is_waited_for_ever_more_rarely() -> None:
    def comes_now_and_then(number: int, ours: Open) -> list[Event]:
        if number % 2:
            return [Received(ours.link, postpone(DeclineReason.NOT_YET))]
        assert isinstance(ours.message, Offer)
        return [
            Received(ours.link, Accept(ours.message.fragments, ours.message.terms, known=())),
            SwapDone(ours.link, 1000, 1000, 0.1, 1.0, b""),
            Received(ours.link, Acknowledge()),
            Applied(ours.link, 40.0),
        ]

    waits = waits_of(comes_now_and_then, rounds=40)
    assert [number for number, each in enumerate(waits, 1) if each > 1] == [1, 3, 7, 15, 31]


def test_who_never_answers_is_waited_for_ever_more_rarely() -> None:
    """Check a partner with a record that does not answer: it gets a moment, since it may wait for us."""
    waits = waits_of(lambda number, ours: [], rounds=20)
    assert [number for number, each in enumerate(waits, 1) if each > 1] == [1, 3, 7, 15]
    assert waits[0] >= 9
    assert max(waits) <= 31


def test_who_has_but_a_moment_to_answer_has_a_second_and_makes_us_no_more_patient() -> None:
    """Check a distant honest partner that was late once, after measurements of short answer times."""
    table = in_step("amber", "birch")
    core = table["amber"].core
    for _ in range(8):
        core._core.deadlines.replied(0.01)
    core._exchanges.rounds._arrival_commitments.broke(PeerId("birch"))
    patience_s = core._core.deadlines.reply_s()
    [ours] = opened(core.handle(PhaseDone(1, 10.0), table.now))
    assert Close(ours.link) not in core.handle(Woke(), table.now + 0.9)
    assert Close(ours.link) in core.handle(Woke(), table.now + 1.1)
    assert core._core.deadlines._patience == 1.0
    assert core._core.deadlines.reply_s() == patience_s


def broken_after(rounds: int, seconds: float, answers: tuple[str, ...] = ()) -> dict[PeerId, int]:
    """Return two partners' broken commitments after some rounds in which each call failed after ``seconds``.

    Calls to the peers of ``answers`` are declined instead.
    """
    core, now = in_step("amber", "birch", "cedar")["amber"].core, 3.0
    for number in range(1, rounds + 1):
        for name in ("birch", "cedar"):
            core._core.members.see(presence(name, at=now), now + 75.0)
        ours = opened(core.handle(PhaseDone(number, 10.0), now))
        for call in sorted(ours, key=lambda call: call.link.peer not in answers):
            if call.link.peer in answers:
                core.handle(Received(call.link, postpone(DeclineReason.NOT_PLANNED)), now)
                continue
            core.handle(Woke(), now + seconds)  # only time passes before
            core.handle(LinkFailed(call.link, "no route to host"), now + seconds)
        now += seconds + 1.0
    return {peer: each.times for peer, each in core._exchanges.rounds._arrival_commitments._broken.items()}


def test_what_could_not_be_delivered_broke_no_promise() -> None:
    """Check our own connection without a route: if all dials fail at once, no commitment is broken."""
    assert broken_after(rounds=20, seconds=0.1) == {}


def test_where_nobody_answers_it_may_be_our_own_line_and_counts_for_little() -> None:
    assert broken_after(rounds=40, seconds=1.5) == {"birch": MAX_OURS, "cedar": MAX_OURS}
    alone = broken_after(rounds=40, seconds=1.5, answers=("birch",))
    assert list(alone) == ["cedar"]
    assert alone[PeerId("cedar")] > MAX_OURS


@pytest.mark.parametrize("seconds", [ROUND_PATIENCE_S + 10.0, 3600.0])
def test_who_promised_to_come_broke_no_word_while_we_were_held_up(seconds: float) -> None:
    table = in_step("amber", "birch")
    core, birch = table["amber"].core, PeerId("birch")
    [ours] = opened(core.handle(PhaseDone(1, 10.0), table.now))
    core.handle(Received(ours.link, postpone(DeclineReason.NOT_YET)), table.now)
    table.now += 0.5
    core.handle(Woke(), table.now)
    table.now += seconds
    core._core.members.see(presence("birch", at=table.now), table.now + 75.0)
    effects = core.handle(Woke(), table.now)
    assert not core._exchanges.rounds._arrival_commitments._broken
    theirs = LinkId(birch, 100, outbound=False)
    effects += core.handle(Received(theirs, replace(ours.message, known=())), table.now + 0.5)
    assert answers(effects) != [DeclineReason.NOT_PLANNED]
    assert not any(isinstance(each, Proceed) for each in effects)


def test_who_broke_a_promise_is_forgiven_in_time() -> None:
    commitments, fox = RoundCommitments(), PeerId("fox")
    commitments.broke(fox)
    commitments.broke(fox)
    assert [commitments.take(fox) for _ in range(4)] == [False, False, False, True]
    for _ in range(2 * EXCHANGES_TO_FORGIVE):
        commitments.kept(fox)
    commitments.broke(fox)
    assert [commitments.take(fox) for _ in range(2)] == [False, True]


def test_promises_are_bounded_by_number_and_the_oldest_go() -> None:
    commitments, fox = RoundCommitments(), PeerId("fox")
    commitments.broke(fox)
    for number in range(MAX_KNOWN - 1):
        commitments.broke(PeerId(f"peer {number}"))
    assert not commitments.take(fox)
    commitments.broke(fox)  # which makes it the newest
    commitments.broke(PeerId("one more"))
    assert not commitments.take(fox)
    assert commitments.take(PeerId("peer 0"))
    assert len(commitments._broken) == MAX_KNOWN


def test_who_goes_away_for_a_while_has_broken_its_promise_all_the_same() -> None:
    table = in_step("amber", "birch")
    core = table["amber"].core
    core._exchanges.rounds._arrival_commitments.broke(PeerId("birch"))
    table.kill("birch")
    table.run(300.0)
    assert core._core.members.get(PeerId("birch")) is None
    core.handle(PhaseDone(1, 10.0), table.now)
    assert not core._exchanges.rounds._arrival_commitments.take(PeerId("birch"))


def test_who_is_distrusted_is_not_called_by_plan() -> None:
    table = in_step("amber", "birch")
    core = table["amber"].core
    [ours] = opened(core.handle(PhaseDone(1, 10.0), table.now))
    core.handle(LinkFailed(ours.link, "it accepted what was not offered", their_fault=True), table.now)
    effects = core.handle(PhaseDone(2, 20.0), table.now + 1.0)
    assert not opened(effects)
    assert Proceed(2) in effects
    assert core.live_peers(table.now + 1.0) == ["birch"]


def test_who_takes_over_an_earlier_outer_step_comes_to_it_again() -> None:
    """Check a donor that has made fewer outer steps, but has more progress."""
    table = in_step("amber", "birch")
    core, birch = table["amber"].core, PeerId("birch")
    [ours] = opened(core.handle(PhaseDone(9, 90.0), table.now))
    core.handle(Adopted(LinkId(birch, 1, outbound=True), step=4, progress=95.0), table.now)
    theirs = replace(ours.message, round=5, known=())
    assert answers(core.handle(Received(LinkId(birch, 100, outbound=False), theirs), table.now)) == [
        DeclineReason.NOT_YET
    ]
