"""Construction of one rank of a team: its stage, task, learner, shard and part of the checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from p2ptrain.base.ids import PeerId
from p2ptrain.checkpoint import Checkpoint, Found, VectorRange
from p2ptrain.data.corpus import Corpus
from p2ptrain.manifest import Manifest
from p2ptrain.ports import Notebook
from p2ptrain.team.checkpoints import ComputerPart, RankCheckpoints, vector_range_of
from p2ptrain.team.shard import LocalShard
from p2ptrain.team.sharding import Sharding, sharding_of
from p2ptrain.train.batches import CorpusReader
from p2ptrain.train.evaluate import HeldOutLoss
from p2ptrain.train.initial_weights import stage_targets
from p2ptrain.train.learner import Learner
from p2ptrain.train.pipeline import PipelineTask
from p2ptrain.train.replicas import Mesh, Replicas, ReplicatedTask
from p2ptrain.train.rules import codecs_of, fragments_of, learner_rules, matrices_of
from p2ptrain.train.stages import StageRange, stage_model
from p2ptrain.train.team_group import TeamGroup
from peer.home import Home
from peer.initial_weights import load_initial
from peer.team.agreement import Agreement

TRIED_TOKENS = 16_384
"""Held-out text for the test of a donor's weights, as ``assembly.TRIED_TOKENS``."""


@dataclass(frozen=True, slots=True)
class TeamRank:
    """One rank's part of a team, in its own process."""

    agreement: Agreement
    group: TeamGroup
    """The ranks of the first replica."""
    sharding: Sharding
    task: PipelineTask
    learner: Learner
    shard: LocalShard
    checkpoints: RankCheckpoints
    trained: RankCheckpoints
    """Of the weights at the end of training."""
    found: Found
    """What the rank found of checkpoints; the learner has not loaded it."""

    def evaluate(self, tokens: int) -> HeldOutLoss:
        """Read the held-out loss of the slow weights, a collective of which the leader sets the time limit."""
        return self.learner.at_slow(lambda: self.task.held_out_loss(tokens, math.inf, lambda read, wanted: True))

    def save(self) -> None:
        """Write this rank's part of a checkpoint, a collective."""
        self.checkpoints.write(self.learner.state_dict()[0], self.learner.step)

    def save_trained(self) -> None:
        """Write this rank's part of the weights at the end of training, a collective."""
        self.trained.write({"slow": self.learner.state_dict()[0]["slow"]}, self.learner.step)

    def load(self, checkpoint: Checkpoint) -> None:
        """Restore this rank's part of a checkpoint, a collective. Raises KeyError or ValueError if it does not fit."""
        self.group.together(
            "loading the checkpoint", lambda: self.learner.restore(checkpoint.tensors, checkpoint.state)
        )
        self.learner.show_restored()


def build_task(
    group: TeamGroup,
    manifest: Manifest,
    device: torch.device,
    corpus: Corpus,
    peer: PeerId,
    agreement: Agreement,
) -> PipelineTask:
    """Build the stage of one rank, a collective of all. Raises UserError and TeamError."""
    mesh = Mesh.of(group.size, len(agreement.stages))
    description, seed, stage = manifest.model, manifest.run.seed, agreement.stages[mesh.stage(group.rank)]
    model = group.together("building the model", lambda: stage_model(description, seed, device, stage))
    reader = CorpusReader(seed, peer)
    rest = (
        corpus,
        manifest.training,
        manifest.run.tokens,
        reader,
        agreement.placement,
        agreement.boundary,
        agreement.is_eager,
    )
    if mesh.replicas == 1:
        return PipelineTask(model, group, *rest)
    pipeline = group.part("connecting the stages", mesh.pipelines)
    return ReplicatedTask(model, pipeline, *rest, replicas=Replicas.of(group, mesh, agreement.counts))


def build_rank(
    task: PipelineTask,
    manifest: Manifest,
    agreement: Agreement,
    home: Home,
    notebook: Notebook,
    leader_ranks: int = 0,
    weights: Path | None = None,
) -> TeamRank:
    """Build a rank of the first replica around its task, a collective of these. Raises UserError and TeamError.

    Args:
        leader_ranks: number of the ranks on the leader's computer; 0: all.
        weights: file or folder of the run's initial weights that the owner of this computer named.
    """
    model, group = task.stage_model, task.group
    fragments = fragments_of(manifest.outer, model.whole)
    sharding = sharding_of(fragments, offsets(agreement.stages, model.whole.unit_lengths), model.whole.unit_lengths)
    own = sharding.slices(group.rank)
    window = vector_range_of(model)
    part = None
    if leader_ranks:
        begins = offsets(agreement.stages, model.whole.unit_lengths)
        is_leaders = group.rank < leader_ranks
        place, ranks = (group.rank, leader_ranks) if is_leaders else (0, 1)
        held = VectorRange(0, begins[leader_ranks], window.total) if is_leaders else window
        part = ComputerPart(place, ranks, held, [each.blocks.start for each in agreement.stages])
    store, trained = (RankCheckpoints(each, group, window, part) for each in (home.checkpoints, home.trained))
    found = store.load_latest()
    if manifest.model.init is not None and found.checkpoint is None:
        load = partial(load_initial, manifest, home, weights, stage_targets(model))
        group.together("loading the initial weights", load)
    weight_codec, gradient_codec = codecs_of(manifest.codec)
    learner = Learner(
        task,
        learner_rules(manifest.outer, manifest.run.tokens),
        own,
        weight_codec,
        notebook,
        gradient_codec=gradient_codec,
        matrices=matrices_of(model.flat.layout, own),
        held_out=task.held_out(TRIED_TOKENS, math.inf),
        all_gather=group.gather,
    )
    shard = LocalShard(learner.payloads)
    return TeamRank(agreement, group, sharding, task, learner, shard, store, trained, found)


def offsets(stages: tuple[StageRange, ...], units: tuple[int, ...]) -> list[int]:
    """Return where each stage begins in the whole flat vector; the embedding, unit 0, belongs to the first one."""
    return [0 if stage.is_first else sum(units[: stage.blocks.start + 1]) for stage in stages]
