"""R2: GASLoC's first claim, one inner step per communication on several graphs."""

from __future__ import annotations

from bench.evidence.blocks import block
from bench.evidence.cells import Contender, Setting
from bench.evidence.contenders import AD_PSGD, DPSGD, GASLOC, NOLOCO, SWARM, on
from bench.evidence.experiments.r1_quality import STEPS
from bench.evidence.layout import Column, Experiment, Row, Table
from p2ptrain.recipes import RECIPES

EVERY_STEP = Setting(inner_steps=1, steps=STEPS[1])
"""R1's column: where a method is in both, it is one run."""


def _graphs(contender: Contender) -> tuple[tuple[str, Contender], ...]:
    """Rows and who is in them. 1-Peer is what each contender is by itself."""
    name, draws = contender.name, RECIPES[contender.forms[0]].is_random
    fixed = ("ring", "exponential") if draws else ("ring", "exponential", "complete")
    two = () if draws else ((f"{name} 2-peer", on(contender, "random", 2)),)
    return (*((f"{name} {graph}", on(contender, graph)) for graph in fixed), (f"{name} 1-peer", contender), *two)


ROWS = tuple(row for contender in (DPSGD, AD_PSGD, NOLOCO, GASLOC, SWARM) for row in _graphs(contender))

R2 = Experiment(
    id="R2",
    question="One inner step per communication, N = 8",
    notes=(
        "H = 1, 1,000 steps. Learning rate and momentum are those tuned at H = 10, and that decides: with eta = 1 "
        "and mu = 0 gasloc is dpsgd at H = 1, and what stands between them here is the price of numbers for longer "
        "phases. So graphs are to be compared within a method, not methods with each other, and nobody wins or loses"
        " here.",
        "1-Peer and 2-Peer: partners drawn anew for each step. AD-PSGD and swarm look for partners by themselves: on"
        " a graph they call a random neighbour, and 1-Peer is their complete graph as well. An exchange of theirs "
        "enters between two inner steps, so that at H = 1 a step has one, asked for or answered, however many are "
        "asked for: 2-Peer does not exist for them, and swarm makes .97 exchanges a step here, not 1.9.",
        "NoLoCo's authors know pairs alone, AD-PSGD's a fixed graph; the other graphs are our extension of them.",
        "A step takes 10 simulated seconds here and in R1's column H = 1, as a handshake takes .3: time is not judged.",
    ),
    cells=block("R2", [contender for _, contender in ROWS], (EVERY_STEP,), tier=3),
    figures=("loss", "averaged_loss", "disagreement", "bits_per_parameter", "exchanges_per_outer_step"),
    tables=(
        Table(
            "N = 8, H = 1",
            tuple(Row(contender.name, label=label) for label, contender in ROWS),
            (
                Column("loss", "loss", EVERY_STEP),
                Column("averaged model", "averaged_loss", EVERY_STEP),
                Column("disagreement, %", "disagreement", EVERY_STEP, scale=100, digits=2),
                Column("exchanges per step", "exchanges_per_outer_step", EVERY_STEP, digits=2),
                Column("bits per parameter and step", "bits_per_parameter", EVERY_STEP, digits=1),
            ),
        ),
    ),
    competition=False,
)
