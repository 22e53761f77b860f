"""The door: a scenario in, a report out."""

from __future__ import annotations

from p2ptrain.sim.ensemble import EnsembleSimulation
from p2ptrain.sim.report import Report
from p2ptrain.sim.scenario import Scenario
from p2ptrain.sim.simulation import Progress, Simulation


def simulate(scenario: Scenario, *, title: str = "", device: str = "cpu", progress: Progress | None = None) -> Report:
    """Simulate a scenario to its end: peer to peer, or in lockstep where the recipe needs everybody at once.

    Args:
        title: what the report is called.
        device: where learners with tensors compute.
        progress: told now and then which share is done.
    """
    if scenario.needs_everybody:
        ensemble = EnsembleSimulation(scenario, device)
        ensemble.run(progress)
        return ensemble.report(title)
    simulation = Simulation(scenario, device)
    simulation.start()
    simulation.run(progress)
    return simulation.report(title)
