"""R5: what do bits cost? Every codec, in one piece and in four, for weights, pseudo-gradients and both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.evidence.blocks import block
from bench.evidence.cells import CENTRAL, Contender
from bench.evidence.contenders import (
    FP32,
    INT4,
    INT8,
    LOW_RANK,
    MODULAR4,
    MODULAR8,
    ONE_EXCHANGE,
    TOP_K,
)
from bench.evidence.layout import Column, Experiment, Panel, Point, Table, rows

BF16: Mapping[str, Any] = {"name": "bf16"}
FP16: Mapping[str, Any] = {"name": "fp16"}

WEIGHT_CODECS = {
    "fp32": FP32,
    "fp16": FP16,
    "bf16": BF16,
    "int8": INT8,
    "int4": INT4,
    "modular8": MODULAR8,
    "modular4": MODULAR4,
}
GRADIENT_CODECS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {"gradients": "fp32"},
    "int8": {"gradients": "int8"},
    "int4": {"gradients": "int4", "block_size": 64},
    "topk": TOP_K,
    "lowrank": LOW_RANK,
}


def _contender(stream: str, recipe: str, label: str, codec: Mapping[str, Any], fragments: int) -> Contender:
    pieces = f" /{fragments}" if fragments > 1 else ""
    outer = {**ONE_EXCHANGE, "fragments": fragments, "fragments_per_exchange": 1}
    return Contender(name=f"{stream} {label}{pieces}", forms=(recipe,), outer=outer, codec=codec, tuned_as="swarm")


WEIGHTS = tuple(_contender("x", "swarm", name, codec, 1) for name, codec in WEIGHT_CODECS.items())
IN_FOUR = tuple(
    _contender("x", "swarm", name, WEIGHT_CODECS[name], 4) for name in ("fp32", "int8", "modular8", "modular4")
)
GRADIENTS = tuple(_contender("g", "swarm_gradients", name, codec, 1) for name, codec in GRADIENT_CODECS.items())
BOTH = tuple(
    _contender("x, g", "swarm_both", f"{x}, {g}", {**GRADIENT_CODECS[g], **WEIGHT_CODECS[x]}, 1)
    for x, g in (("fp32", "fp32"), ("modular4", "int4"), ("modular4", "topk"), ("modular4", "lowrank"))
)
FIRST = tuple(each for each in WEIGHTS if each.name in ("x fp32", "x int8", "x modular4"))
ALL = (*WEIGHTS, *IN_FOUR, *GRADIENTS, *BOTH)

R5 = Experiment(
    id="R5",
    question="Bits per parameter against loss and disagreement, recipe swarm, N = 8, H = 10",
    notes=(
        'x: slow weights, g: pseudo-gradients. "/4": four fragments, one of them in each exchange.',
        "Bits are all that a peer sends in an outer step, offers and frames included, per parameter of the model.",
    ),
    cells=(
        *block("R5", FIRST, (CENTRAL,), tier=2, quick=FIRST),
        *block("R5", [each for each in ALL if each not in FIRST], (CENTRAL,), tier=3),
    ),
    figures=("loss", "averaged_loss", "disagreement", "bits_per_parameter", "solo_share"),
    tables=(
        Table(
            "Codecs",
            rows(*ALL),
            (
                Column("bits per parameter and outer step", "bits_per_parameter", digits=2),
                Column("loss", "loss", best="low"),
                Column("averaged model", "averaged_loss", best="low"),
                Column("disagreement, %", "disagreement", scale=100, digits=2),
            ),
            row_heading="stream, codec",
        ),
    ),
    panels=(
        Panel(
            "N = 8, H = 10",
            "bits per parameter and outer step",
            "loss",
            {
                label: tuple(Point(each.name, CENTRAL, "bits_per_parameter", "loss") for each in contenders)
                for label, contenders in (("x", WEIGHTS), ("x, in four", IN_FOUR), ("g", GRADIENTS), ("x and g", BOTH))
            },
            logarithmic=True,
        ),
    ),
    competition=False,
)
