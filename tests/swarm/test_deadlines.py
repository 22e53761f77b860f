"""Deadlines for partners."""

from __future__ import annotations

import pytest

from p2ptrain.swarm.deadlines import (
    FIRST_RATE,
    PAYLOAD_BOUNDS_S,
    REMEMBERED,
    REPLY_BOUNDS_S,
    SHARING,
    TOLERANCE,
    Deadlines,
)

MEGABYTE = 1_000_000


@pytest.fixture
def deadlines() -> Deadlines:
    return Deadlines()


def test_before_anything_is_measured_the_slowest_line_we_care_about_counts(deadlines: Deadlines) -> None:
    assert deadlines.payload_s(10 * MEGABYTE) == 10 * MEGABYTE / FIRST_RATE
    assert deadlines.typical_payload_s(MEGABYTE) is None


def test_a_line_alone_to_ourselves_says_nothing_of_a_shared_one(deadlines: Deadlines) -> None:
    """Check a few equal samples without a spread: the next exchange may share the connection with three others."""
    for _ in range(3):
        deadlines.transferred(10 * MEGABYTE, 10.0)
    assert deadlines.payload_s(10 * MEGABYTE) == SHARING * 10.0
    assert deadlines.typical_payload_s(10 * MEGABYTE) == 10.0


def test_a_wide_spread_gives_more_time_than_sharing_would(deadlines: Deadlines) -> None:
    for seconds in (10.0, 20.0, 30.0):
        deadlines.transferred(10 * MEGABYTE, seconds)
    assert deadlines.payload_s(10 * MEGABYTE) == pytest.approx(20.0 + 8 * 10.0)


def test_the_median_forgets(deadlines: Deadlines) -> None:
    for _ in range(REMEMBERED):
        deadlines.transferred(MEGABYTE, 50.0)
    for _ in range(REMEMBERED):
        deadlines.transferred(MEGABYTE, 2.0)
    assert deadlines.typical_payload_s(MEGABYTE) == 2.0


def test_missed_deadlines_double_patience_until_something_completes(deadlines: Deadlines) -> None:
    deadlines.transferred(MEGABYTE, 3.0)
    for times in (1, 2, 4, 8, 16, 16):
        assert deadlines.payload_s(MEGABYTE) == pytest.approx(times * SHARING * 3.0)
        deadlines.missed()
    deadlines.transferred(MEGABYTE, 3.0)
    assert deadlines.payload_s(MEGABYTE) == SHARING * 3.0


def test_everything_is_within_bounds(deadlines: Deadlines) -> None:
    deadlines.transferred(MEGABYTE, 1e-6)
    assert deadlines.payload_s(MEGABYTE) == PAYLOAD_BOUNDS_S[0]
    deadlines.replied(1e-6)
    assert deadlines.reply_s() == REPLY_BOUNDS_S[0]
    deadlines.replied(1e6)
    deadlines.replied(1e6)
    assert deadlines.reply_s() == REPLY_BOUNDS_S[1]


def test_the_more_patient_side_decides(deadlines: Deadlines) -> None:
    """Check that a peer with a fast connection waits for a partner with a slow one, within general bounds."""
    deadlines.transferred(10 * MEGABYTE, 10.0)
    own = deadlines.seconds_per_byte()
    assert own * 10 * MEGABYTE == SHARING * 10.0
    assert deadlines.payload_s(10 * MEGABYTE, own / 2) == SHARING * 10.0
    assert deadlines.payload_s(10 * MEGABYTE, 3 * own) == pytest.approx(3 * SHARING * 10.0)


def test_nobody_says_for_how_long_it_may_hold_us(deadlines: Deadlines) -> None:
    """Check the limit on a partner's time: a shared slow connection, or four times our own patience."""
    shared_s = SHARING * 10 * MEGABYTE / FIRST_RATE
    deadlines.transferred(10 * MEGABYTE, 10.0)
    assert deadlines.payload_s(10 * MEGABYTE, 1e9) == pytest.approx(shared_s)
    for _ in range(REMEMBERED):
        deadlines.transferred(10 * MEGABYTE, 40.0)
    assert deadlines.payload_s(10 * MEGABYTE, 1e9) == pytest.approx(TOLERANCE * SHARING * 40.0)


def test_what_took_too_long_is_beyond_a_shared_line_and_beyond_a_second(deadlines: Deadlines) -> None:
    # Nothing is measured yet.
    assert deadlines.too_long_s(10 * MEGABYTE, 500.0) == pytest.approx(500.0 - SHARING * 80.0)
    deadlines.transferred(10 * MEGABYTE, 1.0)
    assert deadlines.too_long_s(10 * MEGABYTE, 4.0) == 0.0
    assert deadlines.too_long_s(10 * MEGABYTE, 6.0) == pytest.approx(2.0)
    assert deadlines.too_long_s(1000, 0.9) == 0.0
    assert deadlines.too_long_s(1000, 1.5) == pytest.approx(0.5)
