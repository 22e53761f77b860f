"""R10: two of eight peers are adversarial."""

from __future__ import annotations

from bench.evidence.cells import CellSetting, block
from bench.evidence.contenders import SWARM_2
from bench.evidence.layout import Experiment, ResultTable, columns, rows
from sim.scenario import Lie

LIES: tuple[Lie, ...] = ("scaled", "flipped", "stale", "random")
HONEST, LIARS = 6, 2
SETTINGS: dict[str, CellSetting] = {
    "clean": CellSetting(peers=HONEST),
    **{str(lie): CellSetting(peers=HONEST + LIARS, liars=LIARS, lie=lie) for lie in LIES},
}

R10 = Experiment(
    id="R10",
    question="Adversarial peers: two of eight send scaled, negated, old or random weights; H = 10",
    notes=(
        "Loss is the mean of the honest peers; clean is six honest peers alone, with the same budget.",
        "Scaled: times 3. Stale: their first payload again and again. Random: normally distributed, of the true "
        "length. Otherwise they behave like honest peers.",
        "Lies within the clipping radius are not covered (docs/SECURITY.md).",
    ),
    cells=block("R10", (SWARM_2,), SETTINGS.values()),
    tables=(ResultTable("Honest peers' loss", rows(SWARM_2), columns("loss", SETTINGS)),),
)
