"""R1: loss at equal tokens."""

from __future__ import annotations

from bench.evidence.cells import ALONE, CENTRAL, CellSetting, block
from bench.evidence.contenders import (
    DDP,
    DDP_ADAMW,
    DILOCO,
    DILOCO_ADAMW,
    LOCAL,
    LOCAL_ADAMW,
    RIVALS,
    SWARM_2,
    SWARM_ADAMW,
    SWARM_MODULAR4,
    SWARM_WSD,
)
from bench.evidence.layout import (
    AVERAGED,
    BITS,
    DISAGREEMENT,
    EXCHANGES,
    LOSS,
    Experiment,
    ResultTable,
    TableRow,
    columns,
    rows,
)

LONG = CellSetting(inner_steps=30)
EVERY_STEP = CellSetting(inner_steps=1)
SHARDS = CellSetting(data="shards")
BY_H = {"H = 10": CENTRAL, "H = 30": LONG}
OURS = (SWARM_2, SWARM_MODULAR4, SWARM_WSD)
BETWEEN = (*OURS, *(each for each in RIVALS if each is not SWARM_2), SWARM_ADAMW, DILOCO_ADAMW)
"""Methods with phases of H inner steps."""


def _every_step(row: str) -> TableRow:
    return TableRow(row, {"inner_steps": 1}, label=f"{row} (H = 1)")


def _alone(row: str) -> TableRow:
    return TableRow(row, {"peers": 1, "inner_steps": 10}, label=f"{row}, one computer")


PLAIN = (_every_step("ddp"), _every_step("ddp adamw"), _alone("local"), _alone("local adamw"))


def _ratios(title: str, over: TableRow) -> ResultTable:
    others = tuple(each for each in rows(*BETWEEN) if each.contender != over.contender)
    return ResultTable(title, others, columns("loss", BY_H, digits=4), over=over)


R1 = Experiment(
    id="R1",
    question="Loss at equal tokens, N = 8",
    notes=(
        "Nats per byte: mean over the peers' own models at the end of training. All rows train on the same tokens in "
        "all: 20 per parameter. ddp averages after every step; local is one computer that makes all steps itself.",
        "All numbers are tuned at H = 10.",
        "Not equal tuning: the form of swarm was developed with some ninety runs on the validation split "
        "(docs/LOG.md); the published methods have their authors' form.",
        "Bits are per outer step. swarm-2 makes four exchanges in it, two that it starts and two that it answers; the "
        "others make one or two.",
        "swarm and factored_gossip are judged before the average that would follow their last step, the others after "
        "theirs. This is to the disadvantage of swarm.",
        "With three seeds, two standard errors are p = .12 to .18 for one comparison, and the tables make many.",
    ),
    cells=(
        *block("R1", BETWEEN, (CENTRAL,), quick=(SWARM_2, DILOCO)),
        *block("R1", (DDP, DDP_ADAMW), (EVERY_STEP,), quick=(DDP,)),
        *block("R1", (LOCAL, LOCAL_ADAMW), (ALONE,)),
        *block("R1", BETWEEN, (LONG,)),
        *block("R1", (SWARM_2, DILOCO), (SHARDS,)),
    ),
    tables=(
        _ratios("Loss over that of data parallel with AdamW, seed by seed", TableRow("ddp adamw", {"inner_steps": 1})),
        _ratios("Loss over that of data parallel with Muon, seed by seed", TableRow("ddp", {"inner_steps": 1})),
        _ratios("Loss over that of diloco, seed by seed", TableRow("diloco")),
        ResultTable("Loss on the test split", rows(*BETWEEN) + PLAIN, columns("loss", BY_H, best="low")),
        ResultTable(
            "All methods, H = 10",
            rows(*BETWEEN) + PLAIN,
            (LOSS, AVERAGED, DISAGREEMENT, EXCHANGES, BITS),
        ),
        ResultTable(
            "Non-IID data: each peer reads its own stretch of the corpus",
            rows(SWARM_2, DILOCO),
            columns("loss", {"H = 10": SHARDS}, best="low"),
        ),
    ),
)
