"""R5: what do bits cost? Codecs, in one piece and in several, for weights, pseudo-gradients and both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
    SWARM_2,
    SWARM_BOTH,
    SWARM_GRADIENTS,
    TOP_K,
)
from bench.evidence.layout import Column, Experiment, Panel, Point, Table, rows

FP16: Mapping[str, Any] = {"name": "fp16"}

WEIGHT_CODECS = {
    "fp32": FP32,
    "fp16": FP16,
    "int8": INT8,
    "int4": INT4,
    "modular8": MODULAR8,
    "modular4": MODULAR4,
}
PIECES = {"int8": (2,), "modular4": (2, 4, 8, 16)}
"""Into how many fragments the weights are cut, one of which is in each exchange."""
GRADIENT_CODECS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {"gradients": "fp32"},
    "int4": {"gradients": "int4", "block_size": 64},
    "topk": TOP_K,
    "lowrank": LOW_RANK,
}


def _contender(
    like: Contender, stream: str, label: str, codec: Mapping[str, Any], fragments: int = 1, sent: int = 1
) -> Contender:
    pieces = f" {sent if sent > 1 else ''}/{fragments}" if fragments > 1 else ""
    outer = {**like.outer, "fragments": fragments, "fragments_per_exchange": sent}
    return replace(like, name=f"{stream} {label}{pieces}", outer=outer, codec=codec)


WEIGHTS = tuple(_contender(SWARM_2, "x", name, codec) for name, codec in WEIGHT_CODECS.items())
IN_PIECES = tuple(
    _contender(SWARM_2, "x", name, WEIGHT_CODECS[name], count) for name, counts in PIECES.items() for count in counts
)
BELOW_8_BITS = _contender(SWARM_2, "x", "modular4", MODULAR4, 16, 7)
GRADIENTS = tuple(_contender(SWARM_GRADIENTS, "g", name, GRADIENT_CODECS[name]) for name in ("fp32", "topk", "lowrank"))
BOTH = tuple(
    _contender(SWARM_BOTH, "x, g", f"{x}, {g}", {**GRADIENT_CODECS[g], **WEIGHT_CODECS[x]})
    for x, g in (("fp32", "fp32"), ("modular4", "int4"), ("modular4", "topk"), ("modular4", "lowrank"))
)
FIRST = tuple(each for each in WEIGHTS if each.name in ("x fp32", "x int8", "x modular4"))
PIECEMEAL = (*IN_PIECES[:2], BELOW_8_BITS, *IN_PIECES[2:])
ALL = (*WEIGHTS, *PIECEMEAL, *GRADIENTS, *BOTH)

R5 = Experiment(
    id="R5",
    question="Bits per parameter against loss and disagreement; ours, N = 8, H = 10",
    notes=(
        'x: weights, the fast ones, two exchanges asked for (swarm-2); g: pseudo-gradients, and "x, g": both, with '
        'the slow weights; one exchange asked for. "/4": four fragments, one of them in each exchange. Each stream has '
        "its own tuning, in fp32; its codecs are not tuned.",
        "Bits are all that a peer sends in an outer step, offers and frames included, per parameter of the model; "
        "beside them the payload's alone. The difference is traffic of the protocol, some kB an outer step whatever "
        "the model: much for 123,000 parameters, nothing for 135M.",
        f"{BELOW_8_BITS.name} was added when all other rows were known, to have one below 8 bits.",
        "Not run: bf16; int8 in more than two fragments, int4 and modular8 in any; pseudo-gradients alone in int4, and "
        "in fragments. The pseudo-gradients alone do not train even in fp32, so no more of their codecs were tried.",
    ),
    cells=(
        *block("R5", FIRST, (CENTRAL,), tier=2, quick=FIRST),
        *block("R5", [each for each in ALL if each not in FIRST], (CENTRAL,), tier=3),
    ),
    figures=(
        "loss",
        "averaged_loss",
        "disagreement",
        "bits_per_parameter",
        "payload_bits_per_parameter",
        "exchanges_per_outer_step",
        "solo_share",
    ),
    tables=(
        Table(
            "Codecs",
            rows(*ALL),
            (
                Column("bits per parameter and outer step", "bits_per_parameter", digits=2),
                Column("payload alone", "payload_bits_per_parameter", digits=2),
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
                for label, contenders in (
                    ("x", WEIGHTS),
                    ("x, in pieces", PIECEMEAL),
                    ("g", GRADIENTS),
                    ("x and g", BOTH),
                )
            },
            logarithmic=True,
        ),
    ),
    competition=False,
)
