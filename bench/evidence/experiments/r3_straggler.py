"""R3: one slow line among eight (GASLoC, figure 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from bench.evidence.blocks import block
from bench.evidence.cells import Setting
from bench.evidence.contenders import DDP, DILOCO, FACTORED, GASLOC, GASLOC_2, SWARM_2
from bench.evidence.headline import LADDER
from bench.evidence.layout import Column, Entry, Experiment, Panel, Point, Table, rows

SHARES = (1.0, 0.2, 0.1)
POINTS = 40
SETTINGS = tuple(
    Setting(inner_steps=30, steps=3_210, exchange_steps=5 / 3, straggler=share, points=POINTS) for share in SHARES
)
"""H = 30 and s / t = 5 / 3: with these GASLoC's rule yields the H of 15 and 1 that its paper reports at 10 %."""

SHOWN = (2.2, 2.0, 1.9, 1.85, 1.8)
"""Rungs of the ladder beside the one that the goal is judged at, which the worst method sets."""

METHODS = (DILOCO, GASLOC, GASLOC_2, FACTORED, SWARM_2)
EVERY_STEP = tuple(replace(setting, inner_steps=1) for setting in SETTINGS)


def _same_loss(entries: Sequence[Entry]) -> list[Entry]:
    """Adds ``seconds_to_target``: simulated seconds to the lowest rung of the ladder that every run has reached."""
    runs = [each["headline"] for each in entries]
    common = [rung for rung in LADDER if all(f"seconds_to:{rung}" in run for run in runs)]
    if not common:
        return list(entries)
    target = min(common)
    return [
        {
            **each,
            "headline": {
                **each["headline"],
                "target": target,
                "seconds_to_target": each["headline"][f"seconds_to:{target}"],
            },
        }
        for each in entries
    ]


def _columns(figure: str, best: Literal["low", "high"], digits: int) -> tuple[Column, ...]:
    return tuple(
        Column(f"at {100 * each.straggler:.0f} %", figure, each, digits=digits, best=best) for each in SETTINGS
    )


_ROWS = (*rows(DDP, inner_steps=1), *rows(*METHODS))

R3 = Experiment(
    id="R3",
    question="A straggler: one of eight peers has 10 or 20 % of the others' bandwidth",
    notes=(
        "H = 30; all parameters in fp32 take 5/3 inner steps over a full line. gasloc follows its rule for the "
        "straggler's H.",
        "Seconds are simulated; one inner step takes one. The target is the lowest loss of a fixed ladder that every"
        " run of this table reached.",
        "ddp, whose H is 1, has steps of one second as well, since its seconds are compared with the others'.",
        "gasloc's rule shortens the straggler's H so that nobody waits, by a formula in which the straggler's "
        "transfer begins when its own phase ends; R4 computes 95 % for the others by it. Here, as over the real "
        "network, a swap begins when both sides are there, and the shorter phase mostly lets the straggler wait: so "
        "the others compute less than R4 says. Of all methods this hurts gasloc alone.",
        "Fast lines beside one slow one are where waiting for all is worst; nobody is slow in computing here.",
    ),
    cells=(
        *block("R3", METHODS, (SETTINGS[2],), tier=2, quick=(DILOCO, GASLOC, SWARM_2)),
        *block("R3", (SWARM_2,), (SETTINGS[0],), tier=2),
        *block("R3", (DILOCO, GASLOC, GASLOC_2, FACTORED), (SETTINGS[0],), tier=4),
        *block("R3", METHODS, (SETTINGS[1],), tier=4),
        *block("R3", (DDP,), EVERY_STEP, tier=4),
    ),
    derive=_same_loss,
    figures=("loss", "simulated_s", "seconds_to_target", "target", "others_utilization", "utilization"),
    keeps=("seconds_to:",),
    tables=(
        Table("Simulated seconds to the same loss", _ROWS, _columns("seconds_to_target", "low", 0)),
        Table(
            "Share of their time that peers with a full line compute", _ROWS, _columns("others_utilization", "high", 3)
        ),
        Table(
            "Simulated seconds to each loss, straggler at 10 %",
            rows(*METHODS),
            tuple(Column(f"{rung:g}", f"seconds_to:{rung}", SETTINGS[2], digits=0) for rung in SHOWN),
        ),
        Table("Loss at equal tokens", _ROWS, _columns("loss", "low", 3)),
    ),
    panels=tuple(
        Panel(
            f"straggler at {100 * setting.straggler:.0f} %",
            "simulated seconds",
            "loss",
            {
                each.name: tuple(Point(each.name, setting, f"seconds_to:{rung}", rung) for rung in LADDER)
                for each in METHODS
            },
        )
        for setting in SETTINGS[1:]
    ),
)
