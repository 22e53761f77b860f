"""R2: one inner step per communication on several graphs, the first claim of GASLoC."""

from __future__ import annotations

from dataclasses import replace

from bench.evidence.cells import Contender, block
from bench.evidence.contenders import AD_PSGD, DPSGD, GASLOC, NOLOCO, SWARM, on
from bench.evidence.experiments.r1_quality import setting
from bench.evidence.layout import AVERAGED, BITS, DISAGREEMENT, EXCHANGES, LOSS, Experiment, ResultTable, TableRow
from p2ptrain.recipes import RECIPES

EVERY_STEP = setting(8, 1)


def _graphs(contender: Contender) -> tuple[tuple[str, Contender], ...]:
    """Return labels and contenders on each graph; 1-peer is what each contender is by itself."""
    name, chooses = contender.name, RECIPES[contender.forms[0]].is_random
    fixed = ("ring", "exponential") if chooses else ("ring", "exponential", "complete")
    two = () if chooses else ((f"{name} 2-peer", on(contender, "random", 2)),)
    return (*((f"{name} {graph}", on(contender, graph)) for graph in fixed), (f"{name} 1-peer", contender), *two)


ROWS = tuple(row for contender in (DPSGD, AD_PSGD, NOLOCO, GASLOC, SWARM) for row in _graphs(contender))

R2 = Experiment(
    id="R2",
    question="One inner step per communication, N = 8",
    notes=(
        "H = 1, 1,000 steps, numbers tuned at H = 10: compare graphs of one method, not methods. With eta = 1 and mu "
        "= 0, gasloc is dpsgd at H = 1; their difference here is the price of numbers tuned for longer phases.",
        "1-peer and 2-peer: new random partners for each step. ad_psgd and swarm choose partners themselves and make "
        "at most one exchange per step at H = 1, so 2-peer does not exist for them.",
        "NoLoCo was published with pairs only and AD-PSGD with a fixed graph; the other graphs are our extension.",
    ),
    cells=block("R2", [contender for _, contender in ROWS], (EVERY_STEP,)),
    tables=(
        ResultTable(
            "N = 8, H = 1",
            tuple(TableRow(contender.name, label=label) for label, contender in ROWS),
            tuple(
                replace(each, setting=EVERY_STEP, best=None) for each in (LOSS, AVERAGED, DISAGREEMENT, EXCHANGES, BITS)
            ),
        ),
    ),
)
