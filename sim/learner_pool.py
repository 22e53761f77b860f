"""The learners of one simulation: their creation, shared state and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log10
from typing import Protocol

import torch
from torch import Tensor

from p2ptrain.base.ids import RunId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.codec import CodecTerms, Matrices, proposal_size
from p2ptrain.host.keeper import Keeper
from p2ptrain.host.learner import Learner
from p2ptrain.host.rules import codecs_of, learner_rules, swarm_rules
from p2ptrain.outer.fragments import slices
from p2ptrain.ports import InnerTask, Notebook
from p2ptrain.recipes import RECIPES
from p2ptrain.swarm import SwarmRules
from sim.counting import Blank, CountingLearner, CountingRules
from sim.evaluation import Evaluation, disagreement, slow_weights
from sim.learners import QuadraticTask
from sim.learning import BytesLearner, LanguageModelLearner, QuadraticLearner
from sim.lm.language import LanguageLearnerPool
from sim.scenario import Scenario
from sim.trainer import SimulatedLearner, SimulatedTrainer


class LearnerPool(Protocol):
    """Makes and evaluates learners."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """Effects that this kind of learner does not show."""

    def learner(self, slot: int, inner_steps: int, notebook: Notebook) -> SimulatedLearner:
        """Make a learner with initial weights.

        Args:
            slot: number of the peer's slot, 0 to ``total_peers`` - 1. A replacement has the slot, and the data, of the
                peer that it replaces.
            inner_steps: H.
        """

    def keeper(self, held: frozenset[int]) -> Keeper:
        """Make the learner of a keeper of these fragments."""

    def prepare(self, trainers: list[SimulatedTrainer]) -> None:
        """Batch what can be batched: all these trainers are about to make an inner step."""

    def evaluate(self, learners: Sequence[SimulatedLearner], final: bool = False) -> Evaluation:
        """Evaluate the slow weights; ``final`` uses all data, however long that takes."""


class BytesLearnerPool:
    """Learners without weights, which only count."""

    left_out = (
        "weights: no loss, no discarded inner phase, and every exchange measures the scenario's disagreement",
        "the time of encoding, decoding and applying displacements",
    )

    def __init__(self, scenario: Scenario) -> None:
        assert isinstance(scenario.learner, BytesLearner)
        self._scenario = scenario
        self._rules: dict[int, CountingRules] = {}

    def learner(self, slot: int, inner_steps: int, notebook: Notebook) -> CountingLearner:
        if inner_steps not in self._rules:
            scenario, recipe = self._scenario, RECIPES[self._scenario.outer.recipe]
            assert isinstance(scenario.learner, BytesLearner)
            codecs = codecs_of(scenario.codec)[: 1 if recipe.mix("pseudo_gradient") is None else 2]
            lengths = [piece.stop - piece.start for piece in _slices(scenario)]
            each = [(codec, length) for codec in codecs for length in lengths]
            proposals = [proposal_size(codec, length) for codec, length in each]
            self._rules[inner_steps] = CountingRules(
                inner_steps=inner_steps,
                run_tokens=float(scenario.run_tokens),
                tokens_per_step=scenario.learner.tokens_per_step,
                blocks=recipe.blocks,
                streams=len(codecs),
                fragments=tuple(Blank(codec.encoded_size(CodecTerms(length))) for codec, length in each),
                proposals=tuple(map(Blank, proposals)) if any(proposals) else (),
                weights=tuple(Blank(4 * length) for length in lengths),
                disagreement=scenario.learner.disagreement,
                due=replace(learner_rules(scenario.outer, 0.0), inner_steps=inner_steps).due,
            )
        return CountingLearner(self._rules[inner_steps])

    def keeper(self, held: frozenset[int]) -> Keeper:
        raise NotImplementedError("a scenario with learners that only count has no keepers")

    def prepare(self, trainers: list[SimulatedTrainer]) -> None:
        pass

    def evaluate(self, learners: Sequence[SimulatedLearner], final: bool = False) -> Evaluation:
        assert isinstance(self._scenario.learner, BytesLearner)
        return Evaluation(None, None, self._scenario.learner.disagreement)


class QuadraticLearnerPool:
    """Learners of one diagonal quadratic, each with its own optimum near the common one."""

    left_out = ("the time of encoding, decoding and applying displacements",)

    def __init__(self, scenario: Scenario) -> None:
        assert isinstance(scenario.learner, QuadraticLearner)
        self._scenario = scenario
        self.fragments = _slices(scenario)
        self._codecs = codecs_of(scenario.codec)
        random = torch.Generator().manual_seed(scenario.run.seed)
        self.matrices: tuple[Matrices, ...] = ((),) * scenario.outer.fragments
        parameters = scenario.learner.parameters
        ends = scenario.learner.smallest_curvature, scenario.learner.largest_curvature
        self._curvature = torch.logspace(log10(ends[0]), log10(ends[1]), parameters)
        self._optimum = torch.randn(parameters, generator=random)

    def learner(self, slot: int, inner_steps: int, notebook: Notebook) -> Learner:
        outer, tokens = self._scenario.outer, float(self._scenario.run_tokens)
        rules = replace(learner_rules(outer, tokens), inner_steps=inner_steps)
        slow, gradients = self._codecs
        return Learner(self._task(slot), rules, self.fragments, slow, notebook, gradient_codec=gradients)

    def keeper(self, held: frozenset[int]) -> Keeper:
        recipe = RECIPES[self._scenario.outer.recipe]
        return Keeper(self.fragments, held, self._codecs[0], self.matrices, recipe)

    @property
    def tasks(self) -> list[InnerTask]:
        """New tasks of all slots."""
        return [self._task(slot) for slot in range(self._scenario.total_peers)]

    def _task(self, slot: int) -> QuadraticTask:
        learner, run = self._scenario.learner, self._scenario.run
        assert isinstance(learner, QuadraticLearner)
        seed = (run.seed * 1_000_003 + slot + 1) % 2**64  # range of torch's generator seeds
        own = torch.randn(self._optimum.shape, generator=torch.Generator().manual_seed(seed))
        return QuadraticTask(
            curvature=self._curvature,
            optimum=self._optimum + learner.spread * own,
            learning_rate=learner.learning_rate,
            noise=learner.noise,
            seed=seed,
            tokens_per_step=learner.tokens_per_step,
        )

    def prepare(self, trainers: list[SimulatedTrainer]) -> None:
        pass

    def evaluate(self, learners: Sequence[SimulatedLearner], final: bool = False) -> Evaluation:
        return self.evaluate_weights(slow_weights(learners))

    def evaluate_weights(
        self,
        slow: Tensor,  # [N, P]
        final: bool = False,
    ) -> Evaluation:
        """Evaluate slow weights on the common quadratic."""
        mean = slow.mean(0)
        losses, of_mean = (
            0.5 * (self._curvature * (weights - self._optimum).square()).sum(1) for weights in (slow, mean[None])
        )
        return Evaluation(tuple(losses.tolist()), float(of_mean), disagreement(slow, mean))


def make(scenario: Scenario, device: str = "cpu") -> BytesLearnerPool | QuadraticLearnerPool | LanguageLearnerPool:
    match scenario.learner:
        case BytesLearner():
            return BytesLearnerPool(scenario)
        case QuadraticLearner():
            return QuadraticLearnerPool(scenario)
        case LanguageModelLearner():
            return LanguageLearnerPool(scenario, device)


def _slices(scenario: Scenario) -> tuple[slice, ...]:
    return slices(scenario.learner.parameters, scenario.outer.fragments)


def swarm_rules_of(scenario: Scenario, pool: LearnerPool, run: RunId) -> SwarmRules:
    """Return the rules of the protocol core."""
    payloads = pool.learner(0, scenario.outer.inner_steps, MemoryLog()).payloads
    tokens, per_step = float(scenario.run_tokens), float(scenario.tokens_per_outer_step)
    return swarm_rules(run, scenario.outer, scenario.swarm, payloads, tokens, per_step)
