"""Table of runs: mean and spread over seeds. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.rivals.cases import RIVALS
from bench.rivals.readings import LADDER

HEADINGS = (
    "model, peers",
    "",
    "MB sent per outer step and peer",
    "outer steps a minute",
    "tokens/s of a peer",
    "blocked, %",
    "seconds to a training loss",
    "held-out loss at the end",
    "stall after kill -9, s",
    "newcomer trains after, s",
)
NOTHING = "-"

Run = Mapping[str, Any]


def merged(earlier: Sequence[Run], fresh: Sequence[Run]) -> list[Run]:
    """Return all runs; a repeated case counts once, with its last run."""
    again = [run["case"] for run in fresh]
    return [run for run in earlier if run["case"] not in again] + list(fresh)


def markdown(runs: Sequence[Run]) -> list[str]:
    """Return machines and commits, and the table, in Markdown."""
    builds = dict.fromkeys(
        f"- seed {run['case']['seed']}: {env['machine']}; {env['date'][:10]}; commit {env['commit']}"
        for run in sorted(runs, key=lambda run: run["case"]["seed"])
        for env in (run["environment"],)
    )
    table = [HEADINGS, ["---"] * len(HEADINGS), *lines(runs)]
    return [*builds, "", *(f"| {' | '.join(row)} |" for row in table)]


def lines(runs: Sequence[Run]) -> Iterator[list[str]]:
    """Yield one line for each rival at each size and number of peers."""
    places = sorted({(run["case"]["size"], run["case"]["peers"]) for run in runs})
    for size, peers in places:
        here = [run for run in runs if (run["case"]["size"], run["case"]["peers"]) == (size, peers)]
        rung = common(here)
        for rival in RIVALS:
            of_it = [run for run in here if run["case"]["rival"] == rival]
            if of_it:
                yield [
                    f"{size}, {peers}",
                    rival,
                    _cell(of_it, "bytes_per_outer_step", 1e-6, 2),
                    _cell(of_it, "outer_steps_per_minute", 1, 1),
                    _cell(of_it, "tokens_per_s", 1, 0),
                    _cell(of_it, "blocked_share", 100, 1),
                    NOTHING if rung is None else f"{rung:g}: {_cell(of_it, f'seconds_to:{rung:g}', 1, 0)}",
                    _cell(of_it, "held_out_loss", 1, 3),
                    _cell(of_it, "stall_s", 1, 1),
                    _cell(of_it, "newcomer_s", 1, 0),
                ]


def common(runs: Sequence[Run]) -> float | None:
    """Return the lowest rung that every run has reached."""
    reached = [rung for rung in LADDER if all(f"seconds_to:{rung:g}" in run for run in runs)]
    return min(reached, default=None)


def _cell(runs: Sequence[Run], name: str, scale: float, digits: int) -> str:
    """Return mean ± standard deviation, and how many runs have a value if not all do."""
    values = [scale * run[name] for run in runs if run.get(name) is not None]
    if not values:
        return NOTHING
    text = f"{statistics.fmean(values):,.{digits}f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):,.{digits}f}"
    return text if len(values) == len(runs) else f"{text} ({len(values)} of {len(runs)} runs)"
