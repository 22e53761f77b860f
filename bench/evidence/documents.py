"""What goes into docs/results: a small JSON file for each experiment, one for the tuning, one for the summary of all.
Pure, but for reading and writing these files.

An experiment's document has one entry for each cell, one line each. What is planned and was not run again keeps the
entry that it has, unless another scenario is wanted in its place by now: what ran with the numbers of an older tuning
goes, and so does what is no longer planned. While a method's tuning is not complete, nothing else is wanted yet.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.evidence.cells import Cell
from bench.evidence.identity import cost_digest, scenario_digest
from bench.evidence.layout import Entry, Experiment
from bench.evidence.plan import Results, choice_for
from bench.evidence.scenario import scenario
from bench.evidence.store import Record, Store
from p2ptrain.files import replace

VERSION = 1

Origin = dict[str, Any]
"""What an entry says of the run behind it."""

Builds = dict[str, Mapping[str, str]]
"""Commit, date and machine of each code."""


def document(
    experiment: Experiment,
    store: Store,
    results: Results,
    old: Mapping[str, Any] | None,
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """``R*.json`` of one experiment: from the store, and where that has nothing, from the document that there is."""
    if experiment.computed is not None:
        build = {cost_digest(): {"commit": environment["commit"], "date": environment["date"]}}
        made = {"version": VERSION, "experiment": experiment.id, "builds": build, "planned": 0}
        return {**made, "cells": experiment.computed(), "checks": [asdict(each) for each in experiment.checks()]}
    kept = {_place(entry): entry for entry in (old or {}).get("cells", ())}
    entries: list[Entry] = []
    builds: Builds = {}
    for cell in experiment.cells:
        entry, record = _found(experiment, cell, store, results)
        if entry is None:
            entry = kept.get(_place_of(cell))
            if entry is None or _digest_of(cell, results) not in (None, entry["scenario"]):
                continue
            builds[entry["code"]] = (old or {}).get("builds", {}).get(entry["code"], {})
        elif record is not None:
            builds[record.code] = later(builds.get(record.code), record)
        entries.append(entry)
    return {
        "version": VERSION,
        "experiment": experiment.id,
        "builds": builds,
        "planned": len(experiment.cells),
        "cells": entries,
    }


def _found(
    experiment: Experiment, cell: Cell, store: Store, results: Results
) -> tuple[Entry, Record] | tuple[None, None]:
    choice = choice_for(cell, results)
    wanted = None if choice is None else scenario(cell, choice)
    record = None if wanted is None else store.find(wanted)
    if choice is None or wanted is None or record is None:
        return None, None
    entry = {
        "contender": cell.contender.name,
        "setting": cell.setting.key(),
        "seed": cell.seed,
        "recipe": choice.recipe,
        "eta": choice.learning_rate,
        "mu": choice.momentum,
        "headline": {name: number for name, number in record.headline.items() if experiment.kept(name)},
        **origin(record),
    }
    return entry, record


def origin(record: Record) -> Origin:
    """By what ``adopted`` knows a published run again."""
    said: Origin = {
        "seconds": round(record.seconds, 1),
        "scenario": scenario_digest(record.scenario),
        "code": record.code,
    }
    if record.confirmed:
        said["confirmed"] = list(record.confirmed)
    if record.failure:
        said["failure"] = record.failure
    return said


def _digest_of(cell: Cell, results: Results) -> str | None:
    """Of the scenario that is wanted now; None while the cell waits for its tuning."""
    choice = choice_for(cell, results)
    return None if choice is None else scenario_digest(scenario(cell, choice))


def later(known: Mapping[str, str] | None, record: Record) -> Mapping[str, str]:
    """The build of one code by its last record."""
    if known is not None and known["date"] >= record.date:
        return known
    return {"commit": record.commit, "date": record.date, "machine": record.machine}


def _place(entry: Entry) -> tuple[str, str, int]:
    return entry["contender"], json.dumps(entry["setting"], sort_keys=True), entry.get("seed", 0)


def _place_of(cell: Cell) -> tuple[str, str, int]:
    return cell.contender.name, json.dumps(cell.setting.key(), sort_keys=True), cell.seed


def read(path: Path) -> dict[str, Any] | None:
    """A document; None when there is none of this version."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("version") == VERSION else None


def write(path: Path, made: Mapping[str, Any]) -> None:
    """Whole or not at all; a file that would stay the same is left alone."""
    data = text(made).encode()
    if path.exists() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, data)


def text(made: Mapping[str, Any]) -> str:
    """JSON with one line for each element of a list of objects, so that a changed cell is a changed line."""
    lines = ["{"]
    for index, (name, value) in enumerate(made.items()):
        comma = "," if index < len(made) - 1 else ""
        lines += [f"{' '}{json.dumps(name)}: {line}" if first else line for first, line in _value(value, comma)]
    return "\n".join([*lines, "}", ""])


def _value(value: Any, comma: str) -> Iterable[tuple[bool, str]]:
    listed = isinstance(value, Sequence) and not isinstance(value, str) and value and isinstance(value[0], Mapping)
    keyed = isinstance(value, Mapping) and value and all(isinstance(each, (Mapping, list)) for each in value.values())
    if listed or keyed:
        elements = [_line(each) for each in value] if listed else [f"{_line(k)}: {_line(v)}" for k, v in value.items()]
        opened, closed = ("[", "]") if listed else ("{", "}")
        yield True, opened
        yield from ((False, f"  {each}{',' if at < len(elements) - 1 else ''}") for at, each in enumerate(elements))
        yield False, f" {closed}{comma}"
    else:
        yield True, f"{_line(value)}{comma}"


def _line(value: Any) -> str:
    return json.dumps(value, allow_nan=False)
