"""One rank of a test's team that exchanges, a process of its own: ``python team_peer.py FOLDER RANK``.

It reads one case a line from stdin. The leader then reads commands, and answers each with a line of JSON; the other
rank follows its leader. So a test can let two teams, or a team and a plain peer, exchange by hand.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from team_rank import BLOCKS, DEVICE, HELD_OUT, MICRO_BATCH, SEQUENCES, corpus, forbid_pickles
from team_rank import Case as ModelCase

from p2ptrain.base.errors import TeamError
from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.checkpoint import parts
from p2ptrain.manifest import Manifest, with_changes
from p2ptrain.outer.flat import FlatLayout
from p2ptrain.swarm.download_plan import Span, cut
from p2ptrain.swarm.events import Commit
from p2ptrain.team.checkpoints import RankCheckpoints, TeamCheckpoints, vector_range_of
from p2ptrain.team.connection import RankConnection, SocketLine
from p2ptrain.team.handshake import RankListener, dial
from p2ptrain.team.inbox import TeamInbox
from p2ptrain.team.payloads import TeamPayloads
from p2ptrain.team.remote_shard import RemoteShard
from p2ptrain.team.shard import LocalShard, Shard
from p2ptrain.team.shard_server import ShardServer
from p2ptrain.team.sharding import Sharding, sharding_of
from p2ptrain.team.trainer import LeadingTrainer, follow
from p2ptrain.train.autofit import Placement
from p2ptrain.train.batches import CorpusReader
from p2ptrain.train.evaluate import HeldOutLoss
from p2ptrain.train.inner import LanguageModelTask
from p2ptrain.train.learner import Learner
from p2ptrain.train.model import build_module, flat_model
from p2ptrain.train.pipeline import PipelineTask
from p2ptrain.train.replicas import Mesh, Replicas, ReplicatedTask, shares
from p2ptrain.train.rules import codecs_of, fragments_of, learner_rules, matrices_of
from p2ptrain.train.stages import StageModel, equal_cut, stage_model
from p2ptrain.train.team_group import Rendezvous, TeamGroup

LINK = LinkId(PeerId("other"), 1, outbound=True)
MOST_BYTES = 1 << 24


@dataclass(frozen=True)
class SwarmCase:
    """What a peer of a swarm trains."""

    peer: str = "amber"
    codec: str = "modular4"
    gradients: str = ""
    adaptive: bool = False
    recipe: str = "swarm"
    optimizer: str = "adamw"
    clip: float = 1.0
    ranks: int = 2
    replicas: int = 1
    micro_batch: int = MICRO_BATCH
    inner_steps: int = 4
    fragments: int = 6
    run_tokens: int = 6400
    timeout_s: float = 60.0
    generation: int = 0
    key: str = ""
    home: str = ""
    """Directory of the checkpoints; the newest one is resumed."""

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.ranks // self.replicas, self.replicas)

    @property
    def manifest(self) -> Manifest:
        changes = {
            "outer.recipe": self.recipe,
            "outer.inner_steps": self.inner_steps,
            "outer.cut": "layers",
            "outer.fragments": self.fragments,
            "outer.fragments_per_exchange": self.fragments,
            "outer.exchanges_per_step": 0 if self.recipe in ("noloco", "diloco") else 2,
            "codec.name": self.codec,
            **({"codec.gradients": self.gradients, "codec.rank": 4} if self.gradients else {}),
            **({"codec.adaptive": True} if self.adaptive else {}),
            "run.tokens": self.run_tokens,
        }
        return with_changes(ModelCase(optimizer=self.optimizer, clip=self.clip).manifest, changes)

    @property
    def layout(self) -> FlatLayout:
        manifest = self.manifest
        return FlatLayout.of(build_module(manifest.model, manifest.run.seed))


def rest(case: SwarmCase) -> tuple[Any, ...]:
    manifest = case.manifest
    reader = CorpusReader(manifest.run.seed, PeerId(case.peer))
    return corpus(manifest), manifest.training, manifest.run.tokens, reader, Placement(None, case.micro_batch)


def plain_learner(case: SwarmCase) -> Learner:
    """Return the learner of a peer in one process."""
    manifest = case.manifest
    model = flat_model(manifest.model, manifest.run.seed, DEVICE)
    fragments = fragments_of(manifest.outer, model.layout)
    codec, gradient_codec = codecs_of(manifest.codec)
    rules = learner_rules(manifest.outer, manifest.run.tokens)
    task = LanguageModelTask(model, *rest(case))
    return Learner(
        task,
        rules,
        fragments,
        codec,
        MemoryLog(),
        gradient_codec=gradient_codec,
        matrices=matrices_of(model.layout, fragments),
        held_out=task.held_out(HELD_OUT, math.inf),
    )


@dataclass(frozen=True)
class RankState:
    learner: Learner
    group: TeamGroup
    shard: LocalShard
    sharding: Sharding
    task: PipelineTask
    checkpoints: RankCheckpoints

    def evaluate(self, tokens: int) -> HeldOutLoss:
        return self.task.held_out_loss(tokens, math.inf, lambda read, wanted: True)


def stage_models(case: SwarmCase) -> list[StageModel]:
    model, seed = case.manifest.model, case.manifest.run.seed
    return [stage_model(model, seed, DEVICE, stage) for stage in equal_cut(BLOCKS, case.mesh.stages)]


def stage_task(case: SwarmCase, folder: Path, rank: int) -> PipelineTask:
    team = TeamGroup(Rendezvous(folder, rank, case.ranks, case.generation), case.timeout_s)
    model, mesh = stage_models(case)[case.mesh.stage(rank)], case.mesh
    if mesh.replicas == 1:
        return PipelineTask(model, team, *rest(case))
    pipeline = team.part("connecting the stages", mesh.pipelines)
    counts = shares(SEQUENCES // case.micro_batch, mesh.stages, [1.0] * mesh.replicas)
    return ReplicatedTask(model, pipeline, *rest(case), replicas=Replicas.of(team, mesh, counts))


def rank_state(case: SwarmCase, task: PipelineTask, rank: int) -> RankState:
    manifest, layout, group, models = case.manifest, case.layout, task.group, stage_models(case)
    sharding = sharding_of(fragments_of(manifest.outer, layout), [model.offset for model in models])
    codec, gradient_codec = codecs_of(manifest.codec)
    rules = learner_rules(manifest.outer, manifest.run.tokens)
    slices = sharding.slices(rank)
    matrices = matrices_of(models[rank].flat.layout, slices)
    held_out = task.held_out(HELD_OUT, math.inf)
    learner = Learner(
        task,
        rules,
        slices,
        codec,
        MemoryLog(),
        gradient_codec=gradient_codec,
        matrices=matrices,
        held_out=held_out,
        all_gather=group.gather,
    )
    checkpoints = RankCheckpoints(Path(case.home), group, vector_range_of(models[rank]))
    if (found := checkpoints.load_latest().checkpoint) is not None:
        learner.load_state_dict(found.tensors, found.state)
    return RankState(learner, group, LocalShard(learner.payloads), sharding, task, checkpoints)


def state_of(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return what has to be equal of a learner's state, or of a checkpoint's tensors, [P] each."""
    names = ("slow", "momentum", "theta", "left_out", "task.first_moment", "task.second_moment", "task.counters")
    return {name: torch.cat(list(parts(tensors[name]))) for name in names if name in tensors}


class ByHand:
    """A peer that makes exchanges step by step; ``learner`` is a ``Learner`` or a ``LeadingTrainer``."""

    def __init__(self, learner: Any) -> None:
        self.learner = learner
        self._swap: dict[str, Any] = {}

    def advance(self, steps: int) -> list[str]:
        return [type(event).__name__ for _ in range(steps) for event in self.learner.advance()]

    def settle(self) -> list[str]:
        return [type(event).__name__ for event in self.learner.settle()]

    def propose(self, fragments: Sequence[int]) -> list[bytes]:
        payloads = self.learner.payloads
        snapshot = payloads.current(fragments)
        self._swap = {"fragments": fragments, "snapshot": snapshot, "mine": payloads.proposals(fragments, snapshot)}
        return list(self._swap["mine"])

    def encode(self, theirs: Sequence[bytes]) -> list[bytes]:
        swap = self._swap
        encoded = self.learner.payloads.encode(swap["fragments"], swap["mine"], theirs, swap["snapshot"])
        self._swap = {"encoded": encoded}
        return list(encoded.parts)

    def conclude(self, theirs: Sequence[bytes], share: float, clip_radius: float, progress: float) -> list[float]:
        difference = self.learner.payloads.difference(self._swap["encoded"], theirs)
        commit = Commit(LINK, progress, share, clip_radius, self.learner.ended, 0, 0)
        self.learner.inbox.deliver(commit, difference)
        self._swap = {}
        return [difference.distance, difference.norm, difference.sketched, *difference.fingerprint]

    def proceed(self, step: int) -> list[str]:
        self.learner.inbox.proceed(step)
        return self.settle()

    def adopt(self, parts: Sequence[bytes], step: int, progress: float) -> list[str]:
        payloads = self.learner.payloads
        weights: Any = [bytearray(part) for part in parts]
        if isinstance(payloads, TeamPayloads):
            download = payloads.new_download()
            for span in cut(payloads.weight_sizes()):
                download.store(span, weights[span.fragment][span.start : span.stop])
            weights = download.whole
        payloads.check_weights(weights)
        self.learner.inbox.adopt(LINK, step, progress, weights)
        return self.settle()

    def donate(self) -> list[bytes]:
        payloads = self.learner.payloads
        slow, sizes = payloads.slow(), payloads.weight_sizes()
        return [bytes(payloads.piece(slow, Span(number, 0, size))) for number, size in enumerate(sizes)]

    def numbers(self) -> list[float]:
        return [self.learner.step, self.learner.progress, float(self.learner.ended)]


def lead(case: SwarmCase, folder: Path, listener: RankListener) -> None:
    state = rank_state(case, stage_task(case, folder, 0), 0)
    try:
        connections = listener.connect(case.mesh.stages, case.timeout_s)
        remotes = [
            RemoteShard(rank, RankConnection(SocketLine(each), MOST_BYTES))
            for rank, each in enumerate(connections, start=1)
        ]
        shards: list[Shard] = [state.shard, *remotes]
        codec, gradient_codec = codecs_of(case.manifest.codec)
        recipe = learner_rules(case.manifest.outer, case.run_tokens).recipe
        shown = "fast" if recipe.mix("fast") is not None else "slow"
        payloads = TeamPayloads(
            codec,
            gradient_codec if recipe.mix("pseudo_gradient") is not None else None,
            matrices_of(case.layout, state.sharding.fragments),
            shown,
            state.sharding,
            shards,
            lambda: state.shard.turn,
            recipe.mixes_at_any_time(shown),
        )
        trainer = LeadingTrainer(state.learner, state.group, state.shard, payloads, TeamInbox(recipe.follow, payloads))
        obey(ByHand(trainer), trainer, state)
        payloads.close()
        for remote in remotes:
            remote.close()
    except TeamError as error:
        answer({"error": str(error)})
    finally:
        state.group.close()


def obey(peer: ByHand, trainer: LeadingTrainer, state: RankState) -> None:
    """Follow commands: the name of a method and its arguments; bytes are hexadecimal."""
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        if name == "stop":
            trainer.stop()
            return
        if name == "evaluate":
            state.task.announce_reading = lambda tokens: trainer.evaluate(tokens, lambda: None)
            answer(state.evaluate(HELD_OUT).value)
            continue
        if name == "save":
            tensors, numbers = state.learner.state_dict()
            answer(str(TeamCheckpoints(state.checkpoints, trainer.save).save(tensors, numbers)))
            continue
        told = [
            [bytes.fromhex(each) for each in item] if name != "propose" and isinstance(item, list) else item
            for item in arguments
        ]
        result = getattr(peer, name)(*told)
        answer([each.hex() if isinstance(each, bytes) else each for each in result])


def answer(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def follow_first_replica(task: ReplicatedTask) -> None:
    """Follow the first replica until it closes its connections."""
    try:
        task.follow_replica()
    except TeamError:
        task.group.close()


def follow_leader(case: SwarmCase, folder: Path, rank: int) -> None:
    task = stage_task(case, folder, rank)
    if isinstance(task, ReplicatedTask) and rank >= case.mesh.stages:
        follow_first_replica(task)
        return
    state = rank_state(case, task, rank)
    server = ShardServer(
        state.shard,
        RankConnection(SocketLine(dial(folder / "leader", bytes.fromhex(case.key), rank, case.timeout_s)), MOST_BYTES),
    )
    server.start()
    try:
        follow(
            state.learner,
            state.group,
            state.shard,
            evaluate=state.evaluate,
            save=lambda: state.checkpoints.write(state.learner.state_dict()[0], state.learner.step),
        )
    except TeamError:
        pass
    finally:
        server.close()
        state.group.close()


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    forbid_pickles()
    for line in iter(sys.stdin.readline, ""):
        case = SwarmCase(**json.loads(line))
        if rank >= case.ranks:
            continue
        if rank:
            follow_leader(case, folder, rank)
            continue
        listener = RankListener(folder / "leader", bytes.fromhex(case.key))
        try:
            answer("listening")
            lead(case, folder, listener)
        finally:
            listener.close()


def told(case: SwarmCase) -> str:
    return json.dumps(asdict(case))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
