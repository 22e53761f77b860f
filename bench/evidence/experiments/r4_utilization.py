"""R4: how much of their time trainers compute, for models that nobody can simulate here. No cell is run for it."""

from __future__ import annotations

from bench.evidence.layout import Column, Experiment, Panel, Point, Row, Table
from bench.evidence.published import CONTENDERS, HOME, MEGABITS, MODELS, STRAGGLERS, Line, checks, entries

_ROWS = tuple(Row(method.name) for method in CONTENDERS)
_AT_OTHERS_BITS = (" int8", " modular4", "topk", ", one swap")
_FEW_ROWS = tuple(
    row for row in _ROWS if row.contender == "swarm-2 modular4" or not row.contender.endswith(_AT_OTHERS_BITS)
)
"""Everybody at the authors' bits, and the default."""
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


def _heading(megabits: int) -> str:
    return f"{megabits} Mbit/s" if megabits < 1_000 else f"{megabits // 1_000} Gbit/s"


def _table(model: str, share: float) -> Table:
    slow = "" if share == 1.0 else f", one straggler at {100 * share:.0f} % (the others' share)"
    return Table(
        f"Utilization in %, {model}{slow}",
        _ROWS if model == "135M" and share == 1.0 else _FEW_ROWS,
        tuple(
            Column(_heading(megabits), "utilization", Line(model, megabits, share), scale=100, digits=1, best="high")
            for megabits in MEGABITS
        ),
    )


R4 = Experiment(
    id="R4",
    question="Compute utilization, 10 Mbit/s to 10 Gbit/s",
    notes=(
        "From formulas (`p2ptrain/sim/cost.py`), not from runs: 8 peers, H = 30, each method at its authors' bits. A "
        "peer's inner step: 16,384 tokens on one A100 at 40 % for 135M, 65,536 on one for 1.5B and on 16 for 70B.",
        "DiLoCo's two published percentages follow from one fitted number, the tokens of an inner step (STEP_TOKENS in "
        "`bench/evidence/published.py`): two equations, one unknown. That is a check of consistency, and no more.",
        "swarm is at 100 % by construction, since its trainers wait for nobody: what its line cannot carry is not "
        "sent. The last table has the share that is sent; what a lower share costs in loss is for R1 and R5 to say.",
        'A peer of swarm asks for one exchange an outer step and answers one: two swaps. "One swap" has half the '
        "parameters in each of them. swarm itself is in fp32.",
        "Another number of bits is a shift along the bandwidth axis: rows in int8 are the same methods at the bits of "
        '"swarm int8", those in modular4 (pseudo-gradients in topk) at the bits of "swarm modular4", so that codecs do '
        "not decide between methods. Nobody published them.",
    ),
    computed=entries,
    checks=checks,
    figures=("utilization", "delivered"),
    tables=(
        *(_table(model, share) for share in STRAGGLERS for model in MODELS),
        Table(
            f"The goal's line: {HOME}, H = 30, latency and the trainer's own time counted",
            _ROWS,
            (
                Column("utilization, %", "utilization", Line(HOME, 20), scale=100, digits=1, best="high"),
                Column("sent of its exchanges, %", "delivered", Line(HOME, 20), scale=100, digits=0),
            ),
        ),
        Table(
            "swarm: sent of its exchanges, in %",
            tuple(Row(name) for name in ("swarm", "swarm int8", "swarm modular4", "swarm modular4, one swap")),
            tuple(
                Column(f"{model}, {_heading(megabits)}", "delivered", Line(model, megabits), scale=100, digits=0)
                for model in MODELS
                for megabits in MEGABITS[:3]
            ),
        ),
    ),
    panels=tuple(
        Panel(
            f"{model}{'' if share == 1.0 else ', one straggler'}",
            "Mbit/s",
            "utilization",
            {
                name: tuple(Point(name, Line(model, megabits, share), megabits, "utilization") for megabits in MEGABITS)
                for name in _DRAWN
            },
            logarithmic=True,
        )
        for share in STRAGGLERS
        for model in MODELS
    ),
)
