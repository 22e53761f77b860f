"""R1: which method trains best at equal tokens?"""

from __future__ import annotations

from bench.evidence.blocks import block
from bench.evidence.cells import CENTRAL, MORE_SEEDS, Setting
from bench.evidence.contenders import (
    AD_PSGD,
    CONFIRMED,
    DDP,
    DPSGD,
    LOCAL,
    ONE_CELL,
    SWARM_2,
    SWARM_INT8,
    SWARM_MODULAR4,
)
from bench.evidence.layout import Column, Experiment, Panel, Point, Table, rows

PEERS = (4, 8, 16)
STEPS = {1: 1_000, 10: 3_200, 30: 3_210, 100: 10_000}
"""Inner steps of each peer by H: 1,000, 320, 107 and 100 outer steps. So H = 1 sees a third of the tokens, H = 100
three times as many."""

DECISIVE = (Setting(), Setting(inner_steps=30, steps=STEPS[30]))
ELSEWHERE = tuple(
    setting
    for peers in PEERS
    for inner_steps in STEPS
    if (setting := Setting(peers=peers, inner_steps=inner_steps, steps=STEPS[inner_steps])) not in DECISIVE
)
NON_IID = tuple(Setting(inner_steps=inner_steps, steps=STEPS[inner_steps], data="shards") for inner_steps in (10, 30))
EVERY_STEP = Setting(inner_steps=1)

VARIANTS = (SWARM_2, SWARM_INT8, SWARM_MODULAR4)
ONCE = (LOCAL, *ONE_CELL)
ONCE_EVERY_STEP = (DDP, DPSGD, AD_PSGD)


def _loss_table(peers: int) -> Table:
    columns = tuple(
        Column(
            f"H = {inner_steps}",
            "loss",
            Setting(peers=peers, inner_steps=inner_steps, steps=STEPS[inner_steps]),
            best="low",
        )
        for inner_steps in STEPS
    )
    variants = rows(*VARIANTS) if peers == 8 else ()
    return Table(f"Loss on the test split, N = {peers}", rows(*CONFIRMED) + variants, columns)


_FIGURES = (
    Column("loss", "loss", best="low"),
    Column("averaged model", "averaged_loss", best="low"),
    Column("disagreement, %", "disagreement", scale=100, digits=2),
    Column("bits per parameter and outer step", "bits_per_parameter", digits=2),
)

R1 = Experiment(
    id="R1",
    question="Quality at equal tokens",
    notes=(
        "Nats per byte, mean over the peers' own models at the end of training, before any final averaging.",
        "In one column all rows see the same tokens. H = 1 sees a third of the tokens of H = 10 and 30, H = 100 three "
        "times as many, so that it makes 100 outer steps; columns are not to be compared with each other.",
        "Learning rate and momentum are those tuned at N = 8 and H = 10, in every column.",
        "All in fp32 but for the rows that name a codec. One model of 123,000 parameters: nothing here says how it "
        "goes on at a billion.",
    ),
    cells=(
        *block("R1", CONFIRMED, (CENTRAL,), tier=1, quick=CONFIRMED),
        *block("R1", CONFIRMED, (DECISIVE[1],), tier=1),
        *block("R1", (*VARIANTS, LOCAL), (CENTRAL,), tier=2, quick=(LOCAL,)),
        *block("R1", ONE_CELL, (CENTRAL,), tier=3),
        *block("R1", ONCE_EVERY_STEP, (EVERY_STEP,), tier=2),
        *block("R1", VARIANTS, (DECISIVE[1],), tier=3),
        *block("R1", CONFIRMED, NON_IID, tier=3),
        *block("R1", CONFIRMED, ELSEWHERE, tier=4),
        *block("R1", (*CONFIRMED, *VARIANTS), DECISIVE, seeds=MORE_SEEDS, tier=5),
    ),
    figures=("loss", "averaged_loss", "disagreement", "bits_per_parameter", "utilization", "solo_share"),
    tables=(
        *(_loss_table(peers) for peers in PEERS),
        Table(
            "Non-IID data, N = 8: each peer reads its own stretch of the corpus",
            rows(*CONFIRMED),
            tuple(Column(f"H = {each.inner_steps}", "loss", each, best="low") for each in NON_IID),
        ),
        Table(
            "All methods at N = 8, H = 10 (H = 1 where a method knows no other); run at this cell alone",
            rows(*CONFIRMED, *VARIANTS, *ONCE) + rows(*ONCE_EVERY_STEP, inner_steps=1),
            _FIGURES,
        ),
    ),
    panels=(
        Panel(
            "N = 8",
            "H",
            "loss",
            {
                each.name: tuple(
                    Point(each.name, Setting(inner_steps=inner_steps, steps=STEPS[inner_steps]), inner_steps, "loss")
                    for inner_steps in STEPS
                )
                for each in CONFIRMED
            },
            logarithmic=True,
        ),
        Panel(
            "H = 10",
            "peers",
            "loss",
            {
                each.name: tuple(Point(each.name, Setting(peers=peers), peers, "loss") for peers in PEERS)
                for each in CONFIRMED
            },
            logarithmic=True,
        ),
    ),
)
