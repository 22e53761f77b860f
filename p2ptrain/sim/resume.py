"""Long simulations: written down now and then and when they are interrupted, and gone on with by the same command.

The file holds a snapshot of everything (``sim.snapshot``), behind a line that says to what it belongs. It is read by
the build that wrote it alone: other sources could mean other things by the same names.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

import p2ptrain
from p2ptrain import files
from p2ptrain.errors import ScenarioError
from p2ptrain.files import printable
from p2ptrain.manifest.document import canonical_json
from p2ptrain.sim import snapshot
from p2ptrain.sim.ensemble import EnsembleSimulation
from p2ptrain.sim.scenario import Scenario
from p2ptrain.sim.simulation import Simulation, Stopped

EVERY_S = 300.0
"""Seconds between two snapshots, at least. A guess: what one would not mind to lose."""

DEAR = 20.0
"""... and so many times as long as a snapshot takes."""


class Keeper:
    """Keeps a simulation in a file until it is done.

    Args:
        path: the file; its directory exists.
        scenario: what is simulated.
        device: where.
        is_stopped: whether the owner wants to stop.
        say: told, once, that the disk does not take it.
    """

    def __init__(
        self, path: Path, scenario: Scenario, device: str, is_stopped: Stopped, say: Callable[[str], None]
    ) -> None:
        self.is_interrupted = False
        self._say = say
        self._has_said = False
        self._path = path
        self._belongs = {"scenario": _digest(scenario), "build": _build(), "device": device}
        self._is_stopped = is_stopped
        self._next = time.monotonic() + EVERY_S

    def load(self) -> Simulation | EnsembleSimulation | None:
        """What is to be gone on with, if anything. Raises ScenarioError for a file that is not ours."""
        try:
            head, _, body = self._path.read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ScenarioError(f"{self._path} cannot be read: {error}.", "Give another path to --report.") from None
        again = "Delete it to begin anew, or simulate with what it belongs to."
        try:
            differing = [name for name, value in self._belongs.items() if json.loads(head)[name] != value]
        except (ValueError, TypeError, KeyError):
            raise ScenarioError(f"{self._path} is no interrupted simulation.", again) from None
        if differing:
            raise ScenarioError(f"{self._path} was interrupted with another {differing[0]}.", again)
        try:
            loaded = snapshot.load(body)
        except ValueError as error:
            raise ScenarioError(f"{self._path} is damaged: {error}.", "Delete it to begin anew.") from None
        assert isinstance(loaded, Simulation | EnsembleSimulation)
        return loaded

    def save(self, simulation: Simulation | EnsembleSimulation) -> None:
        """Write it down. Where the disk does not take it, the simulation goes on, and what was kept before stays; who
        is stopped now is told so by a ScenarioError."""
        began = time.monotonic()
        data = json.dumps(self._belongs).encode() + b"\n" + snapshot.dump(simulation)
        try:
            files.replace(self._path, data)
        except OSError as error:
            if self.is_interrupted:
                raise self._not_kept(error) from None
            if not self._has_said:
                why = error.strerror or error
                self._say(f"not kept: {printable(self._path)} cannot be written: {why}; the simulation goes on")
                self._has_said = True
        self._next = time.monotonic() + max(EVERY_S, DEAR * (time.monotonic() - began))

    def is_due(self) -> bool:
        """Whether to stop and save: for good, or in between."""
        self.is_interrupted = self._is_stopped()
        return self.is_interrupted or time.monotonic() >= self._next

    def _not_kept(self, error: OSError) -> ScenarioError:
        if self._path.exists():
            remedy = "Free some space; the same command goes on from what was kept before."
        else:
            remedy = "Free some space, or give another path to --report; the simulation begins anew."
        return ScenarioError(f"{printable(self._path)} cannot be written: {error.strerror or error}.", remedy)


def discard(path: Path) -> None:
    """The simulation that was kept there is done, and its report is safe."""
    with suppress(OSError):  # it is not worth an error
        path.unlink(missing_ok=True)


def _digest(scenario: Scenario) -> str:
    return hashlib.sha256(canonical_json(scenario.model_dump())).hexdigest()


@cache
def _build() -> str:
    """Everything that decides what a simulation yields: our sources, Python, torch."""
    digest = hashlib.sha256(f"{platform.python_version()} {torch.__version__}".encode())
    root = Path(p2ptrain.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
