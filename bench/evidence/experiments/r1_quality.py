"""R1: loss at equal tokens."""

from __future__ import annotations

from bench.evidence.cells import CENTRAL, CellSetting, block
from bench.evidence.contenders import (
    AD_PSGD,
    CONFIRMED,
    DDP,
    DILOCO,
    DPSGD,
    FACTORED,
    GASLOC,
    GASLOC_2,
    LOCAL,
    NOLOCO,
    ONE_CELL,
    SWARM_2,
    SWARM_2_HALF_MODULAR4,
    SWARM_2_MODULAR4,
    SWARM_BLOCKING,
    SWARM_BOTH,
    SWARM_GRADIENTS,
    SWARM_HALF,
    SWARM_INT8,
    SWARM_MODULAR4,
    SWARM_SLOW,
)
from bench.evidence.layout import (
    AVERAGED,
    BITS,
    DISAGREEMENT,
    EXCHANGES,
    LOSS,
    Column,
    Experiment,
    PlotPanel,
    PlotPoint,
    ResultTable,
    columns,
    rows,
)

PEERS = (4, 8, 16)
STEPS = {1: 1_000, 10: 3_200, 30: 3_210, 100: 10_000}
"""Inner steps of each peer by H: a third of the tokens of H = 10 and 30 for H = 1, three times as many for H = 100."""


def setting(peers: int, inner_steps: int) -> CellSetting:
    """Return the setting of one column."""
    return CellSetting(peers=peers, inner_steps=inner_steps, steps=STEPS[inner_steps])


DECISIVE = (CENTRAL, setting(8, 30))
ELSEWHERE = tuple(
    each for peers in PEERS for inner_steps in STEPS if (each := setting(peers, inner_steps)) not in DECISIVE
)
NON_IID = tuple(
    CellSetting(inner_steps=inner_steps, steps=STEPS[inner_steps], data="shards") for inner_steps in (10, 30)
)

RIVALS = (DILOCO, NOLOCO, GASLOC, FACTORED, SWARM_2)
"""Methods in all of these settings; swarm-2 was the best form of ours where all forms were run."""
EQUAL_TRAFFIC = (SWARM_SLOW, SWARM_BLOCKING, SWARM_2, GASLOC_2, SWARM_HALF)
"""Separate the method from the number of exchanges, from their bytes and from waiting for them."""
STREAMS = (SWARM_BOTH, SWARM_GRADIENTS)
CODECS = (SWARM_INT8, SWARM_MODULAR4, SWARM_2_MODULAR4, SWARM_2_HALF_MODULAR4)
VARIANTS = (*EQUAL_TRAFFIC, *STREAMS, *CODECS)
ONCE_EVERY_STEP = (DDP, DPSGD, AD_PSGD)


def _loss_table(peers: int) -> ResultTable:
    shown: list[Column] = []
    for inner_steps in STEPS:
        at = setting(peers, inner_steps)
        shown.append(Column(f"H = {inner_steps}", "loss", at, best="low"))
        if peers == 8:
            shown.append(Column("exchanges", "exchanges_per_outer_step", at, digits=2))
            shown.append(Column("bits", "bits_per_parameter", at, digits=1))
    everyone = rows(*CONFIRMED, *VARIANTS) if peers == 8 else rows(*RIVALS)
    return ResultTable(f"Loss on the test split, N = {peers}", everyone, tuple(shown))


R1 = Experiment(
    id="R1",
    question="Loss at equal tokens",
    notes=(
        "Nats per byte: mean over the peers' own models at the end of training. Compare rows within a column: columns "
        "differ in tokens.",
        "Every column uses the numbers tuned at N = 8, H = 10. At H = 1 they decide more than the method does (R2).",
        "Not equal tuning: the form of swarm (mixing fast weights in mid-phase, the share that x follows, the number "
        "of exchanges) was chosen with some ninety runs on the validation split, seeds 0 to 2, after single runs on "
        "the test split had shown its earlier form behind DiLoCo (1.751 against 1.734). The momenta of the grid were "
        "chosen with seed 1, which also is a seed of the final numbers. R11 has seeds that chose nothing.",
        "Exchanges per outer step count those that a peer starts and those that it answers; global averages do not "
        "count. Bits are per outer step, so methods with H = 1 send ten times as often for the same tokens as at H = "
        "10.",
        "Rows for equal traffic: swarm half sends as many bytes as gasloc, swarm makes as many exchanges as gasloc-2. "
        '"swarm, blocking" (recipe gasloc) is not a published method; it shows what asynchrony costs.',
        "swarm and factored_gossip are judged before the average that would follow their last step, the others after "
        "theirs. This is to the disadvantage of swarm.",
        "With three seeds, two standard errors are p = .12 to .18 for one comparison, and the tables make many.",
        "swarm g (pseudo-gradients alone) never brings the peers together again: all nine points of its grid diverged.",
        "A dash marks a run that is planned and not made. One model of 123,000 parameters.",
    ),
    cells=(
        *block("R1", (*CONFIRMED, *EQUAL_TRAFFIC), (CENTRAL,), quick=CONFIRMED),
        *block("R1", (*CONFIRMED, *EQUAL_TRAFFIC), (DECISIVE[1],)),
        *block("R1", (*STREAMS, *CODECS, LOCAL, *ONE_CELL), (CENTRAL,), quick=(LOCAL,)),
        *block("R1", (*STREAMS, *CODECS), (DECISIVE[1],)),
        *block("R1", ONCE_EVERY_STEP, (CellSetting(inner_steps=1),)),
        *block("R1", RIVALS, (*ELSEWHERE, *NON_IID)),
    ),
    tables=(
        ResultTable(
            "Loss over that of diloco, seed by seed, N = 8",
            rows(*(each for each in (*CONFIRMED, *VARIANTS) if each is not DILOCO)),
            columns("loss", {f"H = {each.inner_steps}": each for each in DECISIVE}, digits=4),
            over="diloco",
        ),
        *(_loss_table(peers) for peers in PEERS),
        ResultTable(
            "Non-IID data, N = 8: each peer reads its own stretch of the corpus",
            rows(*RIVALS),
            columns("loss", {f"H = {each.inner_steps}": each for each in NON_IID}, best="low"),
        ),
        ResultTable(
            "All methods at N = 8, H = 10 (ddp, dpsgd, ad_psgd: H = 1)",
            rows(*CONFIRMED, *VARIANTS, LOCAL, *ONE_CELL) + rows(*ONCE_EVERY_STEP, inner_steps=1),
            (LOSS, AVERAGED, DISAGREEMENT, EXCHANGES, BITS),
        ),
    ),
    panels=(
        PlotPanel(
            "N = 8",
            "H",
            "loss",
            {each.name: tuple(PlotPoint(each.name, setting(8, h), h, "loss") for h in STEPS) for each in RIVALS},
            logarithmic=True,
        ),
        PlotPanel(
            "H = 10",
            "peers",
            "loss",
            {each.name: tuple(PlotPoint(each.name, setting(n, 10), n, "loss") for n in PEERS) for each in RIVALS},
            logarithmic=True,
        ),
    ),
)
