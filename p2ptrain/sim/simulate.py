"""Entry point of the simulator: run a scenario and return its report."""

from __future__ import annotations

from p2ptrain.sim.lockstep.ensemble import EnsembleSimulation
from p2ptrain.sim.report import SimulationReport
from p2ptrain.sim.scenario import Scenario
from p2ptrain.sim.simulation import Progress, Simulation, Stopped, never


class StoppedError(Exception):
    """A simulation that was stopped before its end."""


def simulate(
    scenario: Scenario,
    *,
    title: str = "",
    device: str = "cpu",
    progress: Progress | None = None,
    is_stopped: Stopped = never,
) -> SimulationReport:
    """Simulate a scenario to its end: peer to peer, or in lockstep if the recipe averages over all peers.

    Args:
        title: the report's title.
        device: where learners with tensors compute.
        progress: called now and then with the share that is done.
        is_stopped: called about ten times a second; True stops the simulation.

    Raises:
        StoppedError: ``is_stopped`` returned True.
    """
    simulation = begin(scenario, device)
    if not simulation.run(progress, is_stopped):
        raise StoppedError
    return simulation.report(title)


def begin(scenario: Scenario, device: str = "cpu") -> Simulation | EnsembleSimulation:
    """Build a simulation at its start."""
    if scenario.needs_everybody:
        return EnsembleSimulation(scenario, device)
    simulation = Simulation(scenario, device)
    simulation.start()
    return simulation
