"""R8: pipelines whose stages lie on different home lines, against whole peers on the same computers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.evidence.cells import FINAL_SEEDS, CellSetting, Contender, block
from bench.evidence.contenders import SWARM_MODULAR4
from bench.evidence.layout import LOSS as LOSS_AT_END
from bench.evidence.layout import Column, Entry, Experiment, ResultTable, TableRow
from bench.stage_lines import LINES_MBIT_S, StagedModel

COMPUTERS = 8
MODEL = StagedModel(width=2048, layers=20, stages=4, flop_per_s=40e12)
"""1B parameters. The simulated one has 123,000: its losses by tokens are taken for both, and the times are the large
one's."""
STEP_TOKENS = 65_536
"""Tokens of an inner step of a whole peer and of a pipeline."""
LOSS = 1.75
POINTS = 40

WHOLE = replace(SWARM_MODULAR4, name="eight whole peers")
STAGED = replace(SWARM_MODULAR4, name="two pipelines of four")


def step_s(contender: Contender, line_mbit_s: float) -> float:
    """Return the seconds of an inner step of the large model."""
    rate = MODEL.whole_tokens_per_s() if contender is WHOLE else MODEL.tokens_per_s(line_mbit_s * 1e6)
    return STEP_TOKENS / rate


def setting(contender: Contender, line_mbit_s: float) -> CellSetting:
    """Return the cell on these lines. Each stage sends its own part of the weights, all at once."""
    lines, peers = (1, COMPUTERS) if contender is WHOLE else (MODEL.stages, COMPUTERS // MODEL.stages)
    exchange_s = 32 * MODEL.parameters / (lines * line_mbit_s * 1e6)
    steps = float(f"{exchange_s / step_s(contender, line_mbit_s):.3g}")
    return CellSetting(peers=peers, inner_steps=30, points=POINTS, exchange_steps=steps)


def _hours(entries: Sequence[Entry]) -> list[Entry]:
    """Add the hours of the large model until the loss, on each line that a cell stands for.

    Where the line limits a pipeline, its inner steps and its exchanges take as many times as long on a slower line, so
    that one cell stands for several lines.
    """
    made: list[Entry] = []
    for each in entries:
        steps, found = each["headline"].get(f"seconds_to:{LOSS}"), {}
        for contender in (WHOLE, STAGED):
            for line in LINES_MBIT_S:
                is_it = (each["contender"], each["setting"]) == (contender.name, setting(contender, line).key())
                if is_it and steps is not None:
                    found[f"hours_at:{line}"] = steps * step_s(contender, line) / 3_600
        made.append({**each, "headline": {**each["headline"], **found}})
    return made


CELLS = tuple((contender, setting(contender, line)) for line in LINES_MBIT_S for contender in (WHOLE, STAGED))

R8 = Experiment(
    id="R8",
    question=f"Hours to a loss of {LOSS}: eight computers as whole peers, or as two pipelines over home lines",
    notes=(
        "Eight computers of 40 TFLOP/s and a model of 1B parameters, d 2048, which each of them could hold. A pipeline "
        "has four stages of five layers and sends int8 over the line; 65,536 tokens an inner step, H = 30.",
        "Losses by tokens are those of 123,000 parameters; seconds are arithmetic (bench/stage_lines.py). One seed.",
        "To the pipelines' advantage, activations leave the line free for exchanges, latency costs nothing, nobody "
        "leaves, and no stage lies.",
    ),
    cells=tuple(
        cell
        for number, (contender, where) in enumerate(CELLS)
        if (contender, where) not in CELLS[:number]
        for cell in block("R8", (contender,), (where,), seeds=FINAL_SEEDS[:1])
    ),
    derive=_hours,
    tables=tuple(
        ResultTable(
            f"{line:,} Mbit/s up and down",
            tuple(TableRow(who.name, setting(who, line).key()) for who in (WHOLE, STAGED)),
            (Column(f"hours to {LOSS}", f"hours_at:{line}", digits=1), LOSS_AT_END),
            row_heading="eight computers",
        )
        for line in LINES_MBIT_S
    ),
)
