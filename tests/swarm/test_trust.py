"""Weights that are too far away are clipped to a usual distance or rejected, and their sender is avoided for a
while."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from run_rules import run_rules
from table import RULES, Table

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm import SwarmRules
from p2ptrain.swarm.events import Commit, OuterStepDone, Received
from p2ptrain.swarm.messages import Accept, Offer
from p2ptrain.swarm.rules import BEGINNER_STEPS, ProgressBounds
from p2ptrain.swarm.trust import (
    FACTOR,
    MAX_PARTNERS,
    MAX_REPLAYS,
    MIN_EXCHANGES,
    MIN_PARTNERS,
    MIN_RADIUS,
    PER_PARTNER,
    PER_REPLAYER,
    TIMES_UNRELATED,
    DistanceStats,
    Replays,
    are_unrelated,
    per_fragment,
)

PARTNERS = [PeerId(f"peer {number}") for number in range(7)]


def grown(differences: list[float], weights: float = 1.0) -> DistanceStats:
    """Return statistics of as many meetings as are remembered, at these distances."""
    usual = DistanceStats()
    for _ in range(PER_PARTNER):
        for peer, difference in zip(PARTNERS, differences, strict=True):
            usual.measured(peer, difference, weights)
    return usual


def test_a_radius_is_a_multiple_of_what_is_usual_among_partners() -> None:
    assert grown([0.1] * 7).radius() == pytest.approx(FACTOR * 0.1)


def test_two_liars_of_seven_partners_cannot_move_the_radius_past_what_honest_ones_measure() -> None:
    honest = [0.05, 0.06, 0.07, 0.08, 0.09]
    for lie in (1e-9, 1.1):
        assert FACTOR * 0.05 <= grown([*honest, lie, lie]).radius() <= FACTOR * 0.09


def test_one_partner_however_often_it_is_met_has_one_voice() -> None:
    usual = grown([0.05] * 7)
    for _ in range(100):
        usual.measured(PARTNERS[0], 1.1, 1.0)
    assert usual.radius() == pytest.approx(FACTOR * 0.05)


def test_a_radius_does_not_shrink_with_agreement_below_a_share_of_the_weights() -> None:
    assert grown([1e-6] * 7, weights=3.0).radius() == 3.0 * MIN_RADIUS


def test_before_enough_was_measured_only_strangers_are_kept_out() -> None:
    usual = DistanceStats()
    assert usual.radius() == math.inf
    for peer in PARTNERS[: MIN_PARTNERS - 1]:
        for _ in range(MIN_EXCHANGES):
            usual.measured(peer, 0.1, 2.0)
    assert usual.radius() == math.inf
    usual.measured(PARTNERS[-1], 0.1, 2.0)
    assert usual.radius() == pytest.approx(max(FACTOR * 0.1, 2.0 * MIN_RADIUS))
    usual.forget()
    assert usual.radius() == math.inf


@pytest.mark.parametrize(
    ("difference", "weights"), [(0.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (0.1, 0.0), (0.1, math.nan)]
)
def test_numbers_that_are_none_teach_nothing(difference: float, weights: float) -> None:
    usual = grown([0.1] * 7)
    before = usual.radius()
    for _ in range(50):
        usual.measured(PARTNERS[0], difference, weights)
    assert usual.radius() == before


def test_memory_is_bounded_and_those_met_last_are_remembered() -> None:
    usual = DistanceStats()
    for number in range(1000):
        usual.measured(PeerId(f"stranger {number}"), 0.1 if number < 900 else 0.2, 1.0)
    assert len(usual._differences) == MAX_PARTNERS
    assert usual.radius() == pytest.approx(FACTOR * 0.2)


def test_negated_random_and_enormous_weights_are_strange_and_distant_ones_are_not() -> None:
    assert all(are_unrelated(distance) for distance in (math.sqrt(2), 2.0, 1e9, math.inf, math.nan))
    assert not any(are_unrelated(distance) for distance in (0.0, 0.5, 1.0))
    assert per_fragment(2.0, 4) == 1.0


def test_what_was_mixed_twice_is_a_replay_and_what_is_new_is_not() -> None:
    replays, amber, birch = Replays(), PARTNERS[0], PARTNERS[1]
    for _ in range(MAX_REPLAYS):
        assert not replays.is_one(amber, b"old")
        replays.mixed(amber, b"old")
    assert replays.is_one(amber, b"old")
    assert not replays.is_one(amber, b"new")
    assert not replays.is_one(birch, b"old")
    for number in range(PER_REPLAYER - 1):
        replays.mixed(amber, bytes([number]))
    assert replays.is_one(amber, b"old")
    for _ in range(5):
        replays.mixed(amber, b"")  # of learners without fingerprints
    assert not replays.is_one(amber, b"")


def test_memory_of_replays_is_bounded() -> None:
    replays = Replays()
    for number in range(500):
        replays.mixed(PARTNERS[0], number.to_bytes(2, "big"))
        replays.mixed(PeerId(f"stranger {number}"), b"one")
    assert len(replays._times) <= MAX_PARTNERS
    assert all(len(times) <= PER_REPLAYER for times in replays._times.values())


# --- whole exchanges ----------------------------------------------------------------------------------------------

HONEST, LIAR = ("amber", "birch", "cedar", "delta"), "liar"


def swarm(distance: float, rules: SwarmRules = RULES) -> Table:
    """Return four honest peers, 5 % apart, and one at this distance from each of them."""
    table = Table(*HONEST, LIAR, rules=rules)
    table.apart = lambda me, partner: (distance if LIAR in (me, partner) else 0.05, 10.0)
    table.start()
    table.run(1.0)
    return table


def train(table: Table, steps: int) -> None:
    for _ in range(steps):
        table.step()
        table.run(5.0)


def radii_of(table: Table, name: str) -> list[float]:
    """Record the clip radii of this peer's commits from now on."""
    seat, seen = table[name], []
    original = seat.core.handle

    def handle(event: object, now: float) -> list:
        effects = original(event, now)
        seen.extend(effect.clip_radius for effect in effects if isinstance(effect, Commit))
        return effects

    seat.core.handle = handle
    return seen


def test_honest_peers_agree_on_a_radius_and_nobody_is_clipped() -> None:
    table = swarm(0.05)
    train(table, 12)
    radii = radii_of(table, "amber")
    train(table, 3)
    assert radii == [pytest.approx(FACTOR * 0.05 * 10.0)] * len(radii)
    assert radii
    assert all(table[name].core.counters.clipped == 0 for name in HONEST)
    assert not any("clipped" in line for line in table.trace)


def test_who_is_further_off_than_the_radius_is_clipped_named_and_left_alone() -> None:
    table = swarm(1.1)
    train(table, 12)
    clipped = sum(table[name].core.counters.clipped for name in HONEST)
    assert clipped >= 1
    assert any("clipped liar its weights differed from ours by 110 %" in line for line in table.trace)
    before = clipped
    train(table, 60)  # 300 s: without a pause there would be dozens
    # One per pause, and pauses double.
    assert sum(table[name].core.counters.clipped for name in HONEST) - before <= 4 * 4
    assert all(table[name].core.counters.exchanges_ok >= 40 for name in HONEST)


def test_who_has_nothing_in_common_with_us_moves_nobody_and_offends() -> None:
    table = swarm(2.0)
    train(table, 12)
    assert table[LIAR].core.counters.exchanges_ok == 0
    assert any("broke protocol liar its weights have nothing in common with ours" in line for line in table.trace)
    assert all(table[name].core.counters.exchanges_ok >= 5 for name in HONEST)
    assert all(table[name].core.counters.half_commits == 0 for name in HONEST)


def test_who_is_strange_twice_is_no_liar_yet() -> None:
    """Check a peer that trained alone briefly in a young run: soon all exchange with it again, without an offence."""
    table = swarm(2.0)
    train(table, 2)
    told = [line.split(" ", 1)[1] for line in table.trace if "nothing in common" in line]
    assert told
    assert all(" failed " in f" {line} " for line in told)
    assert all(table[name].core.counters.offences == 0 for name in HONEST)
    table.apart = lambda me, partner: (0.05, 10.0)
    train(table, 4)
    assert table[LIAR].core.counters.exchanges_ok >= 3


def test_who_has_nothing_in_common_with_us_offends_from_the_third_time_on() -> None:
    table = swarm(2.0)
    train(table, 24)
    for name in HONEST:
        told = [line.split()[2] for line in table.trace if f" {name} " in line and "liar its weights" in line]
        first = told.index("broke")
        assert first >= TIMES_UNRELATED - 1
        assert set(told[first:]) == {"broke"}


def test_who_was_never_in_step_blames_nobody_for_being_strange() -> None:
    table = Table("amber", "birch")
    table.apart = lambda me, partner: (2.0, 10.0)
    table.start()
    table.run(1.0)
    train(table, 3)
    assert any("failed birch its weights have nothing in common with ours" in line for line in table.trace)
    assert all(table[name].core.counters.offences == 0 for name in ("amber", "birch"))
    assert all(table[name].core.counters.exchanges_ok == 0 for name in ("amber", "birch"))


def test_who_begins_blames_nobody_for_being_strange_until_it_has_made_a_few_steps() -> None:
    """Check the first steps without a warm-up, longer than the weights: all are unrelated, though some are settled."""
    table = swarm(0.05)
    train(table, 1)
    assert all(table[name].core.settled for name in HONEST)
    table.apart = lambda me, partner: (2.0, 10.0)
    train(table, BEGINNER_STEPS - 2)
    lines = [line for line in table.trace if "nothing in common" in line]
    assert lines
    assert not any("broke protocol" in line for line in lines)
    assert all(table[name].core.counters.offences == 0 for name in HONEST)
    assert not any(table[name].core._core.is_outlier for name in HONEST)
    table.apart = lambda me, partner: (0.05, 10.0)
    train(table, 12)
    assert all(table[name].core.counters.exchanges_ok > BEGINNER_STEPS for name in HONEST)


def test_who_says_that_it_begins_is_not_blamed_and_moves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.swarm.peer.drop_out_if_due", lambda *_: "")  # nor does it take itself for an outlier
    table = swarm(2.0)
    original = table[LIAR].core.handle

    def as_a_beginner(event: object, now: float) -> list:
        return original(replace(event, step=0) if isinstance(event, OuterStepDone) else event, now)

    table[LIAR].core.handle = as_a_beginner
    train(table, 12)
    assert table[LIAR].core.counters.exchanges_ok == 0
    assert any("failed liar its weights have nothing in common with ours" in line for line in table.trace)
    assert not any("broke protocol liar" in line for line in table.trace)


def test_what_pseudo_gradients_measure_is_not_judged() -> None:
    rules = run_rules((1000, 1000), streams=2)
    table = swarm(2.0, rules)
    radii = radii_of(table, "amber")
    train(table, 12)
    assert table[LIAR].core.counters.exchanges_ok > 0
    assert radii
    assert set(radii) == {math.inf}


def test_who_sends_the_same_weights_again_and_again_is_found_out() -> None:
    table = swarm(0.05)
    table.fingerprint = lambda me, partner: b"replayed" if partner == LIAR else b""
    train(table, 30)
    assert any("broke protocol liar it sends the same weights repeatedly" in line for line in table.trace)
    assert table[LIAR].core.counters.exchanges_ok <= MAX_REPLAYS * len(HONEST)


def test_who_agrees_with_us_may_say_the_same_for_ever() -> None:
    table = swarm(0.05)
    table.apart = lambda me, partner: (0.001, 10.0)
    table.fingerprint = lambda me, partner: b"the same"
    train(table, 30)
    assert not any("broke protocol" in line for line in table.trace)
    assert table[LIAR].core.counters.exchanges_ok > MAX_REPLAYS * len(HONEST)


def test_who_has_trained_for_much_longer_is_a_stranger_and_no_offender() -> None:
    """Check outer steps of milliseconds: two settled peers may be this far apart."""
    table = swarm(2.0)
    far = ProgressBounds(RULES, len((*HONEST, LIAR))).catch_up + 1.0
    original = table["amber"].core.handle
    terms: list[float] = []

    def ahead(event: object, now: float) -> list:
        if isinstance(event, Received) and isinstance(event.message, Offer | Accept) and event.link.peer == LIAR:
            theirs = replace(event.message.terms, progress=event.message.terms.progress + far)
            terms.append(theirs.progress)
            event = replace(event, message=replace(event.message, terms=theirs))
        return original(event, now)

    table["amber"].core.handle = ahead
    train(table, 12)
    assert terms
    lines = [line for line in table.trace if "nothing in common" in line]
    assert any(line.find("amber failed liar") >= 0 for line in lines)
    assert not any("amber broke protocol liar" in line for line in lines)
    assert any("broke protocol liar" in line for line in lines)  # others do blame it
