"""R9: uneven computers in one swarm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bench.evidence.cells import ALONE, FINAL_SEEDS, CellSetting, block
from bench.evidence.contenders import LOCAL, SWARM_2, SWARM_BY_SPEED, SWARM_EQUAL
from bench.evidence.headline import LADDER
from bench.evidence.layout import Column, Entry, Experiment, ResultTable, TableRow, columns, rows

SHOWN = (2.5, 2.2, 2.0, 1.9, 1.8, 1.7)
"""Losses in the tables. Higher ones are passed between the first points of a curve."""
EVEN = CellSetting(points=150)
SETTINGS = {
    "even": EVEN,
    "1:4": replace(EVEN, speeds=(1.0,) * 7 + (4.0,)),
    "1:20": replace(EVEN, speeds=(1.0,) * 7 + (20.0,)),
    "1:1:4:20, two of each": replace(EVEN, speeds=(1.0,) * 4 + (4.0,) * 2 + (20.0,) * 2),
}
ONE = replace(ALONE, points=400)
"""More points, since the run takes up to 27 times as long as those of a swarm."""
METHODS = (SWARM_2, SWARM_EQUAL, SWARM_BY_SPEED)

QUESTIONS = {
    "fast": "The fastest computer's time to a loss over its time alone",
    "slow": "The slowest computers' time to a loss over their time alone",
    "swarm": "Time to a mean loss of all peers over the fastest computer's time alone",
}


def _against_alone(entries: Sequence[Entry]) -> list[Entry]:
    """Add times to losses over the times of one computer alone, for the same seed, and losses over the even swarm's.

    ``fast:L``, ``slow:L`` and ``swarm:L`` are the ratios of ``QUESTIONS`` at a loss L, ``fast_worst`` etc. the largest
    of them, ``fast_never`` etc. the number of losses that are reached alone only. A computer's time alone is inversely
    proportional to its speed.
    """
    alone = {each["seed"]: each["headline"] for each in entries if each["contender"] == LOCAL.name}
    even = {
        (each["contender"], each["seed"]): each["headline"].get("loss")
        for each in entries
        if "speeds" not in each["setting"]
    }
    made: list[Entry] = []
    for entry in entries:
        mine, reference = entry["headline"], even.get((entry["contender"], entry["seed"]))
        more: dict[str, float] = {}
        if entry["contender"] != LOCAL.name and entry["seed"] in alone:
            more = _ratios(mine, alone[entry["seed"]], entry["setting"].get("speeds", [1.0]))
        if reference and "loss" in mine:
            more["over_even"] = mine["loss"] / reference
        made.append({**entry, "headline": {**mine, **more}})
    return made


def _ratios(mine: Mapping[str, float], alone: Mapping[str, float], speeds: Sequence[float]) -> dict[str, float]:
    times = {"fast": ("fast_", max(speeds)), "slow": ("slow_", min(speeds)), "swarm": ("", max(speeds))}
    found: dict[str, float] = {}
    for question, (prefix, speed) in times.items():
        reached = [rung for rung in LADDER if rung <= SHOWN[0] and alone.get(f"seconds_to:{rung}", 0.0) > 0]
        ratios = {
            rung: mine[f"{prefix}seconds_to:{rung}"] * speed / alone[f"seconds_to:{rung}"]
            for rung in reached
            if f"{prefix}seconds_to:{rung}" in mine
        }
        found |= {f"{question}:{rung}": ratio for rung, ratio in ratios.items()}
        found[f"{question}_never"] = len(reached) - len(ratios)
        if ratios:
            found[f"{question}_worst"] = max(ratios.values())
    return found


def _tables(question: str, title: str) -> tuple[ResultTable, ...]:
    return (
        ResultTable(
            f"{title}: the largest ratio, and the number of losses reached alone only",
            rows(*METHODS),
            tuple(
                column
                for heading, each in SETTINGS.items()
                for column in (
                    Column(heading, f"{question}_worst", each, digits=2, best="low"),
                    Column("never", f"{question}_never", each, digits=1),
                )
            ),
        ),
        *(
            ResultTable(
                f"{title}, {heading}",
                rows(*METHODS),
                tuple(Column(f"{rung:g}", f"{question}:{rung}", each, digits=2) for rung in SHOWN),
            )
            for heading, each in SETTINGS.items()
            if each.speeds
        ),
    )


R9 = Experiment(
    id="R9",
    question="Uneven computers: one of eight is 4 or 20 times as fast, or speeds are 1, 1, 4 and 20",
    notes=(
        "All runs end at the same tokens of all peers together, those alone too: one computer alone has the budget of "
        "the swarm, and its schedule. At most 1 means never later; the largest of many noisy ratios easily exceeds 1.",
        "A swarm ends at a higher loss than one computer that makes all steps itself; losses below that are in the "
        "columns never.",
        "The inner rate is tuned for as many equal computers as the uneven ones are worth, (sum s)^2 / sum s^2: 5.3, "
        "1.8 and 3.2, of which R2's tuning has 4, 2 and 4.",
        "swarm-2 weighs averages by the tokens per second of both sides; equal: both sides count the same; H by speed: "
        "slower computers make fewer inner steps, so that outer steps take equally long. These two have one seed.",
    ),
    cells=(
        *block("R9", (LOCAL,), (ONE,)),
        *block("R9", (SWARM_2,), SETTINGS.values()),
        *block("R9", METHODS[1:], SETTINGS.values(), seeds=FINAL_SEEDS[:1]),
    ),
    derive=_against_alone,
    tables=(
        *(table for question, title in QUESTIONS.items() for table in _tables(question, title)),
        ResultTable(
            "Loss over that of the even swarm, equal tokens",
            rows(*METHODS),
            columns("over_even", {heading: each for heading, each in SETTINGS.items() if each.speeds}, digits=4),
        ),
        ResultTable("Loss, mean over all peers", rows(*METHODS), columns("loss", SETTINGS, best="low")),
        ResultTable(
            "Seconds of one computer of speed 1 to each loss, alone",
            (TableRow(LOCAL.name),),
            tuple(Column(f"{rung:g}", f"seconds_to:{rung}", ONE, digits=0) for rung in SHOWN),
        ),
    ),
)
