"""The monotonic clock counts sleep, for which no test can wait; the wall clock does not follow false jumps."""

import sys
import time

import pytest

from p2ptrain.base.clock import JUMP_S, UNJUDGED_S, WallClock, steady


def test_it_goes_forward_in_seconds() -> None:
    began, there = time.monotonic(), steady()
    while time.monotonic() < began + 0.01:
        pass
    assert 0.009 <= steady() - there < 60  # two clocks, each rounded to a float of its own size


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="Linux alone has it")
def test_on_linux_it_is_the_clock_that_goes_on_in_suspend() -> None:
    before, there, after = time.clock_gettime(time.CLOCK_BOOTTIME), steady(), time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= there <= after, sys.platform


DAY = 86_400.0


class Machine:
    """Made-up clocks of a machine."""

    def __init__(self) -> None:
        self.true, self.off_s = 1e9, 0.0
        self.wall = WallClock(lambda: self.true + self.off_s, lambda: self.true - 5e8)

    @property
    def error_s(self) -> float:
        return round(self.wall() - self.true, 3)


def test_small_corrections_are_followed_at_once() -> None:
    machine = Machine()
    machine.off_s = JUMP_S / 2
    assert machine.error_s == JUMP_S / 2
    machine.off_s = -JUMP_S / 4
    assert machine.error_s == -JUMP_S / 4
    assert machine.wall.is_judged
    assert machine.wall.jump_s == 0.0


@pytest.mark.parametrize("by_s", [DAY, -DAY])
def test_a_jump_that_others_refute_is_not_followed_and_ends_without_a_trace(by_s: float) -> None:
    machine = Machine()
    machine.off_s = by_s
    assert machine.error_s == 0.0
    assert not machine.wall.is_judged
    assert machine.wall.jump_s == pytest.approx(by_s)
    assert not machine.wall.judge(0.5)
    assert machine.wall.is_judged
    machine.true += 30 * DAY
    assert machine.error_s == 0.0
    machine.off_s = 0.2
    assert machine.error_s == 0.2
    assert machine.wall.jump_s == 0.0


@pytest.mark.parametrize("by_s", [DAY, -DAY])
def test_a_correction_that_others_confirm_is_followed(by_s: float) -> None:
    machine = Machine()  # whose clock was wrong from the start
    machine.off_s = by_s
    assert machine.wall.judge(-by_s)
    assert machine.error_s == by_s
    assert machine.wall.is_judged


def test_others_decide_between_two_times_and_cannot_set_the_clock() -> None:
    machine = Machine()
    machine.off_s = DAY
    assert not machine.wall.judge(1e9)
    assert machine.error_s == 0.0
    assert machine.wall.judge(-1e9)
    assert machine.error_s == DAY
    assert not machine.wall.judge(1e9)  # there is no jump any more
    assert machine.error_s == DAY


def test_without_others_a_jump_is_followed_after_a_while_unless_it_ends() -> None:
    machine = Machine()
    machine.off_s = DAY
    machine.wall()
    machine.true += UNJUDGED_S - 1
    assert machine.error_s == 0.0
    machine.off_s = 0.0
    machine.wall()
    machine.true += UNJUDGED_S
    assert machine.error_s == 0.0
    machine.off_s = -DAY
    machine.wall()
    machine.true += UNJUDGED_S + 1
    assert machine.error_s == -DAY


def test_a_second_jump_after_a_refuted_one_is_judged_again() -> None:
    machine = Machine()
    machine.off_s = DAY
    assert not machine.wall.judge(0.0)
    machine.off_s = -DAY
    assert not machine.wall.is_judged
    assert machine.error_s == 0.0


def test_sleep_is_no_jump() -> None:
    machine = Machine()  # both clocks count it
    machine.true += 3600.0
    assert machine.error_s == 0.0
    assert machine.wall.is_judged
