"""How fast simulated computers are, and how many inner steps each makes between two outer steps."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from p2ptrain.outer.policy import straggler_inner_steps
from p2ptrain.sim.scenario import MEGABIT, Group, Scenario


@dataclass(slots=True)
class Pace:
    """Seconds of one inner step after the other."""

    step_s: float
    jitter: float
    random: Random | None
    """None where there is no jitter."""

    def __call__(self) -> float:
        if self.random is None:
            return self.step_s
        return self.step_s * (1.0 + self.jitter * (2.0 * self.random.random() - 1.0))


def inner_steps(scenario: Scenario, group: Group, payload_bytes: int) -> int:
    """H of the peers in this group.

    Args:
        payload_bytes: that a peer sends in one exchange.
    """
    steps = scenario.outer.inner_steps
    match scenario.pace.policy:
        case "fixed":
            return steps
        case "by_speed":
            fastest = min(each.step_s for each in scenario.peers)
            return max(1, round(steps * fastest / group.step_s))
        case "straggler":
            widest = max(each.up_mbit_s or 0.0 for each in scenario.peers)
            if not widest or group.up_mbit_s is None:
                return steps
            exchange_s = payload_bytes / (widest * MEGABIT)
            share = group.up_mbit_s / widest
            return straggler_inner_steps(steps, scenario.outer.partners, exchange_s / group.step_s, share)
