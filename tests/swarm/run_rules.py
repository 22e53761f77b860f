"""Rules of a small run, for every test that needs a protocol core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from p2ptrain.base.ids import RunId
from p2ptrain.swarm import SwarmRules

RUN = RunId("ab" * 32)


def run_rules(fragment_bytes: Sequence[int] = (1000,), **changes: Any) -> SwarmRules:
    """Return rules in which all fragments are free, and each peer initiates one exchange per outer step."""
    values: dict[str, Any] = {
        "run": RUN,
        "weights_bytes": 4000,
        "run_tokens": 1000.0,
        "tokens_per_outer_step": 10.0,
        "exchanges_per_step": 1,
        "due_in_phase": False,
        "fragments_per_exchange": 1,
        "streams": 1,
        "free": tuple(range(len(fragment_bytes))),
        "beside": (),
        "between": (),
        "topology": "random",
        "partners": 1,
        "work_weights": False,
        "begins_at_zero": False,
        "catch_up_outer_steps": 8.0,
        "final_disagreement": 0.005,
        "final_gossip_s": 20.0,
    }
    return SwarmRules(fragment_bytes=tuple(fragment_bytes), **(values | changes))
