"""Observes a simulation while it runs and aggregates its results at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import isfinite

from p2ptrain.swarm import Counters
from sim.evaluation import finite
from sim.learner_pool import LearnerPool
from sim.population import Member, Population
from sim.report import Bytes, CurvePoint, GroupFigures
from sim.scenario import Scenario
from sim.sizes import SimulatedTraffic
from sim.world import World


class Observer:
    """Takes a point of the curve at regular intervals of the swarm's outer steps."""

    def __init__(self, scenario: Scenario, world: World, population: Population, pool: LearnerPool) -> None:
        self.points: list[CurvePoint] = []
        self.outer_steps = 0
        """Outer steps of all peers so far."""
        each = [slot.steps * scenario.learner.tokens_per_step for slot in population.slots]
        alone = sum(-(-scenario.run_tokens // tokens) for tokens in each)
        self.expected = -(-alone // len(each)) if scenario.trains_together else alone
        """Outer steps by the end, if all peers arrive and stay."""
        self._world = world
        self._population = population
        self._pool = pool
        self._most = scenario.run.points
        self._stride = max(self.expected / self._most, 1.0)
        self._next = self._stride

    def outer_step_done(self) -> None:
        self.outer_steps += 1
        if self.outer_steps >= self._next:
            self._next += self._stride
            self._world.after(0.0, self.look)

    def look(self, final: bool = False) -> None:
        """Take a point now; if there are too many points, drop every other one."""
        self.points.append(self._point(final))
        if len(self.points) > 2 * self._most:
            del self.points[::2]
            self._stride *= 2

    def _point(self, final: bool) -> CurvePoint:
        members = self._population.taking_part()
        for member in members:
            member.peer.trainer.catch_up()
        learners = [member.peer.learner for member in members]
        evaluation = self._pool.evaluate(learners, final) if members else None
        losses = evaluation.losses if evaluation is not None else None
        values = losses if losses is not None else [learner.loss for learner in learners]
        groups: dict[str, list[float]] = {}
        for member, value in zip(members, values, strict=True):
            groups.setdefault(member.slot.group, []).append(value)
        return CurvePoint(
            time_s=self._world.now,
            outer_steps=_mean(learner.step for learner in learners) or 0.0,
            tokens=_mean(learner.tokens for learner in learners) or 0.0,
            loss=_mean(learner.loss for learner in learners),
            validation=_mean(losses) if losses is not None else None,
            validation_of_mean=finite(evaluation.loss_of_mean) if evaluation is not None else None,
            disagreement=finite(evaluation.disagreement) if evaluation is not None else None,
            groups={name: _mean(each) for name, each in groups.items()},
        )


def figures(members: Sequence[Member], parameters: int, now: float) -> GroupFigures:
    counters = [member.peer.core.counters for member in members]
    traffic = [member.peer.traffic for member in members]
    steps = _sum(counters, "outer_steps")
    exchanges = _sum(counters, "exchanges_ok")
    up, down = _mean_bytes(traffic, "up"), _mean_bytes(traffic, "down")
    endings = Counter(member.peer.finished or "still there" for member in members)
    shares = [share for member in members if (share := member.peer.trainer.utilization(now)) is not None]
    per_step = 8 * len(members) / (parameters * steps) if steps else None
    return GroupFigures(
        peers=len(members),
        outer_steps=steps,
        tokens=sum(member.peer.learner.tokens for member in members),
        loss=_mean(member.peer.learner.loss for member in members),
        utilization=_mean(shares),
        up=up,
        down=down,
        bits_per_parameter=up.total * per_step if per_step else None,
        payload_bits_per_parameter=up.payload * per_step if per_step else None,
        exchanges=exchanges,
        exchanges_failed=_sum(counters, "exchanges_failed"),
        half_commits=_sum(counters, "half_commits"),
        offers_declined=_sum(counters, "offers_declined"),
        offers_refused=_sum(counters, "offers_refused"),
        offers_unanswered=_sum(counters, "offers_unanswered"),
        solo_share=_sum(counters, "solo_steps") / steps if steps else None,
        pulls=_sum(counters, "pulls"),
        offences=_sum(counters, "offences"),
        endings=dict(sorted(endings.items())),
    )


def _sum(counters: Iterable[Counters], name: str) -> int:
    return sum(int(getattr(each, name)) for each in counters)


def _mean(values: Iterable[float]) -> float | None:
    """Return the mean of the finite values, or None."""
    finite = [float(value) for value in values if isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def _mean_bytes(traffic: Sequence[SimulatedTraffic], way: str) -> Bytes:
    def mean(kind: str) -> float:
        return sum(getattr(each, f"{kind}_{way}") for each in traffic) / len(traffic)

    parts = {kind: mean(kind) for kind in ("payload", "weights", "control", "directory")}
    return Bytes(**parts, total=sum(parts.values()))
