"""Where results lie: one JSON file for each scenario, whole or absent.

A file is named after its scenario's digest, so the same run asked for by two experiments is done once, and a cell that
was defined anew never meets an old result.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from bench.evidence.identity import scenario_digest
from p2ptrain.files import replace

VERSION = 1
"""Of a record's layout. Records of another version do not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is known of one run."""

    name: str
    """Of the cell that asked first; for people."""
    scenario: Mapping[str, Any]
    headline: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None
    """Why there is no headline; None when the run ended."""
    code: str
    """Digest of the sources that decide the numbers."""
    commit: str
    machine: str
    date: str
    seconds: float
    """Of real time; 0: not known."""
    confirmed: Sequence[str] = ()
    """Digests of later code that yields the same (``confirm``)."""

    @property
    def loss(self) -> float | None:
        """None when the run failed or diverged."""
        return self.headline.get("loss")


class Store:
    """Records in a folder. Each file is read once: what another process writes meanwhile is not seen.

    Args:
        folder: created when the first record is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Path, Record | None] = {}

    def find(self, scenario: Mapping[str, Any]) -> Record | None:
        """The record of this scenario; None when there is none that can be read."""
        path = self._path(scenario)
        if path not in self._known:
            self._known[path] = _read(path)
        return self._known[path]

    def keep(self, record: Record) -> None:
        """Write a record, in place of an older one of the same scenario. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        document = {"version": VERSION, **asdict(record)}
        text = json.dumps(document, indent=1, allow_nan=False)
        path = self._path(record.scenario)
        replace(path, f"{text}\n".encode())
        self._known[path] = record

    def _path(self, scenario: Mapping[str, Any]) -> Path:
        return self._folder / f"{scenario_digest(scenario)}.json"


def _read(path: Path) -> Record | None:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(document, dict) or document.get("version") != VERSION:
        return None
    names = {each.name for each in fields(Record)}
    try:
        found = Record(**{name: value for name, value in document.items() if name in names})
        return dataclasses.replace(found, confirmed=tuple(found.confirmed))
    except TypeError:  # a field is missing
        return None
