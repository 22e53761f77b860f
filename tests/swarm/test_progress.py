"""Progress in exchanges: conserved, averaged, and bounded against false claims. Swarms of numbers without weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from random import Random
from statistics import fmean
from typing import Any

import pytest
from run_rules import run_rules
from table import RULES

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm import PeerState, Terms
from p2ptrain.swarm.progress import (
    FALL_SLACK,
    FALL_STEPS,
    LATELY_STEPS,
    RATE_SLACK,
    ProgressBudget,
    entry_progress,
    progress_displacement,
)
from p2ptrain.swarm.rules import MAX_KNOWN, ProgressBounds

BOUNDS = ProgressBounds(RULES)
STEP = BOUNDS.step


def budget() -> ProgressBudget:
    return ProgressBudget(BOUNDS)


def terms(
    progress: float, weight: float = 1.0, max_decrease: float = inf, partners: int = 1, max_increase: float = inf
) -> Terms:
    limits = {"max_decrease": max_decrease, "max_increase": max_increase}
    return Terms(1, progress, weight, inf, True, PeerState.TRAINING, partners, **limits)


class Unbounded(ProgressBudget):
    """Budget without limits."""

    def max_decrease(self, peer: PeerId) -> float:
        return inf

    @property
    def max_increase(self) -> float:
        return inf

    def take(self, displacement: float, peer: PeerId) -> float:
        return displacement


class Numbers:
    """Peers that train at different speeds, count own tokens once for each peer, and exchange progress with others.

    The last ones may be adversarial: they claim to be at the start and initiate twenty times as often.
    """

    def __init__(
        self,
        paces: Sequence[float],
        liars: int = 0,
        begun: float = 1.0,
        share: float = 1.0,
        meets: Callable[[int], Sequence[int]] | None = None,
        seed: int = 1,
        bounded: bool = True,
    ) -> None:
        self.paces, self.begun = paces, begun
        self.names = [PeerId(f"peer {number}") for number in range(len(paces) + liars)]
        self.honest = range(len(paces))
        self.progress = [0.0] * len(self.names)
        self.rules = run_rules(fragment_bytes=(1,) * 4)
        self.bounds = ProgressBounds(self.rules, float(len(self.names)))
        self.budgets = [(ProgressBudget if bounded else Unbounded)(self.bounds) for _ in self.honest]
        self.meets = meets or (lambda me: [each for each in range(len(self.names)) if each != me])
        self.fragments, self.random = int(4 * share), Random(seed)
        self.under_way = [self.random.random() for _ in self.honest]
        self.away: set[int] = set()
        """Honest peers without a trainer."""
        self.late = [0.0] * len(paces)
        """Outer steps of their usual pace since their last one."""
        self.tokens = 0.0
        """Own tokens of all honest peers together."""

    def run(self, steps: int, ticks: int = 20) -> None:
        """Run so many outer steps of a peer with pace 1."""
        for _ in range(steps * ticks):
            for me in self.honest:
                self.late[me] += self.paces[me] / ticks
                self.budgets[me].expected(self.late[me] * self.bounds.step)
                self.under_way[me] += self.paces[me] / ticks if me not in self.away else 0.0
                while self.under_way[me] >= 1.0:  # it reports whole outer steps
                    self.under_way[me] -= 1.0
                    self.late[me] = self.under_way[me]
                    self.tokens += self.rules.tokens_per_outer_step
                    self.progress[me] += self.bounds.step
                    self.budgets[me].trained(self.bounds.step)
            for me in range(len(self.names)):
                calls = self.begun / ticks * (1 if me in self.honest else 20)
                while self.random.random() < calls:
                    calls -= 1
                    self.exchange(me, self.random.choice(self.meets(me)))

    def exchange(self, one: int, other: int) -> None:
        said = [
            terms(
                self.progress[me],
                max_decrease=self.budgets[me].max_decrease(self.names[they]) if me in self.honest else inf,
                max_increase=self.budgets[me].max_increase if me in self.honest else inf,
            )
            for me, they in ((one, other), (other, one))
        ]
        for me, they, mine, theirs in ((one, other, *said), (other, one, *reversed(said))):
            if me in self.honest:
                moved = progress_displacement(mine, theirs, self.fragments, self.rules)
                self.progress[me] += self.budgets[me].take(moved, self.names[they])

    @property
    def mean(self) -> float:
        """Mean progress, in outer steps of all peers."""
        return fmean(self.progress[me] for me in self.honest) / self.bounds.step

    @property
    def lead(self) -> float:
        """Outer steps of the furthest peer beyond the mean."""
        return max(self.progress[me] for me in self.honest) / self.bounds.step - self.mean


def ring(peers: int) -> Callable[[int], Sequence[int]]:
    return lambda me: [(me + 1) % peers, (me - 1) % peers]


SEVEN = (1.0,) * 7


def three_of_seven(me: int) -> Sequence[int]:
    return [1, 2, 3] if me == 0 else [each for each in range(8) if each != me]


@pytest.mark.parametrize(
    "swarm",
    [
        {"paces": (10.0, *SEVEN)},
        {"paces": (10.0, *SEVEN), "begun": 2.0},
        {"paces": (10.0, *SEVEN), "share": 0.5},
        {"paces": (4.0, *SEVEN), "begun": 0.5},
        {"paces": (2.0, *SEVEN), "share": 0.25},
        {"paces": (10.0, *SEVEN * 9)},
        {"paces": (20.0, *SEVEN * 9), "begun": 4.0},
        {"paces": (10.0, *SEVEN), "meets": three_of_seven},
        {"paces": (4.0, *SEVEN), "meets": ring(8)},
    ],
)
def test_a_fast_peer_creates_no_progress_and_is_held_as_if_nothing_were_bounded(swarm: dict[str, Any]) -> None:
    bounded, free = Numbers(**swarm), Numbers(**swarm, bounded=False)
    leads: list[tuple[float, float]] = []
    for _ in range(40):
        bounded.run(1)
        free.run(1)
        leads.append((bounded.lead, free.lead))
    assert bounded.tokens == pytest.approx(40 * sum(bounded.paces) * STEP, rel=0.03)
    for numbers, least in ((bounded, 0.95), (free, 1 - 1e-9)):  # what the budget cuts off is lost
        total = fmean(numbers.progress)
        assert least * numbers.tokens <= total <= (1 + 1e-9) * numbers.tokens
    assert fmean(lead for lead, _ in leads) <= 1.3 * fmean(lead for _, lead in leads) + 0.2


@pytest.mark.parametrize("away", [1, 2])
def test_peers_whose_trainers_are_away_are_carried_along(away: int) -> None:
    swarm = Numbers((1.0, 1.0, 1.0, 1.0))
    swarm.run(20)
    swarm.away = set(range(away))
    swarm.run(60)
    assert fmean(swarm.progress) == pytest.approx(swarm.tokens, rel=0.01)
    assert swarm.lead < 4.0
    swarm.away.clear()
    swarm.run(20)
    assert fmean(swarm.progress) == pytest.approx(swarm.tokens, rel=0.01)


def test_a_lead_that_somebody_brings_back_is_shared_and_not_multiplied() -> None:
    swarm = Numbers((1.0, *SEVEN))
    swarm.progress[0] = 30 * swarm.bounds.step
    swarm.run(60)
    assert swarm.mean == pytest.approx(60 + 30 / 8, rel=0.02)
    assert swarm.lead < 4.0


@pytest.mark.parametrize(("honest", "liars", "pace"), [(7, 1, 0.78), (6, 2, 0.57), (3, 1, 0.59), (31, 1, 0.92)])
def test_liars_that_stay_at_the_beginning_slow_the_others_by_about_their_part(
    honest: int, liars: int, pace: float
) -> None:
    """Check that their rate does not matter.

    Their part is 1.5 of their number, and a little, since exchanges raise progress too.
    """
    swarm = Numbers((1.0,) * honest, liars)
    swarm.run(200)
    assert swarm.mean >= 200 * pace
    assert swarm.lead < 2.0


def test_names_of_nobody_change_nothing() -> None:
    """Check peers without an exchange: they have no part in the budget by which partners may lower our progress."""
    known, crowded = budget(), budget()
    for each in (known, crowded):
        each.take(-1.0, PeerId("honest"))
    for number in range(300):
        crowded.max_decrease(PeerId(f"nobody {number}"))
    for each in (known, crowded):
        each.trained(100.0)
    assert known.max_decrease(PeerId("honest")) == crowded.max_decrease(PeerId("honest"))


def test_liars_together_raise_us_by_what_the_bucket_holds() -> None:
    ours = budget()
    gained = 0.0
    for number in range(1000):
        ours.trained(0.1)
        gained += ours.take(70.0, PeerId(f"liar {number % 7}"))
    assert gained <= BOUNDS.catch_up + RATE_SLACK * 100.0


def test_what_was_trained_during_a_long_exchange_can_be_made_up_for() -> None:
    ours = budget()
    for _ in range(40):
        ours.trained(STEP)
    assert ours.max_increase == RATE_SLACK * 40 * STEP > BOUNDS.catch_up
    ours.take(100.0, PeerId("hen"))
    ours.trained(STEP)
    assert ours.max_increase == RATE_SLACK * STEP


def test_a_newcomer_adds_what_others_had_when_they_began_to_count_it() -> None:
    """Check two peers at 130 that count a third one since 100, which has trained 10 itself."""
    newcomer, other = replace(terms(10.0), settled=False), replace(terms(130.0), counted_at=100.0)
    assert progress_displacement(newcomer, other, 1, RULES) == 90.0 + 15.0
    assert progress_displacement(other, newcomer, 1, RULES) == -15.0
    assert progress_displacement(replace(newcomer, settled=True), other, 1, RULES) == 60.0
    assert entry_progress(100.0, 10.0, 130.0) == 110.0


@pytest.mark.parametrize("counted_at", [0.0, 1e300])
def test_a_false_count_moves_a_newcomer_between_its_own_progress_and_the_liars(counted_at: float) -> None:
    newcomer, liar = replace(terms(10.0), settled=False), replace(terms(130.0), counted_at=counted_at)
    assert 0.0 <= progress_displacement(newcomer, liar, 1, RULES) <= 120.0
    assert 10.0 <= entry_progress(counted_at, 10.0, 130.0) <= 130.0


def test_a_new_number_of_peers_leaves_the_bucket_as_full_as_it_was() -> None:
    ours = budget()
    ours.take(20.0, PeerId("hen"))
    full = ours.left / ours.bounds.catch_up
    ours.rescale(ProgressBounds(RULES, 8.0))
    assert ours.left / ours.bounds.catch_up == full < 1.0
    assert ours.max_decrease(PeerId("stranger")) == FALL_STEPS * 8 * STEP


def test_both_sides_are_cut_alike_whatever_they_weigh() -> None:
    random = Random(3)
    for _ in range(500):
        one, other = (
            terms(
                random.uniform(0, 300),
                random.choice((1.0, 3.0, 1e5)),
                random.choice((0.0, 5.0, inf)),
                random.choice((1, 2)),
                max_increase=random.choice((0.0, 7.0, inf)),
            )
            for _ in range(2)
        )
        up, down = (progress_displacement(a, b, 1, RULES) for a, b in ((one, other), (other, one)))
        assert up == -down
        ahead, behind = (one, other) if up < 0 else (other, one)
        assert abs(up) <= min(ahead.max_decrease, behind.max_increase)


def test_equals_do_not_move() -> None:
    assert progress_displacement(terms(10.0, max_decrease=0.0), terms(10.0, max_decrease=0.0), 1, RULES) == 0.0


def test_what_a_partner_raised_us_by_it_may_take_back() -> None:
    ours = budget()
    ours.take(20.0, PeerId("hen"))
    assert ours.max_decrease(PeerId("hen")) == FALL_STEPS * STEP + 20.0
    ours.take(-35.0, PeerId("hen"))
    assert ours.max_decrease(PeerId("hen")) == 0.0


def test_of_few_partners_it_is_remembered_how_far_they_may_lower_us() -> None:
    ours = budget()
    for number in range(MAX_KNOWN + 1):
        assert ours.max_decrease(PeerId(f"peer {number}")) == FALL_STEPS * STEP
        ours.take(-70.0, PeerId(f"peer {number}"))
    assert len(ours.accounts) == MAX_KNOWN
    assert ours.max_decrease(PeerId(f"peer {MAX_KNOWN}")) == 0.0
    assert ours.max_decrease(PeerId("peer 0")) == FALL_STEPS * STEP


def test_numbers_too_small_to_be_divided_move_nobody() -> None:
    """Check the smallest positive float as a stranger's progress."""
    for theirs in (5e-324, 1e-322, 1e-310):
        for weight in (0.002, 1.0):
            mine, said = terms(0.0, weight=1e-3), terms(theirs, weight=weight)
            assert abs(progress_displacement(mine, said, 1, RULES)) < 1e-300
            assert abs(progress_displacement(said, mine, 1, RULES)) < 1e-300


def test_who_saves_up_for_long_lowers_us_by_a_bounded_blow() -> None:
    ours = budget()
    for number in range(4):
        ours.take(-1.0, PeerId(f"peer {number}"))
    for _ in range(900):
        ours.trained(STEP)
        ours.take(-1.0, PeerId("honest"))
    assert ours.max_decrease(PeerId("peer 1")) <= FALL_SLACK / 2 * LATELY_STEPS * STEP


def test_the_first_that_comes_to_who_was_long_alone_lowers_it_by_a_bounded_blow() -> None:
    ours = budget()
    for _ in range(300):
        ours.trained(STEP)
    first = PeerId("first")
    before = ours.max_decrease(first)
    assert before == FALL_SLACK / 2 * LATELY_STEPS * STEP
    ours.take(-before, first)
    assert ours.max_decrease(first) == 0.0


def test_who_has_come_to_the_end_raises_others_and_moves_no_more() -> None:
    at_end, behind = replace(terms(1000.0), state=PeerState.FINISHING), terms(960.0)
    assert progress_displacement(at_end, behind, 1, RULES) == 0.0
    assert progress_displacement(behind, at_end, 1, RULES) == 20.0
    liar = replace(terms(0.0), state=PeerState.FINISHING)
    assert progress_displacement(behind, liar, 1, RULES) == 0.0
