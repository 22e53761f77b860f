"""Downloads of a model from several donors: scripted donors that are fast, slow, lost or adversarial, on a virtual
clock."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

import pytest

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm.download_plan import (
    FIRST_RATE,
    MAX_DONORS,
    PATIENCE,
    PIECE_BOUNDS_S,
    PIECE_BYTES,
    SLOW,
    SLOW_S,
    Action,
    Cancel,
    Compare,
    DownloadPlan,
    Fetch,
    cut,
)

A, B, C, D, E = (PeerId(name) for name in "abcde")
SIZE = 1_000_000


@dataclass
class Script:
    """Behaviour of a test's donors."""

    rates: Mapping[PeerId, float]
    """Bytes per second; 0: it never sends."""
    dies_at: Mapping[PeerId, float] = field(default_factory=dict)
    odd: frozenset[PeerId] = frozenset()
    """Donors whose copies are far from those of honest ones."""
    together: bool = False
    """Whether the copies of odd donors are near each other."""

    def distance(self, giver: PeerId, other: PeerId) -> float:
        if (giver in self.odd) == (other in self.odd):
            return 0.03 if giver not in self.odd or self.together else 1.4
        return 1.4


class Play:
    """Donors that carry out the actions of a download plan."""

    def __init__(self, script: Script, pieces: int = 12, have: Mapping[int, PeerId] | None = None) -> None:
        self.script = script
        self.now = 0.0
        self.gathering = DownloadPlan([SIZE] * pieces, list(script.rates), have)
        self.asked: Counter[tuple[PeerId, int]] = Counter()
        self.compared: Counter[int] = Counter()
        self.came: dict[int, list[PeerId]] = {}
        self.at_once = 0
        self._cancelled: set[tuple[PeerId, int]] = set()
        self._heap: list[tuple[float, int, tuple]] = []
        self._serial = 0

    def run(self, until: float = 3600.0) -> Play:
        for donor, time in self.script.dies_at.items():
            self._at(time, "dies", donor)
        self._perform(self.gathering.act(self.now))
        while not (self.gathering.is_done or self.gathering.is_stuck) and self.now < until:
            wake = self.gathering.next_deadline(self.now)
            if self._heap and self._heap[0][0] <= wake:
                self.now, _, (what, *arguments) = heapq.heappop(self._heap)
                getattr(self, what)(*arguments)
            else:
                assert wake < float("inf"), "nothing is asked, nothing is due, and it is not done"
                self.now = wake
                self._perform(self.gathering.act(self.now))
        return self

    def dies(self, donor: PeerId) -> None:
        self.gathering.lost(donor)
        self._perform(self.gathering.act(self.now))

    def comes(self, donor: PeerId, piece: int) -> None:
        if self._is_alive(donor) and (donor, piece) not in self._cancelled:
            self.came.setdefault(piece, []).append(donor)
            self._perform(self.gathering.fetched(donor, piece, self.now))

    def is_compared(self, donor: PeerId, piece: int, giver: PeerId) -> None:
        if self._is_alive(donor):
            self._perform(self.gathering.compared(donor, piece, self.script.distance(giver, donor), self.now))

    def _is_alive(self, donor: PeerId) -> bool:
        return self.now < self.script.dies_at.get(donor, float("inf"))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Fetch(donor, piece, _):
                    self.asked[donor, piece] += 1
                    self._cancelled.discard((donor, piece))
                    if rate := self.script.rates[donor]:
                        self._at(self.now + SIZE / rate, "comes", donor, piece)
                case Cancel(donor, piece):
                    self._cancelled.add((donor, piece))
                case Compare(donor, piece):
                    self.compared[piece] += 1
                    self._at(self.now + 0.1, "is_compared", donor, piece, self.gathering.here[piece])
        fetching = {donor for each in self.gathering._pieces for donor in each.asked}
        self.at_once = max(self.at_once, len(fetching))

    def _at(self, time: float, *what: object) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (time, self._serial, what))


def test_three_donors_give_at_once_and_in_a_third_of_the_time() -> None:
    one = Play(Script({A: 1e6})).run()
    three = Play(Script({A: 1e6, B: 1e6, C: 1e6})).run()
    assert one.gathering.is_done
    assert three.gathering.is_done
    assert three.at_once == 3
    assert three.now == pytest.approx(one.now / 3, abs=0.5)
    assert all(times == 1 for times in three.asked.values())
    assert len(three.asked) == 12


def test_no_more_than_three_are_asked_at_once_whoever_else_there_is() -> None:
    play = Play(Script({A: 1e6, B: 1e6, C: 1e6, D: 1e6, E: 1e6})).run()
    assert play.at_once == MAX_DONORS
    assert {donor for donor, _ in play.asked} == {A, B, C}


def test_a_donor_lost_midway_costs_its_unfinished_piece_and_nothing_else() -> None:
    play = Play(Script({A: 1e6, B: 1e6, C: 1e6, D: 1e6}, dies_at={B: 2.5})).run()
    assert play.gathering.is_done
    assert sum(play.asked.values()) == 12 + 1
    assert [piece for piece, donors in play.came.items() if donors == [B]] == [1, 4]
    assert (play.gathering.broke_off, play.gathering.asked_again) == ({B}, 1)
    assert D in {donor for donor, _ in play.asked}


def test_what_only_one_donor_was_left_to_give_waits_for_another_to_confirm_it() -> None:
    play = Play(Script({A: 1e6, B: 1e6, C: 1e6}, dies_at={A: 2.5, B: 3.5})).run()
    assert play.gathering.is_stuck  # it gave all the rest, and no donor is left to confirm it
    assert len(play.gathering.here) == 12
    assert 5 <= sum(piece.confirmed for piece in play.gathering._pieces) < 12
    again = Play(Script({C: 1e6, D: 1e6}), have=play.gathering.here).run()
    assert again.gathering.is_done
    assert not again.asked


def test_a_second_donor_is_asked_for_a_piece_only_when_the_first_is_slow() -> None:
    play = Play(Script({A: 2e6, B: 2e6, C: 3e4}), pieces=6).run()
    assert play.gathering.is_done
    slow = [piece for donor, piece in play.asked if donor == C]
    assert play.came[slow[0]] != [C]
    twice = [piece for piece in range(6) if sum(play.asked[donor, piece] for donor in (A, B, C)) > 1]
    assert twice == slow
    assert (play.gathering.broke_off, play.gathering.asked_again) == (set(), 0)  # it was slow, but did not fail
    taken_over_at = SLOW * SIZE / 2e6 + SLOW_S
    assert taken_over_at + SIZE / 2e6 <= play.now <= taken_over_at + SIZE / 2e6 + 0.2


def test_to_who_has_given_nothing_yet_a_donor_is_slow_when_half_its_time_is_over() -> None:
    play = Play(Script({A: 100.0, B: 1e6}), pieces=1).run()
    assert play.gathering.is_done
    assert play.came == {0: [B]}
    patience_s = min(PATIENCE * SIZE / FIRST_RATE, PIECE_BOUNDS_S[1])
    assert patience_s / 2 <= play.now <= patience_s / 2 + 2.0


@pytest.mark.parametrize(
    "sizes", [[1], [PIECE_BYTES], [PIECE_BYTES + 4, 8], [3 * PIECE_BYTES, 12, 2 * PIECE_BYTES - 4]]
)
def test_pieces_cover_each_fragment_once_and_none_is_longer_than_allowed(sizes: list[int]) -> None:
    spans = cut(sizes)
    assert all(0 < span.size <= PIECE_BYTES for span in spans)
    for fragment, size in enumerate(sizes):
        mine = [span for span in spans if span.fragment == fragment]
        assert [span.start for span in mine] == [0, *(span.stop for span in mine[:-1])]
        assert mine[-1].stop == size


def test_who_never_sends_is_given_up_at_the_deadline() -> None:
    play = Play(Script({A: 0.0, B: 0.0, C: 0.0, D: 1e6, E: 1e6}), pieces=4).run()
    assert play.gathering.is_done
    assert play.now < PATIENCE * SIZE / FIRST_RATE + 10.0


@pytest.mark.parametrize("liar", [A, B, C])
def test_one_liar_of_three_gives_nothing_that_stays(liar: PeerId) -> None:
    play = Play(Script({A: 1e6, B: 1e6, C: 1e6}, odd=frozenset({liar}))).run()
    assert play.gathering.is_done
    assert liar not in play.gathering.here.values()
    assert play.gathering.dropped == {liar}
    assert not play.gathering.broke_off
    assert play.gathering.asked_again == sum(play.asked[liar, piece] for piece in range(12))


def test_two_that_lie_each_for_itself_are_found_out() -> None:
    play = Play(Script({A: 1e6, B: 1e6, C: 1e6, D: 1e6, E: 1e6}, odd=frozenset({A, C}))).run()
    assert play.gathering.is_done
    assert not {A, C} & set(play.gathering.here.values())


def test_a_donor_that_calls_all_others_odd_does_not_stop_them() -> None:
    play = Play(Script({A: 1e6, B: 1e6, C: 1e6}, odd=frozenset({B}))).run()
    assert play.gathering.dropped == {B}
    assert set(play.gathering.here.values()) == {A, C}


def test_of_two_that_differ_neither_is_believed() -> None:
    play = Play(Script({A: 1e6, B: 1e6}, odd=frozenset({B}))).run()
    assert play.gathering.is_stuck
    assert not play.gathering.is_done


def test_the_only_donor_of_all_is_believed() -> None:
    play = Play(Script({A: 1e6})).run()
    assert play.gathering.is_done


def test_what_is_here_is_not_asked_again_and_is_compared_all_the_same() -> None:
    first = Play(Script({A: 1e6, B: 1e6, C: 1e6})).run(until=2.5)
    have = first.gathering.here
    assert 3 <= len(have) < 12
    second = Play(Script({A: 1e6, B: 1e6, D: 1e6}), have=have).run()
    assert second.gathering.is_done
    assert not {piece for _, piece in second.asked} & set(have)
    stale = Play(Script({A: 1e6, B: 1e6, D: 1e6}, odd=frozenset({C})), have=have).run()
    assert stale.gathering.is_done
    assert C not in stale.gathering.here.values()  # C's earlier piece is far from the others' now


def test_answers_that_nobody_asked_for_change_nothing() -> None:
    gathering = DownloadPlan([SIZE] * 2, [A, B])
    gathering.act(0.0)
    assert gathering.fetched(PeerId("stranger"), 0, 1.0) == []
    assert gathering.fetched(B, 0, 1.0) == []  # its request was for piece 1
    assert gathering.compared(B, 0, 0.0, 1.0) == []
    assert gathering.here == {}
    gathering.fetched(A, 0, 1.0)
    gathering.compared(B, 0, float("nan"), 1.0)
    assert not gathering._pieces[0].confirmed


@pytest.mark.parametrize("order", ["abcdefg", "bcadefg", "badcefg", "debfcga"])
@pytest.mark.parametrize("pieces", [1, 2, 12])
def test_two_that_lie_together_among_seven_give_nothing_that_stays(order: str, pieces: int) -> None:
    """Check every order of donors, also with one adversarial donor giving and the other as the first to compare."""
    liars = frozenset((B, C))
    play = Play(Script({PeerId(name): 1e6 for name in order}, odd=liars, together=True), pieces).run()
    assert play.gathering.is_done
    assert not liars & set(play.gathering.here.values())
    assert play.gathering.dropped <= liars, "an honest one is blamed"


def test_where_all_agree_each_piece_is_compared_with_two_others_and_no_more() -> None:
    play = Play(Script(dict.fromkeys((A, B, C, D, E), 1000000.0)), 4).run()
    assert play.gathering.is_done
    assert play.gathering.was_compared
    assert sum(play.compared.values()) == 2 * 4


def test_a_swarm_of_two_compares_nothing_and_says_so() -> None:
    play = Play(Script({A: 1e6}), 4).run()
    assert play.gathering.is_done
    assert not play.gathering.was_compared


def test_whom_a_decision_drops_is_replaced_as_a_judge_at_once():
    """Check a dropped donor that was to compare another piece: the honest ones do it, and the pull is not stuck."""
    for seed in range(400):
        random = Random(seed)
        donors = random.sample([A, B, C, D], random.choice([3, 4]))
        gathering = DownloadPlan([100] * random.choice([2, 3, 4]), donors)
        asked = list(gathering.act(0.0))
        while not (gathering.is_done or gathering.is_stuck):
            action = asked.pop(random.randrange(len(asked)))
            if isinstance(action, Fetch):
                asked += gathering.fetched(action.donor, action.piece, 0.1)
            elif isinstance(action, Compare) and (giver := gathering.here.get(action.piece)) is not None:
                is_outlier = (action.donor == A) != (giver == A)
                asked += gathering.compared(action.donor, action.piece, 1.4 if is_outlier else 0.03, 0.1)
        for piece in gathering._pieces:
            judges = {*gathering._donors, *gathering._waiting} - {piece.giver} - piece.near - piece.far
            assert piece.confirmed or piece.giver is None or not judges, seed
