"""Scenario for tests to change: three peers of the smallest model, as plain data."""

from __future__ import annotations

from typing import Any

import pytest

TINY: dict[str, Any] = {
    "run": {"seed": 1, "tokens": 1_000_000_000, "seconds": 30},
    "learner": {
        "kind": "lm",
        "hidden_size": 32,
        "intermediate_size": 64,
        "layers": 1,
        "sequence_length": 32,
        "sequences_per_step": 8,
        "schedule": "constant",
        "warmup_fraction": 0.00001,
    },
    "outer": {
        "recipe": "swarm",
        "topology": "random",
        "partners": 1,
        "weights": "equal",
        "inner_steps": 20,
        "learning_rate": 0.7,
        "momentum": 0.5,
        "nesterov": True,
        "exchanges_per_step": 1,
        "fragments": 1,
        "fragments_per_exchange": 1,
    },
    "codec": {"name": "int8", "block_size": 1024, "gradients": "int8", "rank": 16},
    "peers": [{"name": "home", "count": 2, "step_s": 0.01}, {"name": "office", "count": 1, "step_s": 0.01}],
}


@pytest.fixture
def tiny() -> dict[str, Any]:
    """Return a copy that a test may change."""
    return {**TINY, "run": dict(TINY["run"]), "peers": [dict(group) for group in TINY["peers"]]}
