"""Fair sharing of links: cases computed by hand, and properties for any traffic."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.transfers import Pipe, Transfers
from sim.world import World


class Lines:
    """Some hosts, and the arrival times."""

    def __init__(self, ups: list[float], downs: list[float]) -> None:
        self.world = World()
        self.transfers = Transfers(self.world)
        self.ups = [Pipe(each) for each in ups]
        self.downs = [Pipe(each) for each in downs]
        self.ends: dict[str, float] = {}

    def send(self, name: str, sender: int, receiver: int, size: float):
        return self.transfers.start(self.ups[sender], self.downs[receiver], size, self._arrived, name)

    def rates(self) -> dict[int, float]:
        return {each.serial: each.rate for pipe in self.pipes for each in pipe.transfers.values()}

    @property
    def pipes(self) -> list[Pipe]:
        return self.ups + self.downs

    def _arrived(self, name: str) -> None:
        self.ends[name] = self.world.now


def test_alone_the_narrower_end_decides():
    lines = Lines([10.0], [4.0, inf])
    lines.send("down", 0, 0, 40.0)
    lines.world.run()
    lines.send("up", 0, 1, 40.0)
    lines.world.run()
    assert lines.ends == pytest.approx({"down": 10.0, "up": 14.0})


def test_two_share_an_uplink_and_the_longer_one_speeds_up_when_the_other_ends():
    lines = Lines([10.0], [inf, inf])
    lines.send("short", 0, 0, 50.0)
    lines.send("long", 0, 1, 100.0)
    lines.world.run()
    assert lines.ends == pytest.approx({"short": 10.0, "long": 15.0})  # 5 each; then 10 for the 50 that are left


def test_what_one_bottleneck_leaves_free_another_may_use():
    """Check a case by hand: A-x and A-y share up 10; y takes at most 2; B-x shares down 12 with A-x.

    y gives A-y 2. Of A's 10 that leaves 8 for A-x; in x it meets B-x: 6 each. So A-x 6, B-x 6, A-y 2.
    """
    lines = Lines([10.0, 9.0], [12.0, 2.0])
    a_x = lines.send("A-x", 0, 0, 1e3)
    a_y = lines.send("A-y", 0, 1, 1e3)
    b_x = lines.send("B-x", 1, 0, 1e3)
    assert (a_x.rate, a_y.rate, b_x.rate) == pytest.approx((6.0, 2.0, 6.0))
    lines.transfers.stop(b_x)
    assert (a_x.rate, a_y.rate) == pytest.approx((8.0, 2.0))
    lines.transfers.resize(lines.downs[1], 100.0)
    assert (a_x.rate, a_y.rate) == pytest.approx((5.0, 5.0))


def test_a_sleeping_host_stops_what_passes_its_line_and_goes_on_where_it_was():
    lines = Lines([10.0], [inf, inf])
    lines.send("asleep", 0, 0, 100.0)
    lines.send("awake", 0, 1, 60.0)
    lines.world.run(until=2.0)
    lines.transfers.resize(lines.downs[0], 0.0)
    lines.world.run(until=5.0)
    lines.transfers.resize(lines.downs[0], inf)
    lines.world.run()
    # 10 + 10 by t=2; then 30 of the other alone; then 5 each: 20 left until t=9; then 10.
    assert lines.ends == pytest.approx({"awake": 9.0, "asleep": 16.0})


def test_stopping_tells_what_was_moved_and_only_once():
    lines = Lines([10.0], [inf])
    transfer = lines.send("cut", 0, 0, 100.0)
    lines.world.run(until=3.0)
    assert lines.transfers.stop(transfer) == pytest.approx(30.0)
    assert lines.transfers.stop(transfer) == pytest.approx(30.0)
    lines.world.run()
    assert lines.ends == {}
    assert not lines.rates()


def test_nothing_limits_unlimited_lines_and_trifles():
    lines = Lines([inf, 100.0], [inf])
    assert lines.send("unlimited", 0, 0, 1e12) is None
    assert lines.send("trifle", 1, 0, 1.9) is None
    assert lines.ends == {"unlimited": 0.0, "trifle": 0.0}
    assert lines.send("not a trifle", 1, 0, 2.1) is not None


capacities = st.sampled_from([1.0, 2.0, 3.0, 5.0, 20.0, inf])


@settings(max_examples=60)
@given(
    st.lists(capacities, min_size=2, max_size=6),
    st.lists(capacities, min_size=2, max_size=6),
    st.integers(0, 2**32),
)
def test_rates_are_max_min_fair_and_bytes_are_conserved(ups, downs, seed):
    """Check after every change: no link is overfull, and each transfer has a full link on which none is faster.

    In the end every transfer that was not stopped has arrived, and no link carried more than it can.
    """
    random, lines = Random(seed), Lines(ups, downs)
    carried = dict.fromkeys(range(len(lines.pipes)), 0.0)
    started, stopped = {}, set()
    for number in range(25):
        lines.world.run(until=lines.world.now + random.choice([0.0, 0.3, 2.0]))
        sender, receiver, size = random.randrange(len(ups)), random.randrange(len(downs)), random.uniform(1.0, 20.0)
        started[str(number)] = lines.send(str(number), sender, receiver, size)
        moved = size
        if started[str(number)] is not None and random.random() < 0.3:
            stopped.add(str(number))
            lines.world.run(until=lines.world.now + random.random())
            moved = lines.transfers.stop(started[str(number)])
            assert 0 <= moved <= size
        carried[sender] += moved
        carried[len(ups) + receiver] += moved
        check_fairness(lines)
    lines.world.run()
    assert set(started) - stopped <= set(lines.ends)
    assert all(not pipe.transfers and not pipe.limits for pipe in lines.pipes)
    for place, pipe in enumerate(lines.pipes):
        trifles = 25 * 0.02 * pipe.capacity
        assert carried[place] <= pipe.capacity * lines.world.now * (1 + 1e-9) + trifles


def check_fairness(lines: Lines) -> None:
    for pipe in lines.pipes:
        transfers = list(pipe.transfers.values())
        assert sum(each.rate for each in transfers) <= pipe.capacity * (1 + 1e-9)
        assert pipe.limits == sum(each.bottleneck is pipe for each in transfers)
        for each in transfers:
            full = each.bottleneck
            assert full in (each.up, each.down)
            assert sum(other.rate for other in full.transfers.values()) == pytest.approx(full.capacity)
            assert each.rate >= max(other.rate for other in full.transfers.values()) * (1 - 1e-6)
