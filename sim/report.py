"""The report of a simulation: one JSON document, bitwise equal for equal scenarios except for ``cost``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from p2ptrain.base import files
from p2ptrain.base.files import cause
from p2ptrain.base.text import printable
from p2ptrain.manifest.faults import error_lines
from p2ptrain.manifest.section import Section
from sim.errors import ScenarioError

REPORT_VERSION = 1
"""Version of the format, raised with every field that another version would misread."""

MAX_BYTES = 1 << 28
"""Largest report that is read; 2,000 points with a thousand groups each take a third of it."""


class Bytes(Section):
    """Mean bytes of one peer in one direction, with frames and digests."""

    payload: float
    """Fragments in exchanges."""
    weights: float = 0.0
    """Whole models, from donors to newcomers."""
    control: float = 0.0
    """Messages of the protocol."""
    directory: float = 0.0
    """Presence records: storing its own and reading others'."""
    total: float


class GroupFigures(Section):
    """Results of a group of peers."""

    peers: int
    """Peers that took part at any time."""
    outer_steps: int
    """Outer steps of all peers together."""
    tokens: int
    """Tokens that all peers together trained on."""
    loss: float | None
    """Mean training loss of the last inner phase; None if nothing is learned."""
    utilization: float | None
    """Seconds of inner steps per second between the first step and the last."""
    up: Bytes
    down: Bytes
    bits_per_parameter: float | None
    """Bits sent per parameter and outer step, everything counted."""
    payload_bits_per_parameter: float | None
    """Bits sent per parameter and outer step as fragments in exchanges."""
    exchanges: int = 0
    """Exchanges made; each is counted on both sides."""
    exchanges_failed: int = 0
    """Exchanges agreed on that broke."""
    half_commits: int = 0
    """Failed exchanges that the partner may have committed."""
    offers_declined: int = 0
    """Offers declined by partners."""
    offers_refused: int = 0
    """Offers declined by these peers."""
    offers_unanswered: int = 0
    solo_share: float | None
    """Share of outer steps without a committed exchange before the next one."""
    pulls: int = 0
    """Pulls of a donor's weights by newcomers."""
    offences: int = 0
    """Protocol violations by partners."""
    endings: dict[str, int]
    """Number of peers by reason why they were done."""


class CurvePoint(Section):
    """One point of the curve."""

    time_s: float
    """Simulated time, seconds."""
    outer_steps: float
    """Mean of all peers present."""
    tokens: float
    """Tokens that one peer trained on, mean."""
    loss: float | None
    """Mean training loss of the last inner phases."""
    validation: float | None
    """Mean loss of the slow weights on the scenario's split; None if there is none."""
    validation_of_mean: float | None
    """Loss of the mean of the slow weights."""
    disagreement: float | None
    """Mean distance of the slow weights to their mean, relative to its norm; if only bytes are counted, as measured by
    exchanges."""
    groups: dict[str, float | None]
    """``validation`` of each group, or ``loss`` if there is none."""


class Cost(Section):
    """Resources that the simulation used: the one part that differs from run to run."""

    wall_s: float
    cpu_s: float
    events_per_s: float
    """Events per second of wall time."""
    peak_memory_bytes: int
    """Peak memory of the process."""


class SimulationReport(Section):
    """The report of one simulation."""

    version: int
    title: str
    """Scenario's file name, or the caller's title."""
    scenario: dict[str, Any]
    """The whole scenario, with defaults filled in."""
    simulated_s: float
    ending: str
    """Reason why the simulation ended."""
    events: int
    """Events in the simulated world."""
    overall: GroupFigures
    groups: dict[str, GroupFigures]
    curve: list[CurvePoint] = Field(min_length=1)
    notes: dict[str, int]
    """Number of notes of each kind (docs/ERRORS.md). With pace.policy rank also outer steps, one key per rank and H."""
    left_out: list[str]
    """Effects that this learner and this simulator do not show."""
    cost: Cost


def save(report: SimulationReport, path: Path) -> None:
    """Write the whole document or nothing. Raises ScenarioError."""
    text = json.dumps(report.model_dump(), indent=1, allow_nan=False) + "\n"
    try:
        files.replace(path, text.encode())
    except OSError as error:
        remedy = files.remedy(error, "give another path to --report")
        raise ScenarioError(f"{path} cannot be written: {cause(error)}.", remedy) from None


def load(path: Path) -> SimulationReport:
    """Read a report. Raises ScenarioError if the file is not a report of this version."""
    try:
        with path.open("rb") as file:
            data = json.loads(file.read(MAX_BYTES))
        if not isinstance(data, dict) or data.get("version") != REPORT_VERSION:
            raise ValueError(f"it does not have version {REPORT_VERSION}, which this p2ptrain reads")
        return SimulationReport.model_validate(data)
    except ValidationError as error:
        why = error_lines(error, SimulationReport)[0]
    except (OSError, ValueError, RecursionError) as error:
        why = cause(error) if isinstance(error, OSError) else str(error)
    raise ScenarioError(f"{printable(path)} is not a report: {why}.", "Give a file that --report wrote.")
