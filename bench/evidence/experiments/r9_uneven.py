"""R9: one fast computer among slow ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.evidence.cells import CellSetting, block
from bench.evidence.contenders import LOCAL, SWARM_2
from bench.evidence.layout import Entry, Experiment, ResultTable, columns, rows
from bench.evidence.summary import key

SHOWN = (3.0, 2.5, 2.2, 2.0, 1.9, 1.8)
SETTINGS = {f"1:{ratio:g}": CellSetting(speed_ratio=ratio, points=80) for ratio in (1.0, 4.0, 20.0)}
WEIGHTED = replace(SWARM_2, name="swarm-2 by work", outer={**SWARM_2.outer, "weights": "work"})
METHODS = (LOCAL, SWARM_2, WEIGHTED)
PREFIX = "fast_seconds_to:"


def _against_alone(entries: Sequence[Entry]) -> list[Entry]:
    """Add ratios of the fast peer's times in the swarm to its times alone, for the same seed and setting.

    ``fast_ratio:L`` is the ratio at one loss, ``fast_delay`` the largest ratio, and ``fast_never`` the number of losses
    that the peer reaches alone and never in the swarm.
    """
    alone = {_place(each): each["headline"] for each in entries if each["contender"] == LOCAL.name}
    made: list[Entry] = []
    for entry in entries:
        mine = entry["headline"]
        times = {name: at for name, at in alone.get(_place(entry), {}).items() if name.startswith(PREFIX) and at > 0}
        ratios = {name: mine[name] / at for name, at in times.items() if name in mine}
        more = {f"fast_ratio:{rung}": ratios[f"{PREFIX}{rung}"] for rung in SHOWN if f"{PREFIX}{rung}" in ratios}
        if times:
            more["fast_never"] = len(times) - len(ratios)
        if ratios:
            more["fast_delay"] = max(ratios.values())
        made.append({**entry, "headline": {**mine, **more}})
    return made


def _place(entry: Entry) -> tuple[str, int]:
    return key(entry["setting"]), entry["seed"]


R9 = Experiment(
    id="R9",
    question="Uneven computers: one of eight is 1, 4 or 20 times as fast",
    notes=(
        "Delay: the fast peer's time to a loss in the swarm over its time alone, at the loss where this ratio is "
        "largest. At most 1 means that it is never later; the largest of many noisy ratios easily exceeds 1.",
        "Learning rate schedules follow averaged progress, so the fast peer's is longer in a swarm than alone.",
        "By work: averages are weighted by how much each side has trained. Otherwise both sides weigh the same.",
    ),
    cells=block("R9", METHODS, SETTINGS.values(), quick=(LOCAL, SWARM_2)),
    derive=_against_alone,
    tables=(
        ResultTable(
            "Delay of the fast peer against training alone",
            rows(*METHODS),
            columns("fast_delay", SETTINGS, best="low"),
        ),
        *(
            ResultTable(
                f"The fast peer's time to a loss over its time alone, {heading}",
                rows(*METHODS[1:]),
                tuple(
                    each for rung in SHOWN for each in columns(f"fast_ratio:{rung}", {f"{rung:g}": setting}, digits=2)
                ),
            )
            for heading, setting in SETTINGS.items()
            if setting.speed_ratio > 1
        ),
        ResultTable(
            "Losses that it reaches alone and never in the swarm",
            rows(*METHODS),
            columns("fast_never", SETTINGS, digits=1),
        ),
        ResultTable("Loss, mean over all peers", rows(*METHODS), columns("loss", SETTINGS, best="low")),
    ),
)
