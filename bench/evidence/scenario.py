"""Conversion of a cell to a scenario of the simulator, with the constants that are the same in all cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.evidence.cells import CENTRAL, Cell, CellSetting, Choice
from p2ptrain.recipes import RECIPES
from sim.learning import LanguageModelLearner

SMALL: Mapping[str, Any] = {"sequence_length": 64, "sequences_per_step": 2, "curve_sequences": 64}
LARGE: Mapping[str, Any] = {
    **SMALL,
    "hidden_size": 256,
    "intermediate_size": 704,
    "layers": 4,
    "heads": 4,
}
MODELS: Mapping[str, LanguageModelLearner] = {
    name: LanguageModelLearner(kind="lm", **fields) for name, fields in (("small", SMALL), ("large", LARGE))
}
"""The central model has 123,000 parameters and takes 128 tokens of each peer in an inner step; the large one has
3.3M. Curves are compared with each other alone, on the same sequences, so few are enough."""

HELD_OUT_TOKENS = 270_000
"""Size of a held-out part (``sim.lm.text``), which the last point of each peer's curve uses."""

STEP_S = 1.0
"""Simulated seconds of an inner step of the slowest computer. Only ratios to it matter."""

STEP_JITTER = 0.1
"""Relative variation of step times. Without it, all peers would send their offers at the same instant. Guess: measure
the step times of volunteers' computers."""

LATENCY_S = 0.025
"""One-way latency to the middle of the network. Guess: measure round trips between homes on one continent."""

ODD, OTHERS, LIARS = "odd", "others", "liars"
"""Group names: the peer with the slow line, the equal peers, and the adversarial peers."""
FAST, MIDDLE, SLOW = "fast", "middle", "slow"
"""Group names of uneven computers; there is one group of each speed."""

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
    """Return the scenario of a cell with these numbers."""
    setting = cell.setting
    tokens = _tokens(cell)
    made = {
        "run": {
            "seed": cell.seed,
            "tokens": tokens,
            "split": cell.split,
            "points": setting.points,
            "failed_exchanges": setting.failures,
        },
        "learner": {
            "kind": "lm",
            "data": setting.data,
            **(SMALL if setting.model == "small" else LARGE),
            **cell.contender.learner,
            "learning_rate": choice.inner_rate,
        },
        "outer": _outer(cell, choice),
        "codec": {**CODEC, **cell.contender.codec},
        # No gossip after training: it would hide how far apart the peers are.
        "swarm": {"catch_up_outer_steps": 20, "final_disagreement": 0.02, "final_gossip_s": 0.0},
        "peers": _peers(setting, tokens / (tokens_per_step(setting) * setting.peers) * STEP_S),
    }
    if cell.contender.pace:
        made["pace"] = dict(cell.contender.pace)
    elif setting.straggler != 1.0 and choice.recipe.startswith("gasloc"):
        made["pace"] = {"policy": "straggler"}
    return made


def tokens_per_step(setting: CellSetting) -> int:
    """Return the tokens of one peer's inner step."""
    return MODELS[setting.model].tokens_per_step


def relative_size(setting: CellSetting) -> float:
    """Return how many times the arithmetic of a central cell a cell takes."""
    return _arithmetic(setting) / _arithmetic(CENTRAL)


def _arithmetic(setting: CellSetting) -> float:
    """Return parameters times tokens; evaluating a token takes a third of training on it."""
    model = MODELS[setting.model]
    curve = (setting.points - 1) * model.curve_sequences * model.sequence_length
    return model.parameters * (setting.tokens + setting.peers * (curve + HELD_OUT_TOKENS) / 3)


def megabit_per_s(setting: CellSetting) -> float:
    """Return the bandwidth at which sending all parameters in fp32 takes ``exchange_steps`` inner steps."""
    return MODELS[setting.model].parameters * 32 / (setting.exchange_steps * STEP_S) / 1e6


def _tokens(cell: Cell) -> int:
    """Return the budget of all peers. A shortened cell still makes at least ten outer steps."""
    setting = cell.setting
    if cell.shorter == 1:
        return setting.tokens
    least = 10 * setting.inner_steps * tokens_per_step(setting) * setting.peers
    return max(setting.tokens // cell.shorter, least)


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


def _peers(setting: CellSetting, whole_s: float) -> list[dict[str, Any]]:
    """Return groups of equal peers; the peer with the slow line comes first."""
    line = megabit_per_s(setting)
    usual: dict[str, Any] = {
        "name": OTHERS,
        "count": setting.peers,
        "step_s": STEP_S,
        "step_jitter": STEP_JITTER,
        "up_mbit_s": line,
        "down_mbit_s": line,
        "latency_s": LATENCY_S,
    }
    if setting.straggler != 1.0:
        slow = {"up_mbit_s": line * setting.straggler, "down_mbit_s": line * setting.straggler}
        return [{**usual, "name": ODD, "count": 1, **slow}, {**usual, "count": setting.peers - 1}]
    if setting.speeds:
        return [
            {**usual, "name": name, "count": setting.speeds.count(speed), "step_s": STEP_S / speed}
            for name, speed in group_speeds(setting.speeds).items()
        ]
    if setting.liars:
        honest = {**usual, "count": setting.peers - setting.liars}
        return [honest, {**usual, "name": LIARS, "count": setting.liars, "lie": setting.lie}]
    return _moving(usual, setting, whole_s) if setting.comings_and_goings else [usual]


def group_speeds(speeds: Sequence[float]) -> dict[str, float]:
    """Return the speed of each group of uneven computers, which have two or three different speeds."""
    different = sorted(set(speeds))
    names = (SLOW, MIDDLE, FAST) if len(different) == 3 else (SLOW, FAST)
    return dict(zip(names, different, strict=True))


def _moving(usual: Mapping[str, Any], setting: CellSetting, whole_s: float) -> list[dict[str, Any]]:
    """Let a quarter of the peers leave at half time, and as many arrive after a third of it."""
    quarter = math.ceil(setting.peers / 4)
    leaving = {**usual, "name": "leaving", "count": quarter, "leaves_at_s": whole_s / 2}
    coming = {**usual, "name": "coming", "count": quarter, "arrives_at_s": whole_s / 3}
    return [{**usual, "count": setting.peers - quarter}, leaving, coming]
