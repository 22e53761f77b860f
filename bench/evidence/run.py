"""Runs missing cells in worker processes and keeps every result at once, in one JSON file an experiment.

A cell is done if its experiment's file has an entry with the same scenario and the fingerprint of today's code. An
interrupted run loses only the cells in progress. Cells with equal scenarios run once, also in several experiments.
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

from bench.evidence.cells import Cell, CellSetting, Choice
from bench.evidence.experiments import EXPERIMENTS
from bench.evidence.fingerprint import fingerprint
from bench.evidence.headline import headline
from bench.evidence.layout import Experiment
from bench.evidence.scenario import relative_size, scenario
from bench.evidence.tuning import choice_of
from p2ptrain.base.files import replace

UNKNOWN_CELL_S = 60.0
"""Seconds assumed for a central cell before any has finished; 25 to 60 were measured on one core."""

LONGEST_FAILURE = 500
"""Characters kept of an error message."""

WRITTEN = "written.json"
"""File that holds the fingerprint of the code with which the pages were written."""

Document = dict[str, Any]
"""JSON file of an experiment: ``builds`` (date and machine by commit), ``cells``, and perhaps ``remarks``
(text -> commits: what a reader must know of the results that these computed)."""


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


def load(folder: Path, name: str) -> Document:
    """Return the document of an experiment; an empty one if there is no file."""
    path = folder / f"{name}.json"
    if not path.exists():
        return {"experiment": name, "builds": {}, "cells": []}
    document: Document = json.loads(path.read_bytes())
    return document


def read(folder: Path, name: str) -> Document:
    """Return the document of an experiment without results of other code, which the pages still show."""
    document = load(folder, name)
    if EXPERIMENTS[name].computed is None:
        document["cells"] = [each for each in document["cells"] if each["code"] == fingerprint()]
        forget_builds(document)
    return document


def forget_builds(document: Document) -> None:
    """Remove the builds that no entry names any more, and the remarks on what they computed."""
    cells = document["cells"]
    made = {each["commit"] for each in cells if "commit" in each}
    commits = made | {each["verified"] for each in cells if "verified" in each}
    commits |= {each["lost"]["commit"] for each in cells if "lost" in each}
    document["builds"] = {commit: build for commit, build in document["builds"].items() if commit in commits}
    if "remarks" in document:
        left = {text: [each for each in them if each in made] for text, them in document.pop("remarks").items()}
        if any(left.values()):
            document["remarks"] = {text: them for text, them in left.items() if them}


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
    """Return the cells without a result whose numbers are known, in their order."""
    done: dict[str, set[tuple[str, str]]] = {}
    found = []
    for cell in cells:
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
            "inner_rate": choice.inner_rate,
            "scenario": digest(wanted),
            "code": fingerprint(),
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
    known, failed, done = _results(folder), 0, 0
    for job in jobs:
        if found := known.get(job.entry["scenario"]):
            keep(folder, job, found, environment)
            done += 1
        else:
            by_scenario.setdefault(job.entry["scenario"], []).append(job)
    futures = {pool.submit(measured, simulate, alike[0].scenario): alike for alike in by_scenario.values()}
    for future in as_completed(futures):
        result = future.result()
        for job in futures[future]:
            keep(folder, job, result, environment)
            done, failed = done + 1, failed + ("failure" in result)
            outcome = f"FAILED: {result['failure']}" if "failure" in result else f"{result['seconds']:.0f} s"
            say(f"{done}/{len(jobs)} {job.cell.name}: {outcome}")
    return failed


def _results(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the results of all experiments by scenario."""
    entries = (each for name, one in EXPERIMENTS.items() if one.cells for each in read(folder, name)["cells"])
    return {
        each["scenario"]: {"headline": each["headline"], "seconds": each["seconds"]}
        for each in entries
        if "failure" not in each
    }


def outdated(folder: Path) -> str:
    """Return how many results are of other code than today's, and what to type; "" if none is."""
    entries = [each for name, one in EXPERIMENTS.items() if one.cells for each in load(folder, name)["cells"]]
    others = [each for each in entries if each["code"] != fingerprint()]
    lost = sum(each.get("lost", {}).get("code") == fingerprint() for each in others)
    if len(others) > lost:
        return (
            f"{len(others) - lost} results are of other code than today's: make results RESULTS=--verify repeats their "
            "short runs (about a quarter of a core hour) and marks those that differ."
        )
    return f"{lost} results differ with today's code: make results computes them anew." if lost else ""


def missing(cells: Iterable[Cell], folder: Path) -> list[Cell]:
    """Return the cells without a result, also those whose numbers a missing tuning decides; equal scenarios once."""
    tuning = read(folder, "tuning")["cells"]
    chosen = list(cells)
    ready = {id(job.cell) for job in pending(chosen, folder, tuning)}
    found: dict[str, Cell] = {}
    for cell in chosen:
        choice = choice_of(cell, tuning)
        if choice is None or id(cell) in ready:
            some = choice or cell.choice or Choice(cell.contender.forms[0], 0.0, 0.0)
            found.setdefault(digest(scenario(cell, some)), cell)
    return list(found.values())


def core_hours(cells: Iterable[Cell], folder: Path) -> float:
    """Return an estimate of the time that cells take, from the seconds of finished ones."""
    entries = [each for name, one in EXPERIMENTS.items() if one.cells for each in read(folder, name)["cells"]]
    sizes = [relative_size(CellSetting(**each["setting"])) for each in entries]
    central_s = sum(each["seconds"] for each in entries) / sum(sizes) if sizes else UNKNOWN_CELL_S
    return central_s * sum(relative_size(cell.setting) for cell in cells) / 3_600


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
    numbers = (entry["recipe"], entry["eta"], entry["mu"], entry["inner_rate"]) if experiment == "tuning" else ()
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

    from sim.scenario import Scenario
    from sim.simulate import simulate

    torch.set_num_threads(1)
    report: Mapping[str, Any] = simulate(Scenario.model_validate(wanted), device="cpu").model_dump(mode="json")
    return report
