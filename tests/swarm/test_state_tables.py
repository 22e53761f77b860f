"""Transition tables: docs/PROTOCOL.md shows them, and the core takes every transition in them and no other."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from random import Random

import pytest
import test_golden_traces as golden
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from run_rules import run_rules
from table import RULES, Table, presence

from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.swarm import Offer, Peer, PeerState, SwarmRules
from p2ptrain.swarm.events import (
    Adopted,
    Applied,
    Commit,
    Effect,
    Event,
    LeaveRequested,
    LinkFailed,
    Open,
    OuterStepDone,
    PeersSeen,
    PhaseDone,
    Pulled,
    Received,
    Started,
    Swap,
    SwapDone,
    TrainingEnded,
    Woke,
)
from p2ptrain.swarm.exchange import TRANSITIONS as EXCHANGE
from p2ptrain.swarm.exchange import Exchange, ExchangeEvent, ExchangeState
from p2ptrain.swarm.meeting import TRANSITIONS as MEETING
from p2ptrain.swarm.meeting import Meeting, MeetingEvent
from p2ptrain.swarm.messages import Accept, Acknowledge, Decline, DeclineReason, WeightsReply
from p2ptrain.swarm.partners import own_terms
from p2ptrain.swarm.peer import TRANSITIONS as PEER
from p2ptrain.swarm.peer import PeerEvent
from p2ptrain.swarm.rules import ROUND_PATIENCE_S
from p2ptrain.swarm.transitions import Transition, TransitionTable

PROTOCOL = Path(__file__).parents[2] / "docs" / "PROTOCOL.md"
TABLES = {"peer states": PEER, "exchange states": EXCHANGE, "planned partner states": MEETING}
WAITING = run_rules(exchanges_per_step=0, free=(), between=(0,), topology="ring")
BESIDE = run_rules(exchanges_per_step=0, free=(), beside=(0,), topology="ring")
BIRCH = PeerId("birch")

Taken = set[tuple[str, Enum | None, Enum]]


@pytest.mark.parametrize("name", TABLES)
def test_the_protocol_page_shows_the_table(name: str, request: pytest.FixtureRequest) -> None:
    """Compare; ``pytest --rewrite-golden`` writes the table into the page."""
    page, marks = PROTOCOL.read_text(encoding="utf-8"), rf"(<!-- generated: {name} -->\n)(.*?)(\n<!-- end -->)"
    if request.config.getoption("--rewrite-golden"):
        page = re.sub(marks, lambda found: found[1] + TABLES[name].markdown() + found[3], page, flags=re.DOTALL)
        PROTOCOL.write_text(page, encoding="utf-8")
    assert [found[1] for found in re.findall(marks, page, flags=re.DOTALL)] == [TABLES[name].markdown()]


def test_the_protocol_page_has_no_other_generated_table() -> None:
    assert set(re.findall(r"<!-- generated: (.*?) -->", PROTOCOL.read_text(encoding="utf-8"))) == set(TABLES)


# --- every transition is taken ------------------------------------------------------------------------------------


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    """Record transitions that happen, by table, state and event."""
    found: Taken = set()
    original = TransitionTable.after

    def after(table: TransitionTable, before: Enum | None, event: Enum) -> Enum | None:
        result = original(table, before, event)
        found.add((table.name, before, event))
        return result

    monkeypatch.setattr(TransitionTable, "after", after)
    return found


def in_step(rules: SwarmRules = WAITING, me: str = "amber", other: str = "birch") -> tuple[Table, Peer]:
    table = Table(me, other, rules=rules)
    table.start()
    table.run(3.0)
    for name in (me, other):
        table[name].core._core.progress = 40.0
    core = table[me].core
    core._core.members.see(presence(other, progress=40.0, at=table.now), table.now + 75.0)
    return table, core


def opened(effects: list[Effect]) -> Open:
    [found] = [each for each in effects if isinstance(each, Open)]
    return found


def not_yet(reason: DeclineReason = DeclineReason.NOT_YET) -> Decline:
    return Decline(reason, PeerState.TRAINING, 0, 40.0, known=())


def offers_itself(core: Peer, ours: Open, now: float, serial: int = 100) -> list[Effect]:
    """Send the partner's offer for the same round."""
    link = LinkId(ours.link.peer, serial, outbound=False)
    return core.handle(Received(link, replace(ours.message, known=())), now)


def a_plan_meets_and_commits() -> None:
    for me, other in (("amber", "birch"), ("birch", "amber")):
        table, _ = in_step(me=me, other=other)
        table.end_phase(me)
        table.run(0.5)
        table.end_phase(other)
        table.run(3.0)


def an_offer_comes_in_every_state_that_takes_it() -> None:
    for reason in (None, DeclineReason.NOT_YET, DeclineReason.NOT_PLANNED):  # CALLED, AWAITED, MISSED
        table, core = in_step(BESIDE, me="birch", other="amber")
        table.step("birch")
        [exchange] = core._exchanges.book
        offer = Offer(RULES.run, RULES.protocol, exchange.fragments, exchange.mine, exchange.round)
        if reason is not None:
            core.handle(Received(exchange.link, not_yet(reason)), table.now)
        offers_itself(core, Open(exchange.link, (), offer), table.now)
    table, core = in_step()
    # DUE again by a recall; the partner's offer arrives before ours.
    ours = opened(core.handle(PhaseDone(1, 40.0), table.now))
    core.handle(Received(ours.link, not_yet()), table.now)
    [found] = core._exchanges.rounds._open
    found.move(BIRCH, MeetingEvent.RECALL)
    offers_itself(core, ours, table.now)


def every_answer_in(state: Meeting) -> None:
    """Play all answers to our offer, before or after the partner's own has crossed it."""

    def called() -> tuple[Table, Peer, Open]:
        table, core = in_step()
        ours = opened(core.handle(PhaseDone(1, 40.0), table.now))
        if state is Meeting.CROSSED:
            offers_itself(core, ours, table.now)
        return table, core, ours

    def answered(message: Accept | Decline, after_s: float = 0.0) -> None:
        table, core, ours = called()
        for exchange in core._exchanges.book if after_s else ():
            exchange.deadline = core._wake_at = table.now + 2 * after_s  # else the core would seem to have been stopped
        core.handle(Received(ours.link, message), table.now + after_s)

    terms = own_terms(in_step()[1]._core, BIRCH)
    answered(Accept((0,), terms, known=()))
    answered(not_yet())
    answered(not_yet(DeclineReason.CROSSING))
    answered(not_yet(DeclineReason.NOT_PLANNED))
    answered(not_yet(), ROUND_PATIENCE_S + 1.0)
    table, core, ours = called()
    offers_itself(core, ours, table.now, serial=101)
    if state is Meeting.CROSSED:  # not_yet() above was superseded; a second one is not
        again = opened(core.handle(Received(ours.link, not_yet()), table.now))
        offers_itself(core, again, table.now, serial=102)
        core.handle(Received(again.link, not_yet()), table.now)


def a_partner_is_not_called() -> None:
    table, core = in_step()
    core._exchanges.rounds._slow_partners._until[BIRCH] = table.now + 10.0
    core.handle(PhaseDone(1, 40.0), table.now)
    table, core = in_step()
    core._core.is_outlier = True
    core.handle(PhaseDone(1, 40.0), table.now)


def a_partner_is_recalled_and_given_up() -> None:
    table, _ = in_step()
    table.end_phase("amber")
    table.run(ROUND_PATIENCE_S + 1.0)


def a_planned_exchange_fails() -> None:
    table, core = in_step()
    ours = opened(core.handle(PhaseDone(1, 40.0), table.now))
    core.handle(Received(ours.link, Accept((0,), ours.message.terms, known=())), table.now)
    core.handle(LinkFailed(ours.link, "connection reset"), table.now)


def a_peer_pulls_again_and_ends_meanwhile() -> None:
    for event in (TrainingEnded(1, 40.0), LeaveRequested(), None):
        table = Table("amber", "birch", rules=run_rules(run_tokens=100_000.0))
        table.start()
        table.run(3.0)
        core = table["birch"].core
        core._core.settled = False
        core._core.members.see(presence("amber", progress=5000.0, at=100.0, step=500), table.now + 75.0)
        pull = opened(core.handle(Woke(), table.now))
        core.handle(Received(pull.link, WeightsReply(500, 5000.0)), table.now)
        assert core.state is PeerState.JOINING
        if event is not None:
            core.handle(event, table.now)
        else:
            core.handle(Pulled(pull.link, 4000), table.now)
            core.handle(Adopted(pull.link, 500, 5000.0), table.now)
            assert core.state is PeerState.TRAINING


def a_keeper_keeps_pulls_and_leaves() -> None:
    rules = replace(RULES, run_tokens=10_000.0)
    for pulls in (False, True):
        peer = Peer(PeerId("ash"), rules, Random(0), step=3, progress=30.0, keeps=rules.everything)
        peer.handle(Started(), 0.0)
        peer.handle(PeersSeen(()), 1.0)
        assert peer.state is PeerState.KEEPING
        if pulls:
            ahead = presence(BIRCH, progress=500.0)
            effects = peer.handle(PeersSeen(((ahead, 90.0),)), 2.0)
            link = next(each.link for each in effects if isinstance(each, Open))
            peer.handle(Received(link, WeightsReply(50, 500.0)), 3.0)
            assert peer.state is PeerState.JOINING
        peer.handle(LeaveRequested(), 4.0)
        assert peer.state is PeerState.LEAVING


SCENES: dict[str, tuple[Callable[[], object], ...]] = {
    "peer states": (
        golden.three_peers_begin,
        golden.the_run_ends,
        golden.an_owner_stops,
        a_peer_pulls_again_and_ends_meanwhile,
        a_keeper_keeps_pulls_and_leaves,
    ),
    "exchange states": (
        golden.three_peers_begin,
        golden.a_partner_dies_in_mid_exchange,
        golden.an_acknowledgement_is_lost,
    ),
    "planned partner states": (
        a_plan_meets_and_commits,
        an_offer_comes_in_every_state_that_takes_it,
        lambda: every_answer_in(Meeting.CALLED),
        lambda: every_answer_in(Meeting.CROSSED),
        a_partner_is_not_called,
        a_partner_is_recalled_and_given_up,
        a_planned_exchange_fails,
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_transition_is_taken(name: str, taken: Taken) -> None:
    table = TABLES[name]
    for scene in SCENES[name]:
        scene()
    rows = {(table.name, before, row.event) for row in table.rows for before in row.before}
    assert sorted((str(before), event.name) for _, before, event in rows - taken) == []


# --- no other transition can be taken -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "states", "events"),
    [(PEER, PeerState, PeerEvent), (EXCHANGE, ExchangeState, ExchangeEvent), (MEETING, Meeting, MeetingEvent)],
    ids=list(TABLES),
)
def test_a_transition_without_a_row_raises(table: TransitionTable, states: type[Enum], events: type[Enum]) -> None:
    allowed = {(before, row.event) for row in table.rows for before in row.before}
    for before in (None, *states):
        for event in events:
            if (before, event) in allowed:
                table.after(before, event)
            else:
                with pytest.raises(RuntimeError, match=f"{table.name}: {event.name} is impossible in state"):
                    table.after(before, event)


def test_a_state_and_an_event_have_one_row() -> None:
    row = Transition((Meeting.DUE,), MeetingEvent.CALL, Meeting.CALLED, "")
    with pytest.raises(ValueError, match="two rows for the same state and event"):
        TransitionTable("twice", row, row)


def test_an_exchange_moves_by_its_table_alone() -> None:
    terms = own_terms(in_step()[1]._core, BIRCH)
    link = LinkId(BIRCH, 1, outbound=True)
    exchange = Exchange(link, (0,), terms, 0.0, 1.0)
    with pytest.raises(RuntimeError, match="ACKNOWLEDGE is impossible in state OFFERED"):
        exchange.commit()
    with pytest.raises(RuntimeError, match="PAYLOADS is impossible in state OFFERED"):
        exchange.confirm(SwapDone(link, 1, 1, 0.1))
    exchange.swap((0,), terms, 0.0, 1.0)
    with pytest.raises(RuntimeError, match="ACCEPT is impossible in state SWAPPING"):
        exchange.swap((0,), terms, 0.0, 1.0)


@settings(max_examples=60, phases=[Phase.explicit, Phase.generate])
@given(rules=st.sampled_from([WAITING, BESIDE, RULES]), me=st.sampled_from(["amber", "birch"]), seed=st.integers(0))
def test_no_partner_can_make_the_core_take_an_impossible_transition(rules: SwarmRules, me: str, seed: int) -> None:
    """Check any message at any time: a transition without a row would end our process."""
    random, other = Random(seed), "birch" if me == "amber" else "amber"
    table, core = in_step(rules, me, other)
    terms = own_terms(core._core, PeerId(other))
    links, step = [LinkId(PeerId(other), 1000, outbound=False)], 0
    for serial in range(1001, 1120):
        table.now += random.choice([0.0, 0.01, 0.3, 1.1, 12.0])
        event: Event
        what, link = random.randrange(10), random.choice(links[-6:])
        if what == 0:
            step += 1
            event = PhaseDone(step, 40.0) if rules.between else OuterStepDone(step, 40.0, 10)
        elif what in (1, 2, 3):
            link = LinkId(PeerId(other), serial, outbound=False)
            event = Received(link, Offer(rules.run, rules.protocol, (0,), terms, random.choice([0, step, step + 1])))
        elif what == 4:
            event = Received(link, Accept((0,), terms))
        elif what in (5, 6):
            event = Received(link, not_yet(random.choice(list(DeclineReason))))
        elif what == 7:
            event = random.choice([Received(link, Acknowledge()), Received(link, WeightsReply(1, 40.0))])
        elif what == 8:
            event = random.choice([SwapDone(link, 1, 1, 0.01, 1.0), LinkFailed(link, "reset", unbegun=True)])
        else:
            event = Woke()
        core._core.members.see(presence(other, progress=40.0, at=1.0 + table.now), table.now + 75.0)
        if random.random() < 0.1:
            core._core.members.record_success(PeerId(other))
        for effect in core.handle(event, table.now):
            if isinstance(effect, Open | Swap):
                links.append(effect.link)
            if isinstance(effect, Commit):
                core.handle(Applied(effect.link, 40.0), table.now)
        if isinstance(event, Received) and isinstance(event.message, Offer):
            links.append(event.link)
