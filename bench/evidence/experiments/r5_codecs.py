"""R5: what fewer bits cost."""

from __future__ import annotations

from dataclasses import replace

from bench.evidence.cells import CENTRAL, Contender, block
from bench.evidence.contenders import SWARM_2
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
    TableRow,
    rows,
)

FP32 = replace(SWARM_2, name="fp32")
INT8 = replace(SWARM_2, name="int8", codec={"name": "int8", "block_size": 1_024})
MODULAR = {bits: replace(SWARM_2, name=f"modular{bits}", codec={"name": f"modular{bits}"}) for bits in (8, 4, 3, 2)}
WHOLE = (FP32, INT8, *MODULAR.values())
FRAGMENTS = 7


def _in_pieces(bits: int, sent: int) -> Contender:
    whole = MODULAR[bits]
    outer = {**whole.outer, "fragments": FRAGMENTS, "fragments_per_exchange": sent}
    return replace(whole, name=f"{whole.name} {sent}/{FRAGMENTS}", outer=outer)


IN_PIECES = (_in_pieces(3, 4), _in_pieces(2, 3), _in_pieces(2, 1))
"""Four exchanges per outer step send 6.9, 3.4 and 1.1 bits per parameter, and some kB of offers and frames."""

R5 = Experiment(
    id="R5",
    question="Bits per parameter against loss and disagreement; swarm-2, N = 8, H = 10",
    notes=(
        '"2/7": two of seven fragments in each exchange. Numbers are tuned in fp32.',
        "Bits include offers and frames, some kB per outer step whatever the model: much for 123,000 parameters, "
        "negligible for 135M. The payload alone stands beside them.",
    ),
    cells=block("R5", (*WHOLE, *IN_PIECES), (CENTRAL,)),
    tables=(
        ResultTable(
            "Codecs",
            rows(*WHOLE, *IN_PIECES),
            (BITS, Column("payload alone", "payload_bits_per_parameter", digits=2), LOSS, AVERAGED, DISAGREEMENT),
            row_heading="codec",
        ),
        ResultTable(
            "Loss over that of fp32, seed by seed",
            rows(*WHOLE[1:], *IN_PIECES),
            (Column("ratio", "loss", digits=4),),
            row_heading="codec",
            over=TableRow(FP32.name),
        ),
    ),
    panels=(
        PlotPanel(
            "N = 8, H = 10",
            "bits per parameter and outer step",
            "loss",
            {
                label: tuple(PlotPoint(each.name, CENTRAL, "bits_per_parameter", "loss") for each in contenders)
                for label, contenders in (("whole", WHOLE), ("in pieces", IN_PIECES))
            },
            logarithmic=True,
        ),
    ),
)
