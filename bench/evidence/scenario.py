"""From a cell to the scenario that the simulator takes. The one place that knows the scenario's layout.

What a cell leaves open is the same in all cells and stands here: the small transformer's batch, the seconds of a step,
the latency of a line.
"""

from __future__ import annotations

import math
from typing import Any

from bench.evidence.cells import Cell, Choice, Setting

PARAMETERS = 123_000
"""Of the small transformer, to turn ``exchange_steps`` into Mbit/s. Rounded: it sets a pace, it counts no byte."""

SEQUENCE_LENGTH = 64
SEQUENCES_PER_STEP = 2
TOKENS_PER_STEP = SEQUENCE_LENGTH * SEQUENCES_PER_STEP
"""128 tokens of one peer's inner step: 8 peers and 3,200 steps see 3.3M tokens, which is a minute on one core."""

STEP_S = 1.0
"""Simulated seconds of an inner step; only ratios to it matter."""

LATENCY_S = 0.05
"""One way. A guess at what lies between two homes on one continent."""

NO_EXCHANGES = {"local"}


def scenario(cell: Cell, choice: Choice) -> dict[str, Any]:
    """The scenario of a cell, with the numbers that the tuning chose for it."""
    setting = cell.setting
    outer = {
        "recipe": choice.recipe,
        "inner_steps": setting.inner_steps,
        "learning_rate": choice.learning_rate,
        "momentum": choice.momentum,
        "nesterov": True,
        **cell.contender.outer,
    }
    return {
        "run": {
            "seed": cell.seed,
            "tokens_per_peer": setting.steps * TOKENS_PER_STEP,
            "split": cell.split,
            "failed_exchanges": setting.failures,
        },
        "learner": _learner(setting),
        "outer": outer,
        "codec": dict(cell.contender.codec),
        "peers": _peers(setting),
    }


def total_tokens(setting: Setting) -> int:
    """Tokens that all peers see together."""
    return setting.peers * setting.steps * TOKENS_PER_STEP


def megabit_per_s(exchange_steps: float) -> float:
    """The line on which all parameters in fp32 take this many inner steps of time."""
    return PARAMETERS * 32 / (exchange_steps * STEP_S) / 1e6


def _learner(setting: Setting) -> dict[str, Any]:
    if setting.learner != "lm":
        return {"kind": setting.learner}
    return {
        "kind": "lm",
        "data": setting.data,
        "sequence_length": SEQUENCE_LENGTH,
        "sequences_per_step": SEQUENCES_PER_STEP,
    }


def _peers(setting: Setting) -> list[dict[str, Any]]:
    """Groups of like peers. The odd one out, slow line or fast computer, is a group of one and comes first."""
    line = megabit_per_s(setting.exchange_steps)
    usual: dict[str, Any] = {
        "count": setting.peers,
        "step_s": STEP_S,
        "up_mbit_s": line,
        "down_mbit_s": line,
        "latency_s": LATENCY_S,
    }
    odd: dict[str, Any] = {}
    if setting.straggler != 1.0:
        odd = {"up_mbit_s": line * setting.straggler, "down_mbit_s": line * setting.straggler}
    if setting.speed_ratio != 1.0:
        odd["step_s"] = STEP_S / setting.speed_ratio
    groups = [{**usual, "count": 1, **odd}, {**usual, "count": setting.peers - 1}] if odd else [usual]
    if setting.comings_and_goings:
        groups = _moving(groups, setting)
    return groups


def _moving(groups: list[dict[str, Any]], setting: Setting) -> list[dict[str, Any]]:
    """A quarter of the peers leaves at half time; as many others come when a third has passed."""
    quarter = math.ceil(setting.peers / 4)
    whole_s = setting.steps * STEP_S
    *first, last = groups
    leaving = {**last, "count": quarter, "leaves_at_s": whole_s / 2}
    coming = {**last, "count": quarter, "arrives_at_s": whole_s / 3}
    return [*first, {**last, "count": last["count"] - quarter}, leaving, coming]
