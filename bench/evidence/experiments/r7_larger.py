"""R7: a larger model at the same tokens and steps."""

from __future__ import annotations

from bench.evidence.cells import CENTRAL, CellSetting, block
from bench.evidence.contenders import DDP, DILOCO, SWARM_2
from bench.evidence.layout import Experiment, ResultTable, TableRow, columns, rows

LARGE = CellSetting(model="large")
LARGE_EVERY_STEP = CellSetting(model="large", inner_steps=1)
MODELS = {"123,000 parameters": CENTRAL, "3.3M parameters": LARGE}
BETWEEN = (SWARM_2, DILOCO)
SEEDS = (1,)
_DDP = TableRow(DDP.name, {"inner_steps": 1}, label="ddp (H = 1)")

R7 = Experiment(
    id="R7",
    question="Does the gap to data parallel shrink with the model? 27 times the parameters; N = 8, H = 10",
    notes=(
        "Only the model differs: tokens, batches, steps and all numbers are the same, which are tuned for the "
        "small one.",
        "One seed: differences below .02 say nothing.",
    ),
    cells=(
        *block("R7", BETWEEN, (CENTRAL,), seeds=SEEDS),
        *block("R7", (DDP,), (CellSetting(inner_steps=1),), seeds=SEEDS),
        *block("R7", (SWARM_2,), (LARGE,), seeds=SEEDS),
        *block("R7", (DDP,), (LARGE_EVERY_STEP,), seeds=SEEDS),
        *block("R7", (DILOCO,), (LARGE,), seeds=SEEDS),
    ),
    tables=(
        ResultTable("Loss over that of data parallel", rows(*BETWEEN), columns("loss", MODELS, digits=4), over=_DDP),
        ResultTable("Loss on the test split", (*rows(*BETWEEN), _DDP), columns("loss", MODELS)),
    ),
)
