"""Runs missing cells in worker processes and keeps every result at once, in one JSON file an experiment.

A cell is done if its experiment's file has an entry with the same scenario. An interrupted run loses only the cells in
progress. Cells with equal scenarios run once.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from bench.evidence.cells import Cell
from bench.evidence.experiments import EXPERIMENTS
from bench.evidence.headline import headline
from bench.evidence.layout import Experiment
from bench.evidence.scenario import scenario
from bench.evidence.tuning import choice_of
from p2ptrain.base.files import replace

LONGEST_FAILURE = 500
"""Characters kept of an error message."""

Document = dict[str, Any]
"""JSON file of an experiment: ``builds`` (date and machine by commit) and ``cells``."""


@dataclass(frozen=True, slots=True)
class PendingCell:
    """Cell without a result."""

    cell: Cell
    scenario: Mapping[str, Any]
    entry: Mapping[str, Any]
    """Entry without its results."""


def digest(wanted: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits that identify a scenario, whatever the order of its fields."""
    text = json.dumps(wanted, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read(folder: Path, name: str) -> Document:
    """Return the document of an experiment; an empty one if there is no file."""
    path = folder / f"{name}.json"
    if not path.exists():
        return {"experiment": name, "builds": {}, "cells": []}
    document: Document = json.loads(path.read_bytes())
    return document


def write(folder: Path, document: Document) -> None:
    """Write a document atomically. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    replace(folder / f"{document['experiment']}.json", text(document).encode())


def text(document: Document) -> str:
    """Return JSON with one line for each entry, so that a changed cell is a changed line."""

    def value(each: Any) -> str:
        if isinstance(each, list) and each:
            return "[\n" + ",\n".join(f"  {json.dumps(item, allow_nan=False)}" for item in each) + "\n ]"
        if isinstance(each, dict) and each:
            return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in each.items()) + "\n }"
        return json.dumps(each)

    return "{\n" + ",\n".join(f" {json.dumps(name)}: {value(each)}" for name, each in document.items()) + "\n}\n"


def pending(cells: Iterable[Cell], folder: Path, tuning: Sequence[Mapping[str, Any]]) -> list[PendingCell]:
    """Return the cells without a result whose numbers are known, the first seed of everything first."""
    done: dict[str, set[tuple[str, str]]] = {}
    found = []
    for cell in sorted(cells, key=lambda each: each.seed):
        if cell.experiment not in done:
            entries = read(folder, cell.experiment)["cells"]
            done[cell.experiment] = {(e["contender"], e["scenario"]) for e in entries if "failure" not in e}
        if (choice := choice_of(cell, tuning)) is None:
            continue
        wanted = scenario(cell, choice)
        entry = {
            "contender": cell.contender.name,
            "setting": cell.setting.key(),
            "seed": cell.seed,
            "recipe": choice.recipe,
            "eta": choice.learning_rate,
            "mu": choice.momentum,
            "scenario": digest(wanted),
        }
        if (entry["contender"], entry["scenario"]) not in done[cell.experiment]:
            found.append(PendingCell(cell, wanted, entry))
    return found


def run(
    jobs: Sequence[PendingCell],
    folder: Path,
    pool: Executor,
    environment: Mapping[str, str],
    say: Callable[[str], None],
    simulate: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> int:
    """Run cells and keep their results; return the number of cells that failed.

    Args:
        environment: ``commit``, ``date`` and ``machine``, kept with the results.
        say: takes a line of progress.
        simulate: scenario -> report; called in the pool.
    """
    by_scenario: dict[str, list[PendingCell]] = {}
    for job in jobs:
        by_scenario.setdefault(job.entry["scenario"], []).append(job)
    futures = {pool.submit(measured, simulate, alike[0].scenario): alike for alike in by_scenario.values()}
    failed = done = 0
    for future in as_completed(futures):
        result = future.result()
        for job in futures[future]:
            keep(folder, job, result, environment)
            done, failed = done + 1, failed + ("failure" in result)
            outcome = f"FAILED: {result['failure']}" if "failure" in result else f"{result['seconds']:.0f} s"
            say(f"{done}/{len(jobs)} {job.cell.name}: {outcome}")
    return failed


def measured(simulate: Callable[[Mapping[str, Any]], Mapping[str, Any]], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the headline of a scenario and the seconds that it took, or ``failure`` with the reason."""
    began = time.perf_counter()
    found: dict[str, Any] = {"headline": {}}
    try:
        found = {"headline": headline(simulate(wanted))}
    except Exception as error:  # a scenario that fails must not stop the others
        found["failure"] = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_FAILURE]
    return {**found, "seconds": round(time.perf_counter() - began, 1)}


def keep(folder: Path, job: PendingCell, result: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Write a result into the document of its experiment, in place of an older one of the same cell."""
    document = read(folder, job.cell.experiment)
    commit, name = environment["commit"], job.cell.experiment
    document["builds"][commit] = {"date": environment["date"], "machine": environment["machine"]}
    entries = {_place(each, name): each for each in document["cells"]}
    entries[_place(job.entry, name)] = {**job.entry, **result, "commit": commit}
    order = {_place_of(each): number for number, each in enumerate(EXPERIMENTS[name].cells)}
    document["cells"] = [entries[place] for place in sorted(entries, key=lambda each: order.get(each, len(order)))]
    write(folder, document)


def _place(entry: Mapping[str, Any], experiment: str) -> str:
    """Return what tells two entries of a document apart. In the tuning, a contender runs with many numbers."""
    numbers = (entry["recipe"], entry["eta"], entry["mu"]) if experiment == "tuning" else ()
    return json.dumps([entry["contender"], entry["setting"], entry["seed"], *numbers])


def _place_of(cell: Cell) -> str:
    numbers = astuple(cell.choice) if cell.experiment == "tuning" and cell.choice is not None else ()
    return json.dumps([cell.contender.name, cell.setting.key(), cell.seed, *numbers])


def compute(experiment: Experiment, folder: Path, environment: Mapping[str, str]) -> None:
    """Write the document of an experiment that needs no simulation, unless its numbers are there already."""
    assert experiment.computed is not None
    before, cells = read(folder, experiment.id), experiment.computed()
    checks = [asdict(each) for each in experiment.checks()]
    if before["cells"] != cells or before.get("checks") != checks:
        builds = {environment["commit"]: {"date": environment["date"]}}
        write(folder, {"experiment": experiment.id, "builds": builds, "cells": cells, "checks": checks})


def simulated(wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the report of one scenario in JSON types, using one thread of torch. Raises what the simulator raises."""
    # Imported here, so that a command that simulates nothing does not load torch.
    import torch

    from p2ptrain.sim.scenario import Scenario
    from p2ptrain.sim.simulate import simulate

    torch.set_num_threads(1)
    report: Mapping[str, Any] = simulate(Scenario.model_validate(wanted), device="cpu").model_dump(mode="json")
    return report
