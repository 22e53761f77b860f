"""The door to the simulator: a scenario as JSON has it, in; its report as JSON has it, out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def simulate(scenario: Mapping[str, Any], device: str) -> Mapping[str, Any]:
    """Run one scenario. Raises what the simulator raises: a scenario that it refuses, a run that broke."""
    # Here, so that whoever only plans or draws tables does not wait for torch.
    import torch

    from p2ptrain.sim.scenario import Scenario
    from p2ptrain.sim.simulate import simulate as simulated

    torch.set_num_threads(1)
    report: Mapping[str, Any] = simulated(Scenario.model_validate(scenario), device=device).model_dump(mode="json")
    return report
