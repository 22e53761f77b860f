"""Speeds of simulated computers, and the number of inner steps per outer step of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from torch import Tensor

from p2ptrain.codec import CodecTerms, Matrices, weighted_ranks
from p2ptrain.outer.adaptive import rank_and_inner_steps
from sim.scenario import MEGABIT, Group, Scenario
from sim.straggler import straggler_inner_steps


def step_times(step_s: float, jitter: float, random: Random) -> Callable[[], float]:
    """Return a function that draws the seconds of the next inner step."""
    if not jitter:
        return lambda: step_s
    return lambda: step_s * (1.0 + jitter * (2.0 * random.random() - 1.0))


def inner_steps(scenario: Scenario, group: Group, payload_bytes: int) -> int:
    """Return H of the peers in this group, if it does not change.

    Args:
        payload_bytes: bytes that a peer sends in one exchange.
    """
    steps = scenario.outer.inner_steps
    match scenario.pace.policy:
        case "fixed" | "rank":  # recipes that can follow a rank have equal groups
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


def effective_rank(
    vector: Tensor,  # [n] fp32: a pseudo-gradient, or the mean of several
    terms: CodecTerms,
) -> float:
    """Compute the effective rank: the exponential of the entropy of the singular values (Roy and Vetterli, 2007).

    The result is the mean over all matrices, weighted by their elements, without vectors; 0 if there is no nonzero
    matrix. The cost is cubic in the smaller side, so measure it rarely.
    """
    weighted, counted = weighted_ranks(vector, terms)
    return weighted / max(1, counted)


class RankStepTimes:
    """Rank and H of the next outer step of all peers (``outer.adaptive``).

    Args:
        first_rank: r_1, the scenario's.
        first_inner_steps: H_1.
        matrices: matrices that the average contains; empty if unknown.
    """

    def __init__(self, first_rank: int, first_inner_steps: int, matrices: Matrices = ()) -> None:
        self.rank = first_rank
        self.inner_steps = first_inner_steps
        self._first = first_rank, first_inner_steps
        self._matrices = matrices
        self._effective_ranks: list[float] = []
        self._made: Counter[tuple[int, int]] = Counter()

    def follow(self, average: Tensor, made: int) -> None:
        """Adapt rank and H after an outer step.

        Args:
            average: [P] average used by all peers; empty if none has arrived yet.
            made: inner steps of the outer step; the last phase of a run may be cut short.
        """
        self._made[self.rank, made] += 1
        if len(average):
            terms = CodecTerms(len(average), matrices=self._matrices)
            self._effective_ranks.append(effective_rank(average.float().cpu(), terms))
        self.rank, self.inner_steps = rank_and_inner_steps(self._effective_ranks, *self._first)

    def notes(self) -> dict[str, int]:
        made = sorted(self._made.items(), reverse=True)
        return {f"outer steps of rank {rank} and {steps} inner steps": count for (rank, steps), count in made}
