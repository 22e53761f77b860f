"""Throughput of all peers, the time to the run's end, and by how much one computer shortens it."""

from __future__ import annotations

from random import Random

import pytest

from peer.time_left import WINDOW_S, ExchangeDrift, TimeLeft, time_left

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
        for _ in range(2 * round(WINDOW_S)):
            now += 1.0
            total += rate
            drift.record(total)
        assert drift.tokens_per_s == pytest.approx(rate)
    assert len(drift._marks) < WINDOW_S / 4
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
