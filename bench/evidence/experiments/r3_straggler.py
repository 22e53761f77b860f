"""R3: one slow line among eight (GASLoC, figure 3)."""

from __future__ import annotations

from collections.abc import Sequence

from bench.evidence.cells import CellSetting, block
from bench.evidence.contenders import DILOCO, FACTORED, GASLOC, SWARM_2
from bench.evidence.headline import LADDER
from bench.evidence.layout import Entry, Experiment, PlotPanel, PlotPoint, ResultTable, columns, rows

SETTINGS = {
    f"at {100 * share:.0f} %": CellSetting(inner_steps=30, exchange_steps=5 / 3, straggler=share, points=40)
    for share in (1.0, 0.1)
}
"""With H = 30 and an exchange of 5/3 steps, GASLoC's rule yields H = 15 for a straggler at 10 %, as published."""
SLOWEST = SETTINGS["at 10 %"]
METHODS = (DILOCO, GASLOC, FACTORED, SWARM_2)


def _same_loss(entries: Sequence[Entry]) -> list[Entry]:
    """Add ``seconds_to_target``: simulated seconds to the lowest loss of the ladder that every run reached."""
    runs = [each["headline"] for each in entries]
    common = [rung for rung in LADDER if all(f"seconds_to:{rung}" in each for each in runs)]
    if not common:
        return list(entries)
    at = f"seconds_to:{min(common)}"
    return [{**each, "headline": {**each["headline"], "seconds_to_target": each["headline"][at]}} for each in entries]


R3 = Experiment(
    id="R3",
    question="Straggler: one of eight peers has 10 % of the others' bandwidth",
    notes=(
        "H = 30; an exchange of all parameters in fp32 takes 5/3 inner steps on a full line. Seconds are "
        "simulated; an inner step takes one.",
        "The same loss is the lowest one on a fixed ladder that every run reached.",
        "gasloc shortens the straggler's H by a formula in which the straggler's transfer begins when its own phase "
        "ends. Here, as over a real network, a swap begins when both sides are ready, so the others compute less than "
        "the 95 % of R4. This disadvantage is specific to gasloc.",
        "Fast lines beside a single slow one are the worst case for methods that wait for all peers.",
    ),
    cells=block("R3", METHODS, SETTINGS.values()),
    derive=_same_loss,
    tables=(
        ResultTable(
            "Simulated seconds to the same loss",
            rows(*METHODS),
            columns("seconds_to_target", SETTINGS, best="low", digits=0),
        ),
        ResultTable(
            "Share of their time that peers with a full line compute",
            rows(*METHODS),
            columns("others_utilization", SETTINGS, best="high"),
        ),
        ResultTable(
            "Simulated seconds to each loss, straggler at 10 %",
            rows(*METHODS),
            tuple(
                each
                for rung in (2.2, 2.0, 1.9, 1.85, 1.8)
                for each in columns(f"seconds_to:{rung}", {f"{rung:g}": SLOWEST}, digits=0)
            ),
        ),
        ResultTable("Loss at equal tokens", rows(*METHODS), columns("loss", SETTINGS, best="low")),
    ),
    panels=(
        PlotPanel(
            "straggler at 10 %",
            "simulated seconds",
            "loss",
            {
                method.name: tuple(PlotPoint(method.name, SLOWEST, f"seconds_to:{rung}", rung) for rung in LADDER)
                for method in METHODS
            },
        ),
    ),
)
