"""The monotonic clock is the system's clock that counts sleep; no test can wait for a sleep."""

import sys
import time

import pytest

from p2ptrain.base.clock import steady


def test_it_goes_forward_in_seconds() -> None:
    began, there = time.monotonic(), steady()
    while time.monotonic() < began + 0.01:
        pass
    assert 0.009 <= steady() - there < 60  # two clocks, each rounded to a float of its own size


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="Linux alone has it")
def test_on_linux_it_is_the_clock_that_goes_on_in_suspend() -> None:
    before, there, after = time.clock_gettime(time.CLOCK_BOOTTIME), steady(), time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= there <= after, sys.platform
