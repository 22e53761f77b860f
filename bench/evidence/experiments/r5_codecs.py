"""R5: what fewer bits cost, for weights, pseudo-gradients and both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bench.evidence.cells import CENTRAL, Contender, block
from bench.evidence.contenders import (
    FP32,
    INT4,
    INT8,
    LOW_RANK,
    MODULAR2,
    MODULAR3,
    MODULAR4,
    MODULAR8,
    SWARM_2,
    SWARM_BOTH,
    SWARM_GRADIENTS,
    TOP_K,
)
from bench.evidence.layout import (
    AVERAGED,
    BITS,
    DISAGREEMENT,
    LOSS,
    Column,
    Experiment,
    PlotPanel,
    PlotPoint,
    ResultTable,
    rows,
)

WEIGHT_CODECS = {
    "fp32": FP32,
    "fp16": {"name": "fp16"},
    "int8": INT8,
    "int4": INT4,
    "modular8": MODULAR8,
    "modular4": MODULAR4,
    "modular3": MODULAR3,
    "modular2": MODULAR2,
}
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


def _in_pieces(name: str, fragments: int, sent: int = 1) -> Contender:
    return _contender(SWARM_2, "x", name, WEIGHT_CODECS[name], fragments, sent)


WEIGHTS = tuple(_contender(SWARM_2, "x", name, codec) for name, codec in WEIGHT_CODECS.items())
PIECEMEAL = (
    _in_pieces("int8", 2),
    _in_pieces("modular4", 2),
    _in_pieces("modular4", 16, 7),
    _in_pieces("modular3", 7, 2),
    *(_in_pieces("modular4", fragments) for fragments in (4, 8, 16)),
)
GRADIENTS = tuple(_contender(SWARM_GRADIENTS, "g", name, GRADIENT_CODECS[name]) for name in ("fp32", "topk", "lowrank"))
BOTH = tuple(
    _contender(SWARM_BOTH, "x, g", f"{x}, {g}", {**GRADIENT_CODECS[g], **WEIGHT_CODECS[x]})
    for x, g in (("fp32", "fp32"), ("modular4", "int4"), ("modular4", "topk"), ("modular4", "lowrank"))
)
ALL = (*WEIGHTS, *PIECEMEAL, *GRADIENTS, *BOTH)

R5 = Experiment(
    id="R5",
    question="Bits per parameter against loss and disagreement; swarm, N = 8, H = 10",
    notes=(
        'x: fast weights, two exchanges asked for (swarm-2). g: pseudo-gradients; "x, g": both, with slow weights; '
        'one exchange asked for. "/4": four fragments, one of them in each exchange.',
        "Each stream is tuned in fp32; its codecs are not tuned.",
        "Bits include offers and frames, some kB per outer step whatever the model: much for 123,000 parameters, "
        "negligible for 135M. The payload alone stands beside them.",
        "x modular4 7/16 was added after all other rows were known, to have one below 8 bits.",
        "Not run: bf16; int8 in more than two fragments; int4, modular8 and modular2 in fragments; more codecs for g, "
        "which does not train even in fp32.",
    ),
    cells=block("R5", ALL, (CENTRAL,), quick=tuple(each for each in WEIGHTS if each.name in ("x fp32", "x modular4"))),
    tables=(
        ResultTable(
            "Codecs",
            rows(*ALL),
            (BITS, Column("payload alone", "payload_bits_per_parameter", digits=2), LOSS, AVERAGED, DISAGREEMENT),
            row_heading="stream, codec",
        ),
        ResultTable(
            "Loss over that of x fp32, seed by seed",
            rows(*WEIGHTS[1:], *PIECEMEAL, *BOTH),
            (Column("ratio", "loss", digits=4),),
            row_heading="stream, codec",
            over="x fp32",
        ),
    ),
    panels=(
        PlotPanel(
            "N = 8, H = 10",
            "bits per parameter and outer step",
            "loss",
            {
                label: tuple(PlotPoint(each.name, CENTRAL, "bits_per_parameter", "loss") for each in contenders)
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
)
