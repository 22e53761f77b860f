"""Peers that enter late, return after a cut, or part by slow lines: the run keeps its budget of tokens."""

from __future__ import annotations

from typing import Any

import pytest

from sim.scenario import Scenario
from sim.simulate import begin
from sim.simulation import Simulation

STEP_S, TOKENS_PER_STEP, INNER_STEPS = 0.06, 256, 20
OUTER_STEP_S = STEP_S * INNER_STEPS
OUTER = {
    "recipe": "swarm",
    "topology": "random",
    "partners": 1,
    "weights": "equal",
    "inner_steps": INNER_STEPS,
    "learning_rate": 0.7,
    "momentum": 0.5,
    "nesterov": True,
    "exchanges_per_step": 1,
    "fragments": 1,
    "fragments_per_exchange": 1,
}


def group(number: int, slowness: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"name": f"group-{number}", "count": 1, "step_s": STEP_S * slowness, "step_jitter": 0.2, **more}


def simulated(tokens: int, peers: list[dict[str, Any]], parameters: int = 20_000) -> Simulation:
    data = {
        "run": {"seed": 0, "tokens": tokens},
        "learner": {
            "kind": "bytes",
            "parameters": parameters,
            "tokens_per_step": TOKENS_PER_STEP,
            "disagreement": 0.01,
        },
        "outer": OUTER,
        "codec": {"name": "int8", "block_size": 1024, "gradients": "int8", "rank": 16},
        "swarm": {"catch_up_outer_steps": 20, "final_disagreement": 0.02, "final_gossip_s": 60.0},
        "peers": peers,
    }
    simulation = begin(Scenario.model_validate(data))
    assert isinstance(simulation, Simulation)
    simulation.run()
    assert simulation.world.stopped, "all peers came to the run's end"
    return simulation


def over_budget(simulation: Simulation) -> float:
    members = simulation.population.members
    return sum(member.peer.learner.tokens for member in members) / simulation.scenario.run_tokens


@pytest.mark.parametrize("late_s", [0, 3, 7, 10, 15, 25])
def test_late_starters_keep_the_budget(late_s: int):
    """Check two peers that come before the first one's presence record says how far it is, and after."""
    peers = [group(1), group(2, arrives_at_s=late_s), group(3, arrives_at_s=2 * late_s)]
    assert over_budget(simulated(1_100_000, peers)) == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("slownesses", [(1, 20), (1, 4), (1, 5, 20, 20)])
def test_uneven_founders_keep_the_budget(slownesses: tuple[int, ...]):
    peers = [group(number, slowness) for number, slowness in enumerate(slownesses)]
    assert over_budget(simulated(1_500_000, peers)) == pytest.approx(1.0, abs=0.02)


def test_exchanges_that_outlast_many_outer_steps_do_not_part_two_pairs():
    """Check computers of speeds 1, 1, 4 and 20 whose exchanges take as long as twenty outer steps of the fastest."""
    parameters, slownesses = 1_000_000, (20, 20, 5, 1)
    mbit_s = parameters * 8 / 1e6 / (20 * OUTER_STEP_S)
    lines = {"up_mbit_s": mbit_s, "down_mbit_s": mbit_s}
    peers = [group(number, slowness, **lines) for number, slowness in enumerate(slownesses)]
    speed = sum(1 / slowness for slowness in slownesses) * TOKENS_PER_STEP / STEP_S
    tokens = int(speed * OUTER_STEP_S * 1200)
    simulation = simulated(tokens, peers, parameters)
    assert over_budget(simulation) == pytest.approx(1.0, abs=0.08)
    assert simulation.world.now < 1.6 * tokens / speed
