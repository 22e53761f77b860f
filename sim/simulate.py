"""Entry point of the simulator: run a scenario and return its report."""

from __future__ import annotations

from sim.lockstep.ensemble import EnsembleSimulation
from sim.report import SimulationReport
from sim.scenario import Scenario
from sim.simulation import Progress, Simulation


def simulate(
    scenario: Scenario, *, title: str = "", device: str = "cpu", progress: Progress | None = None
) -> SimulationReport:
    """Simulate a scenario to its end: peer to peer, or in lockstep if the recipe averages over all peers.

    Args:
        title: the report's title.
        device: where learners with tensors compute.
        progress: called after every outer step with the share that is done.
    """
    simulation = begin(scenario, device)
    simulation.run(progress)
    return simulation.report(title)


def begin(scenario: Scenario, device: str = "cpu") -> Simulation | EnsembleSimulation:
    """Build a simulation at its start."""
    if scenario.needs_everybody:
        return EnsembleSimulation(scenario, device)
    simulation = Simulation(scenario, device)
    simulation.population.schedule()
    return simulation
