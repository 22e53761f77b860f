"""R2: GASLoC's first claim, one inner step per communication on several graphs."""

from __future__ import annotations

from bench.evidence.blocks import block
from bench.evidence.cells import Contender, Setting
from bench.evidence.contenders import AD_PSGD, DPSGD, GASLOC, NOLOCO, SWARM, SWARM_2, on
from bench.evidence.layout import Column, Experiment, Table, rows

EVERY_STEP = Setting(inner_steps=1)


def _graphs(contender: Contender) -> tuple[Contender, ...]:
    return (
        on(contender, "ring"),
        on(contender, "exponential"),
        on(contender, "complete"),
        on(contender, "random", 1),
        on(contender, "random", 2),
    )


ROWS = (*_graphs(DPSGD), AD_PSGD, NOLOCO, *_graphs(GASLOC), SWARM, SWARM_2)

R2 = Experiment(
    id="R2",
    question="One inner step per communication, N = 8",
    notes=(
        "H = 1, 3,200 steps. Learning rate and momentum are those tuned at H = 10.",
        "AD-PSGD, NoLoCo and swarm draw partners at random by their nature; on a fixed graph they would be others.",
    ),
    cells=block("R2", ROWS, (EVERY_STEP,), tier=3),
    figures=("loss", "averaged_loss", "disagreement", "bits_per_parameter"),
    tables=(
        Table(
            "N = 8, H = 1",
            rows(*ROWS),
            (
                Column("loss", "loss", EVERY_STEP, best="low"),
                Column("averaged model", "averaged_loss", EVERY_STEP, best="low"),
                Column("disagreement, %", "disagreement", EVERY_STEP, scale=100, digits=2),
                Column("bits per parameter and step", "bits_per_parameter", EVERY_STEP, digits=1),
            ),
        ),
    ),
)
