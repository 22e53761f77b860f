"""From a cell to the scenario that the simulator takes. The one place that knows the scenario's layout.

What a cell leaves open is the same in all cells and stands here: the small transformer's batch, the seconds of a step,
the latency of a line.
"""

from __future__ import annotations

import math
from typing import Any

from bench.evidence.cells import Cell, Choice, Setting
from p2ptrain.recipes import RECIPES

PARAMETERS = {"lm": 123_000, "quadratic": 16_384, "bytes": 135_000_000}
"""To turn ``exchange_steps`` into Mbit/s. Rounded for the transformer: it sets a pace, it counts no byte."""

HOME_MBIT_S = (20.0, 100.0)
"""Up and down, where only bytes are counted: the line of the project's goals."""

SEQUENCE_LENGTH = 64
SEQUENCES_PER_STEP = 2
TOKENS_PER_STEP = SEQUENCE_LENGTH * SEQUENCES_PER_STEP
"""128 tokens of one peer's inner step: 8 peers and 3,200 steps see 3.3M tokens, which is a minute on one core."""

STEP_S = 1.0
"""Simulated seconds of an inner step; only ratios to it matter."""

EVERY_STEP_S = 10.0
"""The same at H = 1, where quality is judged and not time. A handshake takes .3 s however long a step is: in steps of
1 s, methods that exchange beside their steps would be mixed less for it than at any other H."""

STEP_JITTER = 0.1
"""Share by which a step is longer or shorter. A guess; without any, all peers would call each other at one instant."""

LATENCY_S = 0.025
"""One way to the middle of the network. A guess at homes on one continent."""

ODD, OTHERS, LIARS = "odd", "others", "liars"
"""Names of groups: the peer with the slow line or the fast computer, all that are alike, and those that lie."""

OUTER = {
    "nesterov": True,
    "topology": "random",
    "partners": 1,
    "weights": "equal",
    "exchanges_per_step": 1,
    "fragments": 1,
    "fragments_per_exchange": 1,
}
"""What a contender does not say of the manifest's section ``outer``."""

CODEC = {"name": "fp32", "block_size": 1_024, "gradients": "fp32", "rank": 16}
"""What a contender does not say of ``codec``. Rank 16: a quarter of the small transformer's width, as in the cost model
for DiLoCoX."""


def scenario(cell: Cell, choice: Choice) -> dict[str, Any]:
    """The scenario of a cell, with the numbers that the tuning chose for it."""
    setting = cell.setting
    made = {
        "run": {
            "seed": cell.seed,
            "tokens_per_peer": cell.steps * tokens_per_step(setting),
            "split": cell.split,
            "points": setting.points,
            "failed_exchanges": setting.failures,
        },
        "learner": _learner(setting),
        "outer": _outer(cell, choice),
        "codec": {**CODEC, **cell.contender.codec},
        # Figures are taken when training ends: what gossip does afterwards would hide how far apart the peers are.
        "swarm": {"catch_up_outer_steps": 20, "final_disagreement": 0.02, "final_gossip_s": 0.0},
        "peers": _peers(setting, cell.steps * step_s(setting)),
    }
    if cell.contender.pace:
        made["pace"] = dict(cell.contender.pace)
    elif setting.straggler != 1.0 and choice.recipe.startswith("gasloc"):
        made["pace"] = {"policy": "straggler"}
    return made


def tokens_per_step(setting: Setting) -> int:
    """Tokens of one peer's inner step; the other learners count steps."""
    return TOKENS_PER_STEP if setting.learner == "lm" else 1


def total_tokens(cell: Cell) -> int:
    """Tokens that all peers see together."""
    return cell.setting.peers * cell.steps * tokens_per_step(cell.setting)


def step_s(setting: Setting) -> float:
    """Simulated seconds of an inner step. A curve is drawn over time, so settings with one keep the common second: data
    parallel in R3 is compared in seconds with methods of H = 30."""
    return EVERY_STEP_S if setting.inner_steps == 1 and setting.points == 1 else STEP_S


def megabit_per_s(setting: Setting) -> float:
    """The line on which all parameters in fp32 take ``exchange_steps`` inner steps of time."""
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
    if not RECIPES[choice.recipe].is_random:  # it plans its exchanges, or has none
        outer["exchanges_per_step"] = 0
    return outer


def _learner(setting: Setting) -> dict[str, Any]:
    if setting.learner != "lm":
        return {"kind": setting.learner, "parameters": PARAMETERS[setting.learner]}
    return {
        "kind": "lm",
        "data": setting.data,
        "sequence_length": SEQUENCE_LENGTH,
        "sequences_per_step": SEQUENCES_PER_STEP,
    }


def _peers(setting: Setting, whole_s: float) -> list[dict[str, Any]]:
    """Groups of like peers; the odd one out comes first."""
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


def _moving(groups: list[dict[str, Any]], setting: Setting, whole_s: float) -> list[dict[str, Any]]:
    """A quarter of the peers leaves at half time; as many others come when a third has passed."""
    quarter = math.ceil(setting.peers / 4)
    *first, last = groups
    leaving = {**last, "name": "leaving", "count": quarter, "leaves_at_s": whole_s / 2}
    coming = {**last, "name": "coming", "count": quarter, "arrives_at_s": whole_s / 3}
    return [*first, {**last, "count": last["count"] - quarter}, leaving, coming]
