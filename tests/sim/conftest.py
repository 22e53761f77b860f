"""Scenarios for tests: small ones, with fields that a test replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sim.scenario import Scenario
from sim.scenario_file import changed, parse

Make = Callable[..., Scenario]

BASIC: dict[str, Any] = {
    "run": {"seed": 1, "outer_steps": 8, "points": 10},
    "learner": {"kind": "bytes", "parameters": 1_000_000, "tokens_per_step": 1, "disagreement": 0.01},
    "outer": {
        "recipe": "swarm",
        "inner_steps": 10,
        "learning_rate": 0.7,
        "momentum": 0.5,
        "nesterov": True,
        "topology": "random",
        "partners": 1,
        "weights": "equal",
        "exchanges_per_step": 1,
        "fragments": 2,
        "fragments_per_exchange": 1,
    },
    "codec": {"name": "fp32", "block_size": 1024, "gradients": "fp32", "rank": 16},
    "swarm": {"catch_up_outer_steps": 4, "final_disagreement": 0.02, "final_gossip_s": 10.0},
    "peers": [{"name": "home", "count": 6, "step_s": 1.0, "step_jitter": 0.1, "up_mbit_s": 20.0, "down_mbit_s": 100.0}],
}


@pytest.fixture
def basic() -> dict[str, Any]:
    """Return the plain data of a valid scenario."""
    return changed(BASIC, ())


@pytest.fixture(scope="session")
def make() -> Make:
    """Return ``make("outer.inner_steps=5", groups=[...])``: the basic scenario with changes and more groups."""

    def make(*changes: str, groups: list[dict[str, Any]] | None = None) -> Scenario:
        data = changed(BASIC, changes)
        return parse({**data, "peers": [*data["peers"], *(groups or [])]})

    return make
