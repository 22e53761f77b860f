"""How fast simulated computers are, and how many inner steps each makes between two outer steps."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

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
            widest = max((each.up_mbit_s or 0.0 for each in scenario.peers), default=0.0)
            if not widest or group.up_mbit_s is None:
                return steps
            exchange_s = payload_bytes / (widest * MEGABIT)
            return straggler_steps(steps, 1, exchange_s / group.step_s, group.up_mbit_s / widest)


def straggler_steps(inner_steps: int, partners: int, exchange_steps: float, bandwidth: float) -> int:
    """GASLoC's rule for a peer with a narrow line (arXiv 2606.11081; our reading): ``H - k (s/t) (1/f - 1)``.

    Args:
        inner_steps: H of all others.
        partners: k, at once.
        exchange_steps: s/t, an exchange at full bandwidth in inner steps of time.
        bandwidth: f, this peer's share of the full bandwidth.
    """
    return max(1, round(inner_steps - partners * exchange_steps * (1.0 / bandwidth - 1.0)))
