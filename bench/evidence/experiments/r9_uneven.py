"""R9: one fast computer among slow ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.evidence.blocks import block
from bench.evidence.cells import Setting
from bench.evidence.contenders import LOCAL, SWARM_2
from bench.evidence.layout import Column, Entry, Experiment, Table, rows

SHOWN = (3.0, 2.5, 2.2, 2.0, 1.9, 1.8)
"""Losses at which the delay is shown by itself."""
RATIOS = (1.0, 4.0, 20.0)
POINTS = 80
SETTINGS = tuple(Setting(speed_ratio=ratio, points=POINTS) for ratio in RATIOS)
WEIGHTED = replace(SWARM_2, name="swarm-2 by work", outer={**SWARM_2.outer, "weights": "work"})
METHODS = (LOCAL, SWARM_2, WEIGHTED)


def _against_alone(entries: Sequence[Entry]) -> list[Entry]:
    """Adds ``fast_delay``: the worst ratio, over the losses that the fast peer reaches alone, of its time in the swarm
    to its time alone; same seed, same setting. Above 1, training together made it later at some loss. A loss that it
    reaches alone and never in the swarm is no ratio; ``fast_never`` counts those."""
    alone = {_place(each): each["headline"] for each in entries if each["contender"] == "local"}
    made: list[Entry] = []
    for each in entries:
        reference = alone.get(_place(each), {})
        pairs = [
            (each["headline"].get(name), seconds)
            for name, seconds in reference.items()
            if name.startswith("fast_seconds_to:")
        ]
        ratios = [mine / seconds for mine, seconds in pairs if mine is not None and seconds > 0]
        more = {"fast_delay": max(ratios)} if ratios else {}
        for rung in SHOWN:
            mine, seconds = (run.get(f"fast_seconds_to:{rung}") for run in (each["headline"], reference))
            if mine is not None and seconds:
                more[f"fast_ratio:{rung}"] = mine / seconds
        if pairs:
            more["fast_never"] = sum(mine is None for mine, _ in pairs)
        made.append({**each, "headline": {**each["headline"], **more}})
    return made


def _place(entry: Entry) -> tuple[str, int]:
    return str(sorted(entry["setting"].items())), entry["seed"]


R9 = Experiment(
    id="R9",
    question="Uneven computers: one of eight is 1, 4 or 20 times as fast",
    notes=(
        "Delay: the fast peer's time to a loss, over its time to that loss alone; the worst over a ladder of losses."
        " At most 1 means never later; the worst of many ratios, each with its luck, is above 1 more easily than any"
        " of them. Schedules run over averaged progress, so the fast peer's is longer in a swarm than alone. The "
        "last point of a curve, measured on another part of the text, is left out.",
        "By work: averages weighted by how much each side has trained; equal: half and half.",
    ),
    cells=(
        *block("R9", METHODS, (SETTINGS[1],), tier=2, quick=(LOCAL, SWARM_2)),
        *block("R9", METHODS, (SETTINGS[0], SETTINGS[2]), tier=4),
    ),
    derive=_against_alone,
    figures=("fast_delay", "fast_never", *(f"fast_ratio:{rung}" for rung in SHOWN), "loss", "disagreement"),
    keeps=("fast_seconds_to:",),
    tables=(
        Table(
            "Delay of the fast peer against training alone",
            rows(*METHODS),
            tuple(Column(f"1:{each.speed_ratio:g}", "fast_delay", each, best="low") for each in SETTINGS),
        ),
        *(
            Table(
                f"The fast peer's time to a loss over its time alone, 1:{each.speed_ratio:g}",
                rows(*METHODS[1:]),
                tuple(Column(f"{rung:g}", f"fast_ratio:{rung}", each, digits=2) for rung in SHOWN),
            )
            for each in SETTINGS[1:]
        ),
        Table(
            "Losses that it reaches alone and never in the swarm",
            rows(*METHODS),
            tuple(Column(f"1:{each.speed_ratio:g}", "fast_never", each, digits=1) for each in SETTINGS),
        ),
        Table(
            "Loss, mean over all peers",
            rows(*METHODS),
            tuple(Column(f"1:{each.speed_ratio:g}", "loss", each, best="low") for each in SETTINGS),
        ),
    ),
)
