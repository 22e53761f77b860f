"""Throughput of one computer and of all peers, and by how much one shortens the run."""

from __future__ import annotations

from random import Random

import pytest

from peer.speed import DRIFT_WINDOW_S, THROUGHPUT_WINDOW_S, ExchangeDrift, Throughput, TimeLeft, time_left

STEP_S = 20.0
"""Seconds of an outer step of the slowest peer."""


def test_equal_peers_share_the_work():
    assert time_left(12_000, own=10, peers=4, drift=0) == TimeLeft(40, 300, 100)


def test_a_fast_peer_among_slow_ones_shortens_the_run_most():
    """Check speeds 40, 10, 10 and 10, as the fastest and a slow one see them."""
    assert time_left(7_000, own=40, peers=4, drift=-90) == TimeLeft(70, 100, 7_000 / 30 - 100)
    assert time_left(7_000, own=10, peers=4, drift=30) == TimeLeft(70, 100, 7_000 / 60 - 100)


def test_alone_nothing_is_shortened():
    """Check it also for the minutes in which the exchanges with peers that have left still count."""
    for drift in (0, 30):
        assert time_left(600, own=10, peers=1, drift=drift) == TimeLeft(10, 60, None)


def test_the_swarm_is_at_least_as_fast_as_this_computer():
    assert time_left(600, own=10, peers=2, drift=-50) == TimeLeft(10, 60, None)


def test_without_a_measured_step_nothing_is_known():
    assert time_left(600, own=0, peers=3, drift=0) is None


def test_after_the_end_no_time_is_left():
    assert time_left(0, own=10, peers=2, drift=0) == TimeLeft(20, 0, 0)


def test_drift_is_that_of_the_last_minutes():
    now = 0.0
    drift = ExchangeDrift(lambda: now)
    assert drift.tokens_per_s == 0
    total = 0.0
    for rate in (5.0, -3.0):
        for _ in range(2 * round(DRIFT_WINDOW_S)):
            now += 1.0
            total += rate
            drift.record(total)
        assert drift.tokens_per_s == pytest.approx(rate)
    assert len(drift._window.marks) < DRIFT_WINDOW_S / 4
    drift.rest()
    assert drift.tokens_per_s == 0


def test_the_first_exchange_does_not_decide():
    now = 0.0
    drift = ExchangeDrift(lambda: now)
    drift.record(0)
    now = 1.0
    drift.record(600)
    assert drift.tokens_per_s == pytest.approx(10)


@pytest.mark.parametrize("speeds", [(1.0,) * 8, (4.0, *[1.0] * 7), (20.0, *[1.0] * 7), (4.0, 1.0)])
def test_all_peers_see_the_swarms_throughput(speeds: tuple[float, ...]):
    """Check peers that exchange with a random one after each outer step, for half an hour."""
    random, peers = Random(1), range(len(speeds))
    now = 0.0
    drifts = [ExchangeDrift(lambda: now) for _ in peers]
    progress, moved, ends_at = [0.0 for _ in peers], [0.0 for _ in peers], [STEP_S / speed for speed in speeds]
    while now < 1800:
        peer = min(peers, key=ends_at.__getitem__)
        now = ends_at[peer]
        ends_at[peer] += STEP_S / speeds[peer] * random.uniform(0.9, 1.1)
        progress[peer] += STEP_S * len(speeds)
        other = random.choice([each for each in peers if each != peer])
        half = (progress[other] - progress[peer]) / 2
        for each, displacement in ((peer, half), (other, -half)):
            progress[each] += displacement
            moved[each] += displacement
            drifts[each].record(moved[each])
    for speed, drift in zip(speeds, drifts, strict=True):
        left = time_left(1.0, speed, len(speeds), drift.tokens_per_s)
        assert left is not None
        assert left.swarm_tokens_per_s == pytest.approx(sum(speeds), rel=0.25)


# --- one computer ---------------------------------------------------------------------------------------------------


class Training:
    """Inner steps of 100 tokens each with a manual clock."""

    def __init__(self) -> None:
        self.now, self.tokens = 0.0, 0
        self.pace = Throughput(lambda: self.now)

    def steps(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.now += seconds
            self.tokens += 100
            self.pace.inner_step_done(self.tokens)


@pytest.fixture
def training() -> Training:
    return Training()


def test_the_first_step_warms_up_and_is_not_timed(training: Training) -> None:
    assert training.pace.tokens_per_s == 0.0
    training.steps(1, 30.0)
    assert training.pace.tokens_per_s == 0.0
    training.steps(1, 0.5)
    assert training.pace.tokens_per_s == pytest.approx(200.0)


@pytest.mark.parametrize("step_s", [0.001, 0.3, 2.0, 45.0, 200.0])
def test_a_steady_pace_is_told_steadily_also_amid_a_step(training: Training, step_s: float) -> None:
    training.steps(round(2 * THROUGHPUT_WINDOW_S / step_s) + 3, step_s)
    for part in (0.0, 0.4, 0.9):
        end = training.now
        training.now += part * step_s
        assert training.pace.tokens_per_s == pytest.approx(100 / step_s)
        training.now = end


def test_what_was_an_hour_ago_counts_no_more(training: Training) -> None:
    training.steps(3600, 1.0)
    training.steps(round(THROUGHPUT_WINDOW_S / 4.0) + 1, 4.0)
    assert training.pace.tokens_per_s == pytest.approx(25.0)


def test_it_falls_where_the_trainer_hangs(training: Training) -> None:
    training.steps(100, 1.0)
    training.now += 9 * THROUGHPUT_WINDOW_S
    assert training.pace.tokens_per_s < 11.0


def test_who_rests_has_no_pace_and_what_it_slept_is_not_counted(training: Training) -> None:
    training.steps(100, 1.0)
    training.pace.rest()
    assert training.pace.tokens_per_s == 0.0
    training.now += 3600.0
    assert training.pace.tokens_per_s == 0.0
    training.pace.go_on(training.tokens)
    assert training.pace.tokens_per_s == 0.0
    training.steps(3, 2.0)
    assert training.pace.tokens_per_s == pytest.approx(50.0)


def test_who_rested_before_the_first_step_warms_up_all_the_same(training: Training) -> None:
    training.pace.rest()
    training.pace.go_on(0)
    training.steps(1, 30.0)
    assert training.pace.tokens_per_s == 0.0


def test_little_is_remembered_of_many_short_steps(training: Training) -> None:
    training.steps(200_000, 0.001)
    assert len(training.pace._window.marks) <= THROUGHPUT_WINDOW_S + 2
