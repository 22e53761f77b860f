"""R4: compute utilization by closed formulas, for models that are too large to simulate."""

from __future__ import annotations

from bench.evidence.layout import Experiment, PlotPanel, PlotPoint, ResultTable, TableRow, columns
from bench.evidence.published import CONTENDERS, HOME, MEGABITS, MODELS, STRAGGLERS, CostColumn, checks, entries

_ROWS = tuple(TableRow(method.name) for method in CONTENDERS)
_OTHER_BITS = (" int8", " modular4", "topk", ", one swap")
_FEW_ROWS = tuple(
    row for row in _ROWS if row.contender == "swarm-2 modular4" or not row.contender.endswith(_OTHER_BITS)
)
"""Methods at their authors' bits, and the default."""
_DRAWN = (
    "ddp",
    "diloco",
    "noloco",
    "gasloc-1",
    "factored_gossip_global_none",
    "streaming_diloco",
    "sparseloco",
    "swarm",
)
_AT_HOME = CostColumn(HOME, 20)


def _heading(megabits: int) -> str:
    return f"{megabits} Mbit/s" if megabits < 1_000 else f"{megabits // 1_000} Gbit/s"


def _table(model: str, share: float) -> ResultTable:
    slow = "" if share == 1.0 else f", one straggler at {100 * share:.0f} % (share of the others)"
    lines = {_heading(megabits): CostColumn(model, megabits, share) for megabits in MEGABITS}
    everyone = _ROWS if model == "135M" and share == 1.0 else _FEW_ROWS
    return ResultTable(
        f"Utilization in %, {model}{slow}", everyone, columns("utilization", lines, scale=100, digits=1, best="high")
    )


R4 = Experiment(
    id="R4",
    question="Compute utilization, 10 Mbit/s to 10 Gbit/s",
    notes=(
        "Computed with the formulas of `bench/cost.py`: 8 peers, H = 30, each method at its authors' bits. An "
        "inner step is 16,384 tokens on one A100 at 40 % for 135M, and 65,536 on one for 1.5B and on sixteen for 70B.",
        "DiLoCo's two published percentages follow from one fitted number, the tokens of an inner step. That checks "
        "consistency only.",
        "Trainers of swarm never wait, so its utilization is 100 % by construction; exchanges that do not fit are not "
        "sent. The last tables show the share that is sent, R1 and R5 what fewer bits cost in loss.",
        "A peer of swarm starts one exchange per outer step and answers one. One swap: half of the parameters in each.",
        "Rows in int8 or modular4 (pseudo-gradients in topk) put other methods at the bits of swarm. Nobody published "
        "them.",
    ),
    computed=entries,
    checks=checks,
    tables=(
        *(_table(model, share) for share in STRAGGLERS for model in MODELS),
        ResultTable(
            f"Home line: {HOME}, H = 30, with latency and the trainer's own time",
            _ROWS,
            (
                *columns("utilization", {"utilization, %": _AT_HOME}, scale=100, digits=1, best="high"),
                *columns("delivered", {"exchanges sent, %": _AT_HOME}, scale=100, digits=0),
            ),
        ),
        ResultTable(
            "swarm: share of its exchanges that is sent, %",
            tuple(TableRow(name) for name in ("swarm", "swarm int8", "swarm modular4", "swarm modular4, one swap")),
            columns(
                "delivered",
                {f"{model}, {_heading(each)}": CostColumn(model, each) for model in MODELS for each in MEGABITS[:3]},
                scale=100,
                digits=0,
            ),
        ),
    ),
    panels=tuple(
        PlotPanel(
            f"{model}{'' if share == 1.0 else ', one straggler'}",
            "Mbit/s",
            "utilization",
            {
                name: tuple(PlotPoint(name, CostColumn(model, each, share), each, "utilization") for each in MEGABITS)
                for name in _DRAWN
            },
            logarithmic=True,
        )
        for share in STRAGGLERS
        for model in MODELS
    ),
)
