"""R5: what fewer bits cost."""

from __future__ import annotations

from dataclasses import replace

from bench.evidence.cells import CENTRAL, Choice, Contender, block
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

LOW_RANK = {"gradients": "lowrank"}
DILOCOX = Contender(
    name="dilocox modular2, rank 16",
    forms=("dilocox",),
    outer={"exchanges_per_step": 1},
    codec={**LOW_RANK, "name": "modular2", "rank": 16},
    tuned_as="swarm-2",
)
DILOCOX_GLOBAL = Contender(
    name="dilocox_global, rank 35",
    forms=("dilocox_global",),
    codec={**LOW_RANK, "rank": 35},
    tuned_as="diloco",
)
DILOCOX_CHOICES = tuple((each, Choice(each.forms[0], 0.5, 0.2, 0.012)) for each in (DILOCOX, DILOCOX_GLOBAL))
"""Best of six runs on the validation split, and no grid: eta .3 to .7, mu 0 to .6, inner rates .006 and .012."""

R5 = Experiment(
    id="R5",
    question="Bits per parameter against loss and disagreement; swarm-2, N = 8, H = 10",
    notes=(
        '"2/7": two of seven fragments in each exchange. Numbers are tuned in fp32.',
        "Bits include offers and frames, some kB per outer step whatever the model: much for 123,000 parameters, "
        "negligible for 135M. The payload alone stands beside them.",
        "DiLoCoX is tuned less than swarm: by six runs of each form.",
    ),
    cells=(
        *block("R5", (*WHOLE, *IN_PIECES), (CENTRAL,)),
        *(
            cell
            for contender, choice in DILOCOX_CHOICES
            for cell in block("R5", (contender,), (CENTRAL,), choice=choice)
        ),
    ),
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
        ResultTable(
            "DiLoCoX beside swarm of about as many bits",
            rows(DILOCOX, DILOCOX_GLOBAL, MODULAR[2], *IN_PIECES[:2]),
            (Column("payload alone", "payload_bits_per_parameter", digits=2), LOSS, DISAGREEMENT),
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
