"""Model, data, learner and protocol core of one peer, built in order and resumed where a checkpoint is."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from p2ptrain.base.errors import HomeError, ManifestError
from p2ptrain.base.telemetry import EventLog
from p2ptrain.checkpoint import Checkpoints
from p2ptrain.data import Tokenizer, open_corpus
from p2ptrain.manifest import JoinLink, SignedManifest
from p2ptrain.net.identity import Identity
from p2ptrain.outer import slices
from p2ptrain.page.listen_address import ListenAddress
from p2ptrain.ports import Clock, Notebook
from p2ptrain.swarm import Peer
from p2ptrain.train import (
    CorpusReader,
    HeldOutText,
    LanguageModelTask,
    Sampling,
    flat_model,
    generate_text,
    place,
)
from p2ptrain.train.learner import Learner
from p2ptrain.train.rules import codecs_of, learner_rules, matrices_of, swarm_rules
from peer.capacity import check_memory, explained
from peer.home import Home, cache_directory
from peer.session_recorder import SessionRecorder

TRIED_TOKENS, TRIED_PATIENCE_S = 16_384, 5.0
"""Held-out text that a donor's weights are tried on before they replace ours. Guesses: its standard error is some
hundredths of a nat, and what is refused is worse than guessing; .3 s for the demo model."""
TOKENIZING_PERIOD_S = 10.0
"""Between two notes on how far the text is made into tokens, which takes up to an hour. A guess: often enough to see
that it goes on."""
SAMPLE_TOKENS = 120
"""Of the text that the page shows. A guess: two lines of bytes, a third of a second of the demo model."""
SAMPLE_LOOKS = 4
"""Of so many looks one writes such a text, the second: it takes as long as the loss does, and so looks that take long
come twice as often. A guess: a text changes less than a curve."""


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """What this machine's owner chose. None of it changes the algorithm."""

    link: JoinLink | None
    """None: go on with the run of the home."""
    home: Path | None = None
    device: str | None = None
    """None: what the home's settings say. So with an empty nickname."""
    data: Path | None = None
    """The file of a corpus that the manifest names by digest."""
    tokenizer: Path | None = None
    """The same for a tokenizer.json."""
    listen: tuple[str, ...] = ()
    announce: tuple[str, ...] = ()
    nickname: str = ""
    local: bool = False
    """The whole swarm is on this machine: listen on loopback and announce that."""
    relay: bool = False
    """Carry, within limits, what passes between peers whom nobody can dial."""
    page: ListenAddress | None = None
    """Where to show this peer; None: nowhere."""
    share: bool = False
    """A bootstrap may show this peer's figures, whatever the settings say."""


@dataclass(frozen=True, slots=True)
class TrainingSession:
    """Everything between the network and the trainer."""

    new_core: Callable[[], Peer]
    """A protocol core where the learner stands."""
    record: SessionRecorder
    notebook: Notebook


def build(
    options: PeerOptions, device: torch.device, home: Home, identity: Identity, signed: SignedManifest, log: EventLog
) -> TrainingSession:
    """Model, data, learner and protocol core, resumed where a checkpoint is."""
    manifest = signed.manifest
    check_memory(manifest, device)
    corpus = open_corpus(manifest, cache_directory(), options.data, options.tokenizer, telling(log))
    with explained(device):
        model = flat_model(manifest.model, manifest.run.seed, device)
        placement = place(model, manifest.model, manifest.training)
        reader = CorpusReader(manifest.run.seed, identity.peer_id)
        task = LanguageModelTask(model, corpus, manifest.training, manifest.run.tokens_per_peer, reader, placement)
    weight_codec, gradient_codec = codecs_of(manifest.codec)
    fragments = slices(len(model.theta), manifest.outer.fragments)
    learner = Learner(
        task,
        learner_rules(manifest.outer, manifest.run.tokens_per_peer),
        fragments,
        weight_codec,
        log,
        gradient_codec=gradient_codec,
        matrices=matrices_of(model.layout, fragments),
        held_out=HeldOutText(model.module, corpus, TRIED_TOKENS, placement.autocast, TRIED_PATIENCE_S),
    )
    checkpoints = Checkpoints(home.checkpoints)
    first_loss = _resume(checkpoints, learner, signed, log)
    rules = swarm_rules(
        signed.run_id,
        manifest.outer,
        manifest.swarm,
        learner.payloads,
        tokens_per_peer=float(manifest.run.tokens_per_peer),
        tokens_per_outer_step=float(manifest.tokens_per_outer_step),
    )

    def new_core() -> Peer:
        return Peer(identity.peer_id, rules, Random(), step=learner.step, progress=learner.progress)

    record = SessionRecorder(
        home=home,
        checkpoints=checkpoints,
        me=identity.peer_id,
        run=signed.run_id,
        nickname=options.nickname,
        learner=learner,
        task=task,
        corpus=corpus,
        placement=placement,
        tokens_per_peer=manifest.run.tokens_per_peer,
        notebook=log,
        first_loss=first_loss,
        sampler=_sampler(task, corpus.tokenizer),
    )
    return TrainingSession(new_core, record, log)


def telling(notebook: Notebook, clock: Clock = time.monotonic) -> Callable[[int, int | None], None]:
    """Notes how far the token stream is, now and then. What takes seconds is not worth a word."""
    due = clock() + TOKENIZING_PERIOD_S

    def tell(tokens: int, most: int | None) -> None:
        nonlocal due
        if (now := clock()) >= due:
            due = now + TOKENIZING_PERIOD_S
            notebook.note("tokenizing", tokens=tokens, most=most)

    return tell


def _sampler(task: LanguageModelTask, tokenizer: Tokenizer) -> Callable[[], str]:
    """The model's own text, from nothing, when its turn has come, else an empty one; in the trainer's thread."""
    turns = itertools.cycle(look == 1 for look in range(SAMPLE_LOOKS))
    return lambda: generate_text(task.model.module, tokenizer, "", SAMPLE_TOKENS, Sampling()) if next(turns) else ""


def _resume(checkpoints: Checkpoints, learner: Learner, signed: SignedManifest, log: EventLog) -> float | None:
    """Load the newest whole checkpoint, if any; returns the held-out loss of this peer's very first session."""
    found = checkpoints.load_latest()
    for torn in found.passed_over:
        log.note("torn checkpoint", path=str(torn.path), why=torn.reason)
    if found.checkpoint is None:
        return None
    state = found.checkpoint.state
    if state.get("run") != signed.run_id:
        raise HomeError(
            f"The checkpoint {found.checkpoint.path} belongs to another run.", "Move it away, or use another --home."
        )
    try:
        learner.load_state_dict(found.checkpoint.tensors, state)
        first_loss = state["val_loss_first"]
    except (KeyError, ValueError) as error:
        raise ManifestError(
            f"The checkpoint {found.checkpoint.path} does not fit this run's model: {error}.", "Move it away."
        ) from error
    log.note("resumed", step=learner.step, progress=learner.progress)
    return float(first_loss) if first_loss is not None else None
