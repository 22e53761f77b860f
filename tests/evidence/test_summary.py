"""Means, standard errors, and figures derived from several cells."""

from __future__ import annotations

from typing import Any

import pytest

from bench.evidence.experiments import EXPERIMENTS
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
    assert paired(lucky, estimate({3: 1.0, 4: 1.0})) is None, "one seed in common is no pair of seeds"
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
    plain = {**entry("swarm", 1, loss=911.0, disagreement=0.5), "setting": {"learner": "quadratic"}}
    assert set(summaries(R1, [plain])[0].figures) == {"loss", "disagreement"}, "its loss is no text's"
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


def test_the_fast_peer_is_compared_with_itself_alone() -> None:
    derive = EXPERIMENTS["R9"].derive
    made = derive(
        [
            entry(
                "local", 1, **{"fast_seconds_to:2.0": 10.0, "fast_seconds_to:1.9": 20.0, "fast_seconds_to:1.8": 40.0}
            ),
            entry("swarm", 1, **{"fast_seconds_to:2.0": 12.0, "fast_seconds_to:1.9": 18.0}),
            entry("swarm", 2, **{"fast_seconds_to:2.0": 1.0}),
        ]
    )
    assert made[1]["headline"]["fast_delay"] == pytest.approx(1.2)
    assert made[1]["headline"]["fast_never"] == 1
    assert "fast_delay" not in made[2]["headline"], "nobody trained alone with this seed"
