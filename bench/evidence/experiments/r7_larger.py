"""R7: a larger model at the same tokens and steps."""

from __future__ import annotations

from dataclasses import replace

from bench.evidence.cells import TOKENS, CellSetting, block
from bench.evidence.contenders import DDP, DILOCO, SWARM_2
from bench.evidence.layout import Experiment, ResultTable, TableRow, columns, rows

SMALL = CellSetting(tokens=TOKENS // 2)
LARGE = replace(SMALL, model="large")
MODELS = {"123,000 parameters": SMALL, "3.3M parameters": LARGE}
BETWEEN = (SWARM_2, DILOCO)
SEEDS = (1,)
_DDP = TableRow(DDP.name, {"inner_steps": 1}, label="ddp (H = 1)")

R7 = Experiment(
    id="R7",
    question="Does the gap to data parallel shrink with the model? 27 times the parameters; N = 8, H = 10",
    notes=(
        "Only the model differs: tokens (half of R1's), batches, steps and all numbers are the same, which are tuned "
        "for the small one.",
        "One seed: differences below .02 say nothing.",
    ),
    cells=(
        # The long ones first.
        *(
            cell
            for model in (LARGE, SMALL)
            for cell in (
                *block("R7", (SWARM_2,), (model,), seeds=SEEDS),
                *block("R7", (DDP,), (replace(model, inner_steps=1),), seeds=SEEDS),
                *block("R7", (DILOCO,), (model,), seeds=SEEDS),
            )
        ),
    ),
    tables=(ResultTable("Loss on the test split", (*rows(*BETWEEN), _DDP), columns("loss", MODELS)),),
)
