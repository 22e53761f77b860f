"""Construction of one peer's model, data, learner and protocol core, resumed from a checkpoint if there is one."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from p2ptrain.base.errors import HomeError, ManifestError
from p2ptrain.base.ids import PeerId
from p2ptrain.base.telemetry import EventLog
from p2ptrain.checkpoint import Checkpoints, Found
from p2ptrain.host.keeper import Keeper
from p2ptrain.host.learner import Learner
from p2ptrain.host.rules import Sizes, codecs_of, fragments_of, learner_rules, matrices_of, swarm_rules
from p2ptrain.host.tasks import PeerTask, TaskFigures
from p2ptrain.manifest import Manifest, SignedManifest, parameter_count
from p2ptrain.manifest.fitting import repetition
from p2ptrain.net.identity import Identity
from p2ptrain.ports import HeldOutLoss
from p2ptrain.swarm import Counters, Peer, SwarmRules
from p2ptrain.swarm.rules import SEARCH_PATIENCE_S
from p2ptrain.tokens.corpus import ShardCorpus
from p2ptrain.tokens.opened import open_corpus, user_store
from p2ptrain.train.accelerator import CPU
from p2ptrain.train.memory import CPU_ACTIVATION_BYTES, activation_bytes, installed_memory
from p2ptrain.train.ranks import Mesh
from peer.held_out_reader import HeldOutReader
from peer.home import Home
from peer.keeper import KeeperTask, check_checkpoint, keeper_of
from peer.session_recorder import SessionRecorder
from peer.start_options import PeerOptions
from peer.token_supply import TokenSupply
from peer.training.devices import mesh_of, other_ranks, rank_threads
from peer.training.lan_address import LanAddress
from peer.training.plan import TrainerPlan
from peer.training.remote_task import RemoteTask

TRIED_TOKENS, TRIED_PATIENCE_S = 16_384, 5.0
"""Held-out text, and seconds to read it, for the test of a donor's weights before they replace ours. The standard error
is some hundredths of a nat; refused weights are worse than random prediction. It takes 0.3 s for the demo model. Guess:
the share of donors' weights that this refuses."""
SAMPLE_TOKENS = 120
"""Length of the sample text on the page: two lines of bytes, a third of a second of the demo model. Guess: how much
text visitors read."""
SAMPLE_LOOKS = 4
"""Looks for each sample text, which the second one writes: sampling takes as long as the held-out loss. Guess: how fast
sample texts change compared with the loss curve."""


@dataclass(frozen=True, slots=True)
class TrainingSession:
    new_core: Callable[[], Peer]
    """Factory of protocol cores at the learner's step and progress."""
    record: SessionRecorder


def rules_of_run(signed: SignedManifest, sizes: Sizes) -> SwarmRules:
    """Return the rules of the protocol core in a run, for messages of these sizes."""
    manifest = signed.manifest
    return swarm_rules(
        signed.run_id,
        manifest.outer,
        manifest.swarm,
        sizes,
        run_tokens=float(manifest.run.tokens),
        tokens_per_outer_step=float(manifest.tokens_per_outer_step),
    )


def build(
    options: PeerOptions,
    devices: Sequence[torch.device],
    home: Home,
    identity: Identity,
    signed: SignedManifest,
    log: EventLog,
    stack: AsyncExitStack,
    is_stopping: Callable[[], bool],
    supply: TokenSupply | None = None,
) -> TrainingSession:
    """Build model, data, learner and protocol core, and resume from the newest whole checkpoint. Raises UserError.

    Args:
        devices: of the trainer's ranks on this computer; the ``stack`` ends them.
        is_stopping: whether the owner stops the peer.
        supply: of the run's text; None: all of it is here.
    """
    manifest = signed.manifest
    checkpoints = Checkpoints(home.checkpoints)
    found = checkpoints.load_latest()
    learner: Learner | Keeper
    task: PeerTask
    corpus: ShardCorpus | None = None
    remote: RemoteTask | None = None
    held: frozenset[int] | None = None
    if options.keep is not None:
        learner = keeper_of(signed, options.keep, options.memory_bytes)
        task, held = KeeperTask(TaskFigures(parameter_count=parameter_count(manifest.model))), learner.held
    else:
        mesh, others = fitting_mesh(options, devices, manifest), other_ranks(options.team, options.at, devices)
        corpus = open_corpus(manifest, user_store(), _index(home, manifest))
        if (warning := repetition(manifest, corpus.train_tokens)) is not None:
            log.note("text repeats", why=warning)
        plan = _plan(options, devices, others, mesh, home, identity.peer_id, manifest, found.checkpoint is None)
        task = remote = RemoteTask(plan, manifest.training.tokens_per_step, log, is_stopping)
        stack.push_async_callback(asyncio.to_thread, remote.close)
        remote.start()
        learner = _trained(remote, manifest, log)
        if supply is not None:
            remote.is_supplied, supply.on_supplied = supply.is_supplied, learner.inbox.wake

    first_loss, earlier, earlier_s = _resume(found, learner, held, home, signed, log)
    rules = rules_of_run(signed, learner.payloads)

    def new_core() -> Peer:
        return Peer(identity.peer_id, rules, Random(), step=learner.step, progress=learner.progress, keeps=held)

    record = SessionRecorder(
        home=home,
        checkpoints=checkpoints,
        me=identity.peer_id,
        run=signed.run_id,
        nickname=options.nickname or "",
        learner=learner,
        task=task,
        losses=HeldOutReader(learner, task, corpus, log, _sampler(task), first_loss),
        run_tokens=manifest.run.tokens,
        last_exchanges_s=SEARCH_PATIENCE_S + rules.final_gossip_s if rules.exchanges else 0.0,
        notebook=log,
        earlier=earlier,
        earlier_s=earlier_s,
        keeps=held,
    )
    if remote is not None:
        remote.remaining_s = record.remaining_s
    return TrainingSession(new_core, record)


def fitting_mesh(options: PeerOptions, devices: Sequence[torch.device], manifest: Manifest) -> Mesh:
    """Return the mesh of the trainer's ranks. Raises DeviceError if they cannot train the run."""
    others = other_ranks(options.team, options.at, devices)
    if len(devices) + others > 1 or (options.stages or 1) > 1:
        memory_bytes = min(options.memory_bytes, installed_memory())
        return mesh_of(manifest, devices, options.stages, memory_bytes, others)
    if devices[0] == CPU:  # the trainer checks the others
        activation_bytes(manifest, CPU, options.memory_bytes)
    return Mesh()


def _plan(
    options: PeerOptions,
    devices: Sequence[torch.device],
    others: int,
    mesh: Mesh,
    home: Home,
    peer: PeerId,
    manifest: Manifest,
    begins: bool,
) -> TrainerPlan:
    """Return what the trainer is started with. Raises DeviceError."""
    if devices == [CPU] and not others:
        cpu_bytes = activation_bytes(manifest, CPU, options.memory_bytes)
    else:
        cpu_bytes = CPU_ACTIVATION_BYTES // max(1, sum(each.type == "cpu" for each in devices))
    is_auto = (options.device or "auto") == "auto"  # the trainer takes the first card that computes
    own = ("auto",) if is_auto and devices != [CPU] else tuple(map(str, devices))
    return TrainerPlan(
        home=str(home.path.absolute()),
        peer=peer,
        devices=(*own, *("auto",) * others),
        at=None if options.at is None else str(LanAddress.parse(options.at)),
        others=others,
        stages=mesh.stages,
        threads=rank_threads(devices),
        activation_bytes=cpu_bytes,
        most_sequences=manifest.training.sequences_per_step,
        store=str(user_store().directory.absolute()),
        index=_named(_index(home, manifest)),
        weights=_named(options.weights),
        begins=begins,
        tried_tokens=TRIED_TOKENS,
        tried_s=TRIED_PATIENCE_S,
        compile=options.compile,
        memory_bytes=None if math.isinf(options.memory_bytes) else options.memory_bytes,
    )


def _trained(task: RemoteTask, manifest: Manifest, log: EventLog) -> Learner:
    """Return the learner of a started trainer."""
    weight_codec, gradient_codec = codecs_of(manifest.codec)
    fragments = fragments_of(manifest.outer, task.layout)
    learner = Learner(
        task,
        learner_rules(manifest.outer, manifest.run.tokens),
        fragments,
        weight_codec,
        log,
        gradient_codec=gradient_codec,
        matrices=matrices_of(task.layout, fragments),
        held_out=task,
        remote=task,
    )
    task.on_return(learner.inbox.wake)
    task.has_ended = lambda: learner.ended
    return learner


def _index(home: Home, manifest: Manifest) -> Path | None:
    return home.files.find(manifest.corpus.root) if manifest.corpus.kind == "shards" else None


def _named(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def _sampler(task: PeerTask) -> Callable[[], str]:
    """Return a trainer-thread function that samples a text at one of ``SAMPLE_LOOKS`` calls, else returns ""."""
    turns = itertools.cycle(look == 1 for look in range(SAMPLE_LOOKS))
    return lambda: task.sample(SAMPLE_TOKENS) if next(turns) else ""


def _resume(
    found: Found,
    learner: Learner | Keeper,
    held: frozenset[int] | None,
    home: Home,
    signed: SignedManifest,
    log: EventLog,
) -> tuple[HeldOutLoss | None, Counters, float]:
    """Load the newest whole checkpoint, if any; return the run's first held-out loss, counters and training time.

    Raises HomeError or ManifestError if the checkpoint is from another run or another model.
    """
    for torn in found.passed_over:
        log.note("torn checkpoint", path=str(torn.path), why=torn.reason)
    if found.checkpoint is None:
        return None, Counters(), 0.0
    state = found.checkpoint.state
    if state.get("run") != signed.run_id:
        raise HomeError(
            f"The checkpoint {found.checkpoint.path} belongs to another run.", "Move it away, or use another --home."
        )
    check_checkpoint(state, held, home)
    try:
        learner.load_state_dict(found.checkpoint.tensors, state)
        first_loss = state.get("val_loss_first")
        first_tokens = int(state.get("val_loss_first_tokens") or 0)
        earlier = Counters.of(state.get("counters", {}))
        earlier_s = float(state.get("trained_s", 0.0))
    except (KeyError, ValueError) as error:
        raise ManifestError(
            f"The checkpoint {found.checkpoint.path} does not fit this run's model: {error}.", "Move it away."
        ) from error
    log.note("resumed", step=learner.step, progress=learner.progress)
    return None if first_loss is None else HeldOutLoss(float(first_loss), first_tokens, 0), earlier, earlier_s
