"""The learners of a simulation that trains real small language models: one pool for all slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from p2ptrain.base.ids import PeerId
from p2ptrain.host.keeper import Keeper
from p2ptrain.host.learner import Learner
from p2ptrain.host.rules import codecs_of, fragments_of, learner_rules, matrices_of
from p2ptrain.manifest import TrainingSection
from p2ptrain.manifest.model import Llama, LlamaConfig
from p2ptrain.ports import InnerTask, Notebook
from p2ptrain.recipes import RECIPES
from p2ptrain.train.batches import CorpusReader
from sim.evaluation import Evaluation, disagreement, slow_weights
from sim.learning import LanguageModelLearner
from sim.lm.pool import LanguageModelPool
from sim.lm.text import Text, shares
from sim.scenario import Scenario
from sim.trainer import SimulatedLearner, SimulatedTrainer


def make_pool(scenario: Scenario, device: str, together: bool = False) -> LanguageModelPool:
    """Make the models of a scenario's peers.

    Args:
        together: make one model that all peers train with one large batch each step, instead of one for each.
    """
    learner = scenario.learner
    assert isinstance(learner, LanguageModelLearner)
    peers = scenario.total_peers
    fold = peers if together else 1
    text = Text.builtin(learner.sequence_length)
    readers = [CorpusReader(scenario.run.seed, PeerId(f"seat-{slot}")) for slot in range(1 if together else peers)]
    return LanguageModelPool(
        description(learner),
        training(learner, scenario.run_tokens, fold),
        scenario.run_tokens,
        text,
        shares(text, readers, learner.data),
        scenario.run.seed,
        device,
    )


def description(learner: LanguageModelLearner) -> Llama:
    """Return the learner's model as a manifest describes it."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=learner.hidden_size,
        intermediate_size=learner.intermediate_size,
        num_hidden_layers=learner.layers,
        num_attention_heads=learner.heads,
        num_key_value_heads=learner.heads,
        max_position_embeddings=learner.sequence_length,
        hidden_act="silu",
        initializer_range=0.02,
        norm_epsilon=1e-5,
        tie_word_embeddings=True,
        rope_theta=10_000.0,
    )
    return Llama(architecture="LlamaForCausalLM", config=config)


def training(learner: LanguageModelLearner, run_tokens: int, fold: int) -> TrainingSection:
    """Return the inner optimization of a learner, with the batches of ``fold`` peers in one."""
    return TrainingSection(
        sequence_length=learner.sequence_length,
        sequences_per_step=learner.sequences_per_step * fold,
        learning_rate=learner.learning_rate,
        warmup_tokens=round(learner.warmup_fraction * run_tokens),
        schedule=learner.schedule,
        final_learning_rate_fraction=learner.final_learning_rate_fraction,
        optimizer=learner.optimizer,
        muon_momentum=0.95,
        beta1=0.9,
        beta2=0.95,
        epsilon=1e-8,
        weight_decay=learner.weight_decay,
        gradient_clip=1.0,
    )


class LanguageLearnerPool:
    """Learners that share one pool of weights; a ``learner_pool.LearnerPool``.

    Args:
        together: see ``make_pool``.
    """

    left_out = ("the time of encoding, decoding and applying displacements",)

    def __init__(self, scenario: Scenario, device: str, together: bool = False) -> None:
        self.pool = make_pool(scenario, device, together)
        self._scenario = scenario
        self._initial = self.pool.theta[0].clone()
        self.fragments = fragments_of(scenario.outer, self.pool.layout)
        self.matrices = matrices_of(self.pool.layout, self.fragments)
        self._codecs = codecs_of(scenario.codec)
        self._slots: dict[SimulatedLearner, int] = {}

    def learner(self, slot: int, inner_steps: int, notebook: Notebook) -> Learner:
        """Return the slot's row of the pool, at the initial weights; a replacement continues in the slot's text."""
        task = self.pool.tasks[slot]
        task.theta.copy_(self._initial)
        task.reset(warmup_steps=0)
        rules = replace(learner_rules(self._scenario.outer, float(self._scenario.run_tokens)), inner_steps=inner_steps)
        slow, gradients = self._codecs
        learner = Learner(task, rules, self.fragments, slow, notebook, gradient_codec=gradients, matrices=self.matrices)
        self._slots[learner] = slot
        return learner

    def keeper(self, held: frozenset[int]) -> Keeper:
        recipe = RECIPES[self._scenario.outer.recipe]
        return Keeper(self.fragments, held, self._codecs[0], self.matrices, recipe)

    @property
    def tasks(self) -> list[InnerTask]:
        return list(self.pool.tasks)

    def prepare(self, trainers: list[SimulatedTrainer]) -> None:
        """Batch all steps that end now on an accelerator; on the CPU, one by one is faster."""
        if self.pool.device.type != "cpu":
            ready = [trainer.learner for trainer in trainers if not trainer.learner.is_waiting]
            self.pool.prepare([(self._slots[learner], learner.progress) for learner in ready])

    def evaluate(self, learners: Sequence[SimulatedLearner], final: bool = False) -> Evaluation:
        return self.evaluate_weights(slow_weights(learners), final)

    def evaluate_weights(
        self,
        slow: Tensor,  # [N, P]
        final: bool,
    ) -> Evaluation:
        """Compute held-out losses of each peer and of their mean; ``final`` uses the whole split, not only a part."""
        learner, split = self._scenario.learner, self._scenario.run.split
        assert isinstance(learner, LanguageModelLearner)
        mean = slow.mean(0)
        sequences = None if final else learner.curve_sequences
        if bool((slow == slow[0]).all()):
            loss = float(self.pool.evaluate(mean[None], split, sequences))
            return Evaluation((loss,) * len(slow), loss, 0.0)
        losses = self.pool.evaluate(torch.cat([slow, mean[None]]), split, sequences)
        return Evaluation(tuple(losses[:-1].tolist()), float(losses[-1]), disagreement(slow, mean))
