"""Throughput in tokens per second, over the last minute."""

from __future__ import annotations

import pytest

from peer.throughput import WINDOW_S, Throughput


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
    training.steps(round(2 * WINDOW_S / step_s) + 3, step_s)
    for part in (0.0, 0.4, 0.9):
        end = training.now
        training.now += part * step_s
        assert training.pace.tokens_per_s == pytest.approx(100 / step_s)
        training.now = end


def test_what_was_an_hour_ago_counts_no_more(training: Training) -> None:
    training.steps(3600, 1.0)
    training.steps(round(WINDOW_S / 4.0) + 1, 4.0)
    assert training.pace.tokens_per_s == pytest.approx(25.0)


def test_it_falls_where_the_trainer_hangs(training: Training) -> None:
    training.steps(100, 1.0)
    training.now += 9 * WINDOW_S
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
    assert len(training.pace._marks) <= WINDOW_S + 2
