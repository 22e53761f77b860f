"""The door: a scenario in, a report out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from p2ptrain.sim.ensemble import EnsembleSimulation
from p2ptrain.sim.report import Report
from p2ptrain.sim.resume import Keeper
from p2ptrain.sim.scenario import Scenario
from p2ptrain.sim.simulation import Progress, Simulation, Stopped, never


class StoppedError(Exception):
    """The owner stopped it. It goes on from where it was if it was kept."""


def simulate(
    scenario: Scenario,
    *,
    title: str = "",
    device: str = "cpu",
    progress: Progress | None = None,
    resume: Path | None = None,
    is_stopped: Stopped = never,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Simulate a scenario to its end: peer to peer, or in lockstep where the recipe needs everybody at once.

    Args:
        title: what the report is called.
        device: where learners with tensors compute.
        progress: told now and then which share is done.
        resume: a file that keeps the simulation while it lasts. If it is there, the simulation goes on from it, and
            ends as if it had never stopped. Who has saved the report removes it (``resume.discard``).
        is_stopped: asked about ten times a second whether to stop.
        say: told that ``resume`` cannot be written for now.

    Raises:
        StoppedError: ``is_stopped`` said so.
        ScenarioError: ``resume`` is of something else, or cannot be written when ``is_stopped`` said so.
    """
    keeper = Keeper(resume, scenario, device, is_stopped, say) if resume is not None else None
    simulation = (keeper.load() if keeper is not None else None) or begin(scenario, device)
    while not simulation.run(progress, keeper.is_due if keeper is not None else is_stopped):
        if keeper is not None:
            keeper.save(simulation)
        if keeper is None or keeper.is_interrupted:
            raise StoppedError
    return simulation.report(title)


def begin(scenario: Scenario, device: str = "cpu") -> Simulation | EnsembleSimulation:
    """A simulation at its start."""
    if scenario.needs_everybody:
        return EnsembleSimulation(scenario, device)
    simulation = Simulation(scenario, device)
    simulation.start()
    return simulation
