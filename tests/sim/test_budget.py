"""Tokens of all peers at the run's end, over the budget."""

from __future__ import annotations

from typing import Any

import pytest

from sim.scenario import Scenario
from sim.simulate import begin
from sim.simulation import Simulation

STEPS = 100
"""Outer steps of each peer, if all are equal; the last one ends up to 1 % beyond the budget."""

OUTER = {
    "recipe": "swarm",
    "inner_steps": 10,
    "learning_rate": 0.4,
    "momentum": 0.8,
    "nesterov": True,
    "topology": "random",
    "partners": 1,
    "weights": "equal",
    "exchanges_per_step": 2,
    "fragments": 1,
    "fragments_per_exchange": 1,
}


def group(count: int, step_s: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"count": count, "step_s": step_s, "step_jitter": 0.1, **more}


def simulated(*groups: dict[str, Any], **run: Any) -> Simulation:
    data = {
        "run": {"outer_steps": STEPS, "seed": 1, **run},
        "learner": {"kind": "bytes", "parameters": 100_000},
        "outer": OUTER,
        "codec": {"name": "modular4", "block_size": 1024, "gradients": "int8", "rank": 16},
        "peers": list(groups),
    }
    simulation = begin(Scenario.model_validate(data))
    assert isinstance(simulation, Simulation)
    simulation.run()
    assert simulation.world.stopped, "all peers came to the run's end"
    return simulation


def trained_over_budget(*groups: dict[str, Any], **run: Any) -> float:
    simulation = simulated(*groups, **run)
    trained = sum(member.peer.learner.tokens for member in simulation.population.members)
    return trained / simulation.scenario.run_tokens


@pytest.mark.parametrize(
    ("peers", "seed"),
    [
        *((peers, seed) for peers in (2, 4) for seed in range(3)),
        (16, 0),
        *(pytest.param(16, seed, marks=pytest.mark.lab) for seed in (1, 2)),
    ],
)
def test_all_tokens_together_are_the_budget(peers: int, seed: int):
    assert trained_over_budget(group(peers), seed=seed) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("ratio", [4, 20])
def test_a_fast_peer_among_slow_ones_counts_with_all_its_tokens(ratio: int):
    assert trained_over_budget(group(1, 1.0 / ratio), group(7)) == pytest.approx(1.0, abs=0.02)


def test_peers_of_four_speeds_and_lost_exchanges():
    groups = [group(2, step_s) for step_s in (0.05, 0.25, 1.0, 2.0)]
    assert trained_over_budget(*groups, failed_exchanges=0.3) == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("leaves", ["cleanly", "killed"])
def test_a_third_of_the_peers_comes_and_goes(leaves: str):
    """Check mean stays of a quarter of the run; the record of a killed peer outlives it by up to 75 s."""
    coming = group(5, stays_s=300.0, returns_after_s=30.0, leaves=leaves)
    assert trained_over_budget(group(11), coming) == pytest.approx(1.0, abs=0.05)


def test_a_pause_of_half_the_peers():
    """Check peers that leave, and come back without weights."""
    pausing = group(4, leaves_at_s=300.0, returns_after_s=200.0)
    assert trained_over_budget(group(4), pausing) == pytest.approx(1.0, abs=0.03)


def test_more_peers_end_the_run_sooner():
    budget = {"outer_steps": None, "tokens": 4 * STEPS * 10}
    alone = simulated(group(4), **budget).world.now
    joined = simulated(group(4), group(12, arrives_at_s=100.0), **budget).world.now
    assert joined < 0.45 * alone, "a tenth is over when three times as many come"


@pytest.mark.parametrize("seed", range(3))
def test_slow_lines_among_uneven_computers(seed: int):
    """Check exchanges that last as long as eight outer steps of the fastest and two of the middle one."""
    lines = {"up_mbit_s": 0.5, "down_mbit_s": 0.5}
    groups = [group(2, 0.2, **lines), group(1, 0.05), group(1, 0.01)]
    assert trained_over_budget(*groups, seed=seed, outer_steps=400) == pytest.approx(1.0, abs=0.05)
