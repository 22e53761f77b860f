"""Means, standard errors, and figures derived from several cells."""

from __future__ import annotations

from typing import Any

import pytest

from bench.evidence.cells import TOKENS
from bench.evidence.experiments import EXPERIMENTS
from bench.evidence.experiments.r2_speedup import tokens_to
from bench.evidence.summary import Estimate, better, estimate, paired, summaries

R1 = EXPERIMENTS["R1"]


def entry(contender: str, seed: int, **headline: float) -> dict[str, Any]:
    return {"contender": contender, "setting": {}, "seed": seed, "headline": headline}


def test_mean_and_standard_error_by_hand() -> None:
    found = estimate({1: 1.0, 2: 2.0, 3: 3.0})
    assert (found.mean, found.by_seed) == (2.0, {1: 1.0, 2: 2.0, 3: 3.0})
    assert found.standard_error == pytest.approx(1 / 3**0.5)
    assert estimate({4: 1.0}) == Estimate(1.0, None)
    assert estimate({None: 1.0}) == Estimate(1.0, 0.0)


def test_better_is_by_more_than_two_standard_errors_of_the_difference() -> None:
    assert better(Estimate(1.0, 0.03), Estimate(1.11, 0.04), "low")  # .11 > 2 x .05
    assert not better(Estimate(1.0, 0.03), Estimate(1.09, 0.04), "low")
    assert not better(Estimate(1.11, 0.03), Estimate(1.0, 0.04), "low")
    assert better(Estimate(1.11, 0.03), Estimate(1.0, 0.04), "high")
    assert not better(Estimate(1.0, None), Estimate(9.0, 0.0), "low"), "one run proves nothing"
    assert better(Estimate(1.0, 0.0), Estimate(1.1, 0.0), "low")
    assert not better(Estimate(1.0, 0.0), Estimate(1.0, 0.0), "low")


def test_ratios_are_paired_by_seed() -> None:
    lucky, other = estimate({1: 1.0, 2: 2.0, 3: 4.0}), estimate({1: 2.0, 2: 4.0, 4: 1.0})
    assert paired(lucky, other) == Estimate(0.5, 0.0)
    assert paired(lucky, estimate({3: 1.0, 4: 1.0})) is None, "one seed in common is not a pair of seeds"
    assert paired(lucky, estimate({None: 1.0})) is None


def test_where_a_run_diverged_there_is_no_loss() -> None:
    entries = [
        entry("swarm", 1, loss=1.5),
        entry("swarm", 2, diverged=1.0),
        entry("swarm", 4, loss=911.0, averaged_loss=5.0, disagreement=0.5, simulated_s=7.0),
        {**entry("swarm", 3), "failure": "it broke"},
        {**entry("noloco", 1), "failure": "it broke"},
    ]
    swarm, noloco = summaries(R1, entries)
    assert (swarm.contender, swarm.failed, swarm.diverged, swarm.runs) == ("swarm", 1, 2, 4)
    assert set(swarm.figures) == {"simulated_s"}, "a mean of the survivors would speak for the others"
    assert (noloco.contender, noloco.failed, noloco.figures) == ("noloco", 1, {})


def test_the_straggler_table_compares_times_to_a_loss_that_all_reached() -> None:
    derive = EXPERIMENTS["R3"].derive
    made = derive(
        [
            entry("diloco", 1, **{"seconds_to:2.0": 50.0, "seconds_to:1.8": 90.0}),
            entry("swarm", 1, **{"seconds_to:2.0": 20.0, "seconds_to:1.8": 40.0, "seconds_to:1.7": 60.0}),
        ]
    )
    assert [each["headline"]["seconds_to_target"] for each in made] == [90.0, 40.0]


def test_uneven_computers_are_compared_with_themselves_alone() -> None:
    derive = EXPERIMENTS["R9"].derive
    alone = entry("local", 1, **{"seconds_to:2.5": 400.0, "seconds_to:2.0": 1_000.0, "seconds_to:1.5": 4_000.0})
    even = entry("swarm-2", 1, loss=2.0)
    uneven = entry(
        "swarm-2",
        1,
        loss=2.1,
        **{"fast_seconds_to:2.5": 50.0, "fast_seconds_to:2.0": 275.0, "slow_seconds_to:2.0": 300.0},
        **{"seconds_to:2.0": 290.0},
    )
    uneven["setting"] = {"speeds": [1.0] * 7 + [4.0]}
    found = derive([alone, even, uneven, {**uneven, "seed": 2}])
    mine = found[2]["headline"]
    assert mine["fast:2.5"] == pytest.approx(0.5)
    assert mine["fast_worst"] == mine["fast:2.0"] == pytest.approx(1.1), "alone it takes 250 s"
    assert (mine["slow_worst"], mine["slow_never"], mine["fast_never"]) == (pytest.approx(0.3), 2, 1)
    assert mine["swarm:2.0"] == pytest.approx(1.16)
    assert mine["over_even"] == pytest.approx(1.05)
    assert "fast_worst" not in found[3]["headline"], "nobody trained alone with this seed"


def test_the_budget_for_a_loss_lies_between_those_that_end_above_and_below() -> None:
    runs = [(400, 1.4), (100, 1.8), (200, 1.6)]
    assert tokens_to(1.6, runs) == pytest.approx(200)
    assert tokens_to(1.5, runs) == pytest.approx(200 * 2**0.5)
    assert tokens_to(1.9, runs) == 100
    assert tokens_to(1.3, runs) is None


def test_the_speed_up_counts_the_tokens_that_more_peers_need() -> None:
    def run(contender: str, peers: int, budget: int, loss: float, seed: int = 1) -> dict[str, Any]:
        setting = {"peers": peers, **({"tokens": budget * TOKENS} if budget > 1 else {})}
        return {**entry(contender, seed, loss=loss), "setting": setting}

    made = EXPERIMENTS["R2"].derive(
        [
            run("local", 1, 1, 1.6),
            run("swarm-2 modular4", 2, 1, 1.59),
            run("swarm-2 modular4", 16, 1, 1.8),
            run("swarm-2 modular4", 16, 2, 1.6),
            run("diloco", 16, 1, 1.8),
            run("diloco", 16, 2, 1.7),
            run("swarm-2 modular4", 16, 1, 1.5, seed=2),
        ]
    )
    sooner = [each["headline"].get("sooner") for each in made]
    assert sooner == [None, 2.0, pytest.approx(8.0), None, None, None, None]
    assert made[2]["headline"]["sooner_home"] == pytest.approx(8.0, rel=0.02)
