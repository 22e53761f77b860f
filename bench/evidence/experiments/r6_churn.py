"""R6: exchanges that fail, peers that come and go."""

from __future__ import annotations

from dataclasses import replace

from bench.evidence.blocks import block
from bench.evidence.cells import Setting
from bench.evidence.contenders import DILOCO, FACTORED, GASLOC, SWARM_2
from bench.evidence.layout import Column, Experiment, Panel, Point, Table, rows

METHODS = (DILOCO, GASLOC, FACTORED, SWARM_2)
FAILING = tuple(Setting(failures=share) for share in (0.0, 0.1, 0.3))
MOVING = Setting(comings_and_goings=True)
OPEN = (GASLOC, replace(FACTORED, forms=("factored_gossip",)), SWARM_2)
"""Methods, and forms of them, in which nobody needs everybody: only these can be joined and left."""

R6 = Experiment(
    id="R6",
    question="Churn: failed exchanges, and peers that come and go; N = 8, H = 10",
    notes=(
        "A failed exchange breaks half-way. What then happens is the method's: a global average (diloco) is done again "
        "until it succeeds, at the cost of its time and bytes; a planned round (gasloc, factored_gossip) goes without "
        "that pair; swarm tries another partner within the same outer step. So diloco pays in seconds, planned rounds "
        "in mixing.",
        "gasloc, in the z-form with mu = .8 that its tuning chose, diverges where many exchanges fail: its momentum "
        "carries on what a mix has moved, so two peers that just became equal come back on the other side of each "
        "other, times mu, and without the next mix that grows.",
        "Coming and going: a quarter of the peers leaves at half time for good; as many new ones come at a third.",
        "Averages over everybody cannot be joined or left, so diloco has no figure there, and factored_gossip is there "
        "with both mixes in pairs.",
    ),
    cells=(
        *block("R6", METHODS, FAILING[2:], tier=2, quick=(DILOCO, SWARM_2)),
        *block("R6", METHODS, FAILING[:2], tier=4),
        *block("R6", OPEN, (MOVING,), tier=4),
    ),
    figures=("loss", "averaged_loss", "disagreement", "simulated_s", "exchanges_failed", "solo_share"),
    tables=(
        Table(
            "Loss at equal tokens",
            rows(*METHODS),
            (
                *(Column(f"{100 * each.failures:.0f} % fail", "loss", each, best="low") for each in FAILING),
                Column("coming and going", "loss", MOVING, best="low"),
            ),
        ),
        Table(
            "Simulated seconds for it",
            rows(*METHODS),
            (
                *(
                    Column(f"{100 * each.failures:.0f} % fail", "simulated_s", each, digits=0, best="low")
                    for each in FAILING
                ),
                Column("coming and going", "simulated_s", MOVING, digits=0, best="low"),
            ),
        ),
    ),
    panels=(
        Panel(
            "N = 8, H = 10",
            "exchanges that fail, %",
            "loss",
            {
                each.name: tuple(Point(each.name, setting, 100 * setting.failures, "loss") for setting in FAILING)
                for each in METHODS
            },
        ),
    ),
)
