"""What a simulation reports: one JSON document, the same to the bit for the same scenario, but for ``cost``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from p2ptrain.base import files
from p2ptrain.base.errors import ScenarioError
from p2ptrain.manifest.faults import told
from p2ptrain.manifest.section import Section

REPORT_VERSION = 1
"""Changes with every field that another version would read wrongly."""


MAX_BYTES = 1 << 28
"""Of a report that is read; 2,000 points with a thousand groups each are a third of it."""


class Bytes(Section):
    """Mean bytes of one peer in one direction, with frames and digests."""

    payload: float
    """Fragments in exchanges."""
    weights: float
    """Whole models, from donors to newcomers."""
    control: float
    """Messages of the protocol."""
    directory: float
    """Presence records: storing one's own, and reading others'."""
    total: float


class GroupFigures(Section):
    """What became of some peers."""

    peers: int
    """That took part at any time."""
    outer_steps: int
    """Of all together."""
    tokens: int
    """That all together trained on."""
    loss: float | None
    """Mean training loss of their last inner phase; None where nothing is learnt."""
    utilization: float | None
    """Seconds of inner steps per second between the first of them and the last."""
    up: Bytes
    down: Bytes
    bits_per_parameter: float | None
    """Sent for each parameter and outer step, everything counted."""
    payload_bits_per_parameter: float | None
    """Of this, fragments in exchanges."""
    exchanges: int
    """Made: each counts once for both of its sides."""
    exchanges_failed: int
    """Agreed on, and then broken."""
    half_commits: int
    """Of these: the partner may have committed."""
    offers_declined: int
    """By partners."""
    offers_refused: int
    """By these peers."""
    offers_unanswered: int
    solo_share: float | None
    """Outer steps without any committed exchange before the next one."""
    pulls: int
    """Times a newcomer took a donor's weights."""
    offences: int
    """Times a partner broke the protocol."""
    endings: dict[str, int]
    """Why peers were done, and how many."""


class CurvePoint(Section):
    """One instant."""

    time_s: float
    """Simulated."""
    outer_steps: float
    """Mean of all peers that are there."""
    tokens: float
    """That one of them trained on, mean."""
    loss: float | None
    """Mean training loss of their last inner phases."""
    validation: float | None
    """Mean loss of their slow weights on the scenario's split; None where there is none."""
    validation_of_mean: float | None
    """Loss of the mean of their slow weights."""
    disagreement: float | None
    """Mean distance of their slow weights to the mean, relative to its norm; as exchanges measured it where only bytes
    are counted."""
    groups: dict[str, float | None]
    """``validation``, or else ``loss``, of each group."""


class Cost(Section):
    """What the simulation took: the one part that differs from run to run."""

    wall_s: float
    cpu_s: float
    events_per_s: float
    """Of wall time."""
    peak_memory_bytes: int
    """Of the process."""


class SimulationReport(Section):
    """One simulation."""

    version: int
    title: str
    """The scenario's file name, or what the caller says."""
    scenario: dict[str, Any]
    """All of it, defaults filled in."""
    simulated_s: float
    ending: str
    """Why the simulation was over."""
    events: int
    """Things that happened in the simulated world."""
    overall: GroupFigures
    groups: dict[str, GroupFigures]
    curve: list[CurvePoint]
    notes: dict[str, int]
    """How often peers noted what: the kinds of docs/ERRORS.md. With pace.policy rank, how many outer steps had which
    rank and H."""
    left_out: list[str]
    """What this kind of learner and this simulator do not show."""
    cost: Cost

    def without_cost(self) -> dict[str, Any]:
        """Everything that is the same whenever the same scenario is simulated."""
        return self.model_dump(exclude={"cost"})


def save(report: SimulationReport, path: Path) -> None:
    """Write the whole document or nothing. Raises ScenarioError."""
    text = json.dumps(report.model_dump(), indent=1, allow_nan=False) + "\n"
    try:
        files.replace(path, text.encode())
    except OSError as error:
        raise ScenarioError(f"{path} cannot be written: {error}.", "Give another path to --report.") from None


def load(path: Path) -> SimulationReport:
    """Read a report. Raises ScenarioError when it is none, or of another version."""
    remedy = "Give a file that --report wrote."
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ScenarioError(f"{path} has more than the {MAX_BYTES:,} bytes that are read of a report.", remedy)
        data = json.loads(text)
    except (OSError, ValueError) as error:
        raise ScenarioError(f"{path} is no report: {error}.", remedy) from None
    if not isinstance(data, Mapping) or "version" not in data:
        raise ScenarioError(
            f"{path} is no report: it has no version, and this p2ptrain reads version {REPORT_VERSION}.", remedy
        )
    version = data["version"]
    if type(version) is not int:
        raise ScenarioError(
            f"{path} is a report of version {json.dumps(version)}, which is no whole number, and this p2ptrain reads"
            f" version {REPORT_VERSION}.",
            remedy,
        )
    if version != REPORT_VERSION:
        raise ScenarioError(
            f"{path} is a report of version {version}, and this p2ptrain reads version {REPORT_VERSION}.",
            "Simulate that scenario again.",
        )
    try:
        return SimulationReport.model_validate(data)
    except ValidationError as error:
        raise ScenarioError(
            f"{path} is no whole report: {told(error, SimulationReport, ())[0]}.", "Simulate again."
        ) from None
