"""Computers of very different speeds that begin a run together: weights are unrelated before the slow ones have met the
fast one."""

from __future__ import annotations

import pytest
from table import Table

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm.rules import BEGINNER_STEPS, YOUNG_STEPS


def started(*names: str, seed: int = 0) -> Table:
    table = Table(*names, seed=seed)
    table.start()
    table.run(3.0)
    return table


def keep_apart(table: Table, peer: str) -> None:
    """Let the weights of this peer be unrelated to those of everybody who has not pulled."""

    def apart(me: str, partner: str) -> tuple[float, float]:
        other = partner if me == peer else me
        related = peer not in (me, partner) or table[other].core.counters.pulls > 0
        return (0.05 if related else 2.0), 10.0

    table.apart = apart


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("own_steps", [0, 1, 2, YOUNG_STEPS - 1])
def test_slow_computers_that_met_each_other_first_take_the_weights_of_a_fast_one(own_steps: int, seed: int):
    slow = ("slow 1", "slow 2")
    table = started(*slow, "fast", seed=seed)
    table.holds_back = lambda sender, receiver, what: "fast" in (sender, receiver)
    while not all(table[name].core.settled for name in slow):
        table.step(*slow, tokens=0.1)
        table.run(5.0)
        assert table.now < 100.0
    for name in slow:
        table[name].core.counters.outer_steps = own_steps
    keep_apart(table, "fast")
    for _ in range(2 * own_steps + 3 * BEGINNER_STEPS):
        table.step("fast", tokens=5.0)
    table.holds_back = lambda sender, receiver, what: False
    for _ in range(30):
        table.step("fast", tokens=1.0)
        table.run(1.0)
    assert [table[name].core.counters.pulls for name in ("fast", *slow)] == [0, 1, 1]
    assert sum(seat.progress for seat in table.seats.values()) == pytest.approx(table.trained, rel=0.02)
    assert all(table[name].core.settled for name in slow)
    exchanged = table["fast"].core.counters.exchanges_ok
    for _ in range(10):
        table.step("fast", tokens=1.0)
        table.run(1.0)
    assert table["fast"].core.counters.exchanges_ok >= exchanged + 5


@pytest.mark.parametrize("seed", range(5))
def test_one_peer_with_worthless_weights_takes_in_none_of_four_beginners(seed: int):
    honest = ("amber", "birch", "cedar", "dogwood")
    table = started(*honest, "liar", seed=seed)
    table.worthless = {PeerId("liar")}
    keep_apart(table, "liar")
    for _ in range(YOUNG_STEPS + 2):
        table.step(*honest)
        table["liar"].step += 20
        table.step("liar", tokens=40.0)
        table.run(1.0)
    assert any("nothing in common" in line for line in table.trace)
    assert not any("caught up liar" in line for line in table.trace)
    assert sum(table[name].core.counters.pulls for name in honest) <= 1  # honest weights, beside the liar's claim
    assert all(table[name].core.settled for name in honest)
    assert all(table[name].core.counters.exchanges_ok >= YOUNG_STEPS for name in honest)


def test_a_peer_that_returns_or_joined_late_is_never_left_behind():
    for progress in (0.0, 500.0):
        table = started("amber", "birch")
        for _ in range(20):
            table.step("amber", "birch", tokens=5.0)
            table.run(0.5)
        table.run(21.0)  # records are renewed
        cedar = table.seat("cedar", progress=progress)
        table.start("cedar")
        table.run(5.0)
        assert cedar.core.counters.pulls == (1 if progress == 0.0 else 0)
        assert not cedar.core._core.is_young


@pytest.mark.parametrize("seed", range(3))
def test_who_finds_the_weights_of_those_ahead_worse_is_in_step_as_before(seed: int):
    table = started("slow 1", "slow 2", "fast", seed=seed)
    table.worthless = {PeerId("fast")}
    keep_apart(table, "fast")
    while not all(table[name].core.settled for name in ("slow 1", "slow 2")):
        table.step("slow 1", "slow 2", tokens=0.1)
        table.run(5.0)
    for name in ("slow 1", "slow 2"):
        table[name].core.counters.outer_steps = 1
    for _ in range(30):
        table.step("fast")
        table.run(1.0)
    assert any("its weights do worse than ours" in line for line in table.trace)
    assert all(table[name].core.counters.pulls == 0 for name in ("slow 1", "slow 2"))
    assert all(table[name].core.settled for name in ("slow 1", "slow 2"))
    assert all(table[name].core.counters.offences == 0 for name in ("slow 1", "slow 2"))
    assert table["fast"].core.counters.donations == 2


def test_who_made_several_outer_steps_keeps_its_weights():
    table = started("amber", "birch")
    for _ in range(YOUNG_STEPS):
        table.step(tokens=1.0)
        table.run(1.0)
    keep_apart(table, "birch")
    for _ in range(40):
        table.step("birch")
        table.run(1.0)
    assert any("nothing in common" in line for line in table.trace)
    assert table["amber"].core.counters.pulls == 0
