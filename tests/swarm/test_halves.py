"""The total of tokens in a swarm that is cut in two for a while."""

from __future__ import annotations

from statistics import mean

import pytest
from run_rules import run_rules
from table import Table

STEPS = 100
TOKENS = 10.0


def estimate_over_truth(cut_from: int, cut_to: int) -> float:
    west, east = ([f"{side} {number}" for number in range(4)] for side in ("west", "east"))
    names = (*west, *east)
    table = Table(*names, rules=run_rules(run_tokens=10_000.0, exchanges_per_step=2))
    table.start()
    table.run(3.0)
    for step in range(STEPS):
        is_cut = cut_from <= step < cut_to
        table.holds_back = lambda one, other, what, cut=is_cut: cut and one.split()[0] != other.split()[0]
        table.step(tokens=TOKENS)
        table.run(5.0)
    return mean(table[name].progress for name in names) / (STEPS * TOKENS * len(names))


def test_a_swarm_that_stays_together_counts_all_tokens():
    assert estimate_over_truth(0, 0) == pytest.approx(1.0, abs=0.01)


def test_halves_that_meet_again_count_the_mean_of_what_each_trained_apart():
    """Check two equal halves, apart for a tenth of the run: nobody can tell a lost half from one that has left."""
    assert 0.95 <= estimate_over_truth(40, 50) < 0.99
