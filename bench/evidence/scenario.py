"""Conversion of a cell to a scenario of the simulator, with the constants that are the same in all cells."""

from __future__ import annotations

import math
from typing import Any

from bench.evidence.cells import Cell, CellSetting, Choice
from p2ptrain.recipes import RECIPES

PARAMETERS = {"lm": 123_000, "quadratic": 16_384, "bytes": 135_000_000}
"""Model sizes for converting ``exchange_steps`` to Mbit/s; the transformer's is rounded."""

HOME_MBIT_S = (20.0, 100.0)
"""Upload and download of peers whose learner counts bytes only."""

SEQUENCE_LENGTH = 64
SEQUENCES_PER_STEP = 2
TOKENS_PER_STEP = SEQUENCE_LENGTH * SEQUENCES_PER_STEP
"""Tokens of one peer's inner step: 8 peers train on 3.3M tokens in 3,200 steps."""

STEP_S = 1.0
"""Simulated seconds of an inner step. Only ratios to it matter."""

EVERY_STEP_S = 10.0
"""Seconds of a step at H = 1, where time is not judged. With steps of 1 s, a handshake of .3 s would reduce the mixing
of asynchronous methods more than at any other H."""

STEP_JITTER = 0.1
"""Relative variation of step times. Without it, all peers would send their offers at the same instant. Guess: measure
the step times of volunteers' computers."""

LATENCY_S = 0.025
"""One-way latency to the middle of the network. Guess: measure round trips between homes on one continent."""

ODD, OTHERS, LIARS = "odd", "others", "liars"
"""Group names: the peer with the slow line or fast computer, the equal peers, and the adversarial peers."""

OUTER = {
    "nesterov": True,
    "topology": "random",
    "partners": 1,
    "weights": "equal",
    "exchanges_per_step": 1,
    "fragments": 1,
    "fragments_per_exchange": 1,
}
"""Defaults of manifest section ``outer``."""

CODEC = {"name": "fp32", "block_size": 1_024, "gradients": "fp32", "rank": 16}
"""Defaults of manifest section ``codec``. Rank 16 is a quarter of the model width, as in the cost model for DiLoCoX."""


def scenario(cell: Cell, choice: Choice) -> dict[str, Any]:
    """Return the scenario of a cell with these outer numbers."""
    setting = cell.setting
    made = {
        "run": {
            "seed": cell.seed,
            "tokens": cell.steps * tokens_per_step(setting),
            "split": cell.split,
            "points": setting.points,
            "failed_exchanges": setting.failures,
        },
        "learner": _learner(setting),
        "outer": _outer(cell, choice),
        "codec": {**CODEC, **cell.contender.codec},
        # No gossip after training: it would hide how far apart the peers are.
        "swarm": {"catch_up_outer_steps": 20, "final_disagreement": 0.02, "final_gossip_s": 0.0},
        "peers": _peers(setting, cell.steps * step_s(setting)),
    }
    if cell.contender.pace:
        made["pace"] = dict(cell.contender.pace)
    elif setting.straggler != 1.0 and choice.recipe.startswith("gasloc"):
        made["pace"] = {"policy": "straggler"}
    return made


def tokens_per_step(setting: CellSetting) -> int:
    """Return the tokens of one peer's inner step; learners other than lm count steps."""
    return TOKENS_PER_STEP if setting.learner == "lm" else 1


def step_s(setting: CellSetting) -> float:
    """Return the simulated seconds of an inner step.

    Settings with a curve keep the common second, since R3 compares data parallel (H = 1) in seconds with H = 30.
    """
    return EVERY_STEP_S if setting.inner_steps == 1 and setting.points == 1 else STEP_S


def megabit_per_s(setting: CellSetting) -> float:
    """Return the bandwidth at which sending all parameters in fp32 takes ``exchange_steps`` inner steps."""
    return PARAMETERS[setting.learner] * 32 / (setting.exchange_steps * step_s(setting)) / 1e6


def _outer(cell: Cell, choice: Choice) -> dict[str, Any]:
    outer = {
        "recipe": choice.recipe,
        "inner_steps": cell.setting.inner_steps,
        "learning_rate": choice.learning_rate,
        "momentum": choice.momentum,
        **OUTER,
        **cell.contender.outer,
    }
    if not RECIPES[choice.recipe].is_random:  # its exchanges are planned, or it has none
        outer["exchanges_per_step"] = 0
    return outer


def _learner(setting: CellSetting) -> dict[str, Any]:
    if setting.learner != "lm":
        return {"kind": setting.learner, "parameters": PARAMETERS[setting.learner]}
    return {
        "kind": "lm",
        "data": setting.data,
        "sequence_length": SEQUENCE_LENGTH,
        "sequences_per_step": SEQUENCES_PER_STEP,
    }


def _peers(setting: CellSetting, whole_s: float) -> list[dict[str, Any]]:
    """Return groups of equal peers; the odd peer comes first."""
    up, down = (megabit_per_s(setting),) * 2 if setting.learner != "bytes" else HOME_MBIT_S
    usual: dict[str, Any] = {
        "name": OTHERS,
        "count": setting.peers,
        "step_s": step_s(setting),
        "step_jitter": STEP_JITTER,
        "up_mbit_s": up,
        "down_mbit_s": down,
        "latency_s": LATENCY_S,
    }
    odd: dict[str, Any] = {}
    if setting.straggler != 1.0:
        odd = {"up_mbit_s": up * setting.straggler, "down_mbit_s": down * setting.straggler}
    if setting.speed_ratio != 1.0:
        odd["step_s"] = step_s(setting) / setting.speed_ratio
    if setting.liars:
        honest = {**usual, "count": setting.peers - setting.liars}
        return [honest, {**usual, "name": LIARS, "count": setting.liars, "lie": setting.lie}]
    groups = [{**usual, "name": ODD, "count": 1, **odd}, {**usual, "count": setting.peers - 1}] if odd else [usual]
    return _moving(groups, setting, whole_s) if setting.comings_and_goings else groups


def _moving(groups: list[dict[str, Any]], setting: CellSetting, whole_s: float) -> list[dict[str, Any]]:
    """Let a quarter of the peers leave at half time, and as many arrive after a third of it."""
    quarter = math.ceil(setting.peers / 4)
    *first, last = groups
    leaving = {**last, "name": "leaving", "count": quarter, "leaves_at_s": whole_s / 2}
    coming = {**last, "name": "coming", "count": quarter, "arrives_at_s": whole_s / 3}
    return [*first, {**last, "count": last["count"] - quarter}, leaving, coming]
