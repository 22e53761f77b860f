"""R6: exchanges that fail, peers that come and go."""

from __future__ import annotations

from bench.evidence.cells import CellSetting, block
from bench.evidence.contenders import DILOCO, GASLOC, SWARM_2
from bench.evidence.layout import Experiment, PlotPanel, PlotPoint, ResultTable, columns, rows

METHODS = (DILOCO, GASLOC, SWARM_2)
FAILING = tuple(CellSetting(failures=share) for share in (0.0, 0.1, 0.3))
MOVING = CellSetting(comings_and_goings=True)
_SETTINGS = {**{f"{100 * each.failures:.0f} % fail": each for each in FAILING}, "coming and going": MOVING}

R6 = Experiment(
    id="R6",
    question="Churn: failed exchanges, and peers that come and go; N = 8, H = 10",
    notes=(
        "A failed exchange breaks half-way. diloco repeats the global average until it succeeds and pays in time and "
        "bytes; gasloc goes on without that pair; swarm tries another partner in the same outer step.",
        "Coming and going: a quarter of the peers leaves for good at half time, and as many arrive after a third of "
        "it. A global average cannot be joined or left, so diloco has no figure there.",
    ),
    cells=(*block("R6", METHODS, FAILING), *block("R6", (GASLOC, SWARM_2), (MOVING,))),
    tables=(
        ResultTable("Loss at equal tokens", rows(*METHODS), columns("loss", _SETTINGS, best="low")),
        ResultTable("Simulated seconds", rows(*METHODS), columns("simulated_s", _SETTINGS, best="low", digits=0)),
    ),
    panels=(
        PlotPanel(
            "N = 8, H = 10",
            "failed exchanges, %",
            "loss",
            {
                method.name: tuple(PlotPoint(method.name, each, 100 * each.failures, "loss") for each in FAILING)
                for method in METHODS
            },
        ),
    ),
)
