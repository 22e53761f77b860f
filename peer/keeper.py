"""A peer that keeps some fragments of the model for others and does not train (``swarm.keeping``).

It builds no model, reads no text and needs the memory of its fragments alone. Everything else, network, admission,
settings and page, is as for a peer that trains.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from p2ptrain.base.errors import DeviceError, HomeError, ManifestError, UserError
from p2ptrain.base.telemetry import EventLog
from p2ptrain.checkpoint import Checkpoints
from p2ptrain.host.keeper import Keeper
from p2ptrain.host.loop import Hooks, Signals
from p2ptrain.host.rules import codecs_of, fragments_of, matrices_of
from p2ptrain.host.tasks import PeerLearner
from p2ptrain.manifest import SignedManifest, parameter_count
from p2ptrain.net.identity import Identity
from p2ptrain.outer.flat import FlatLayout
from p2ptrain.ports import NOT_READ, GoesOn, HeldOutLoss
from p2ptrain.recipes import RECIPES
from p2ptrain.swarm import Counters, Peer, keeping
from p2ptrain.swarm.events import Event, LeaveRequested
from p2ptrain.train.model import shape_module
from peer.assembly import PeerOptions, TrainingSession, rules_of_run
from peer.capacity import BASE_BYTES, installed_memory
from peer.home import Home
from peer.session_recorder import SessionRecorder

LIVE_COPIES = 3
"""Copies of the kept weights that may be live at once: those published, those of a download or of a snapshot that a
newcomer takes, and displacements on their way."""
SETTLE_S = 10.0
"""Longest wait of the main thread, in seconds, before it looks whether a checkpoint is due."""
ALL = "all"


@dataclass(frozen=True, slots=True)
class KeeperTask:
    """A keeper's ``PeerTask``: it computes nothing."""

    parameter_count: int
    """Parameters of the whole model."""
    device_name: str = "cpu"
    computes_in: str = "fp32"
    skipped_steps: int = 0
    coverage: float = 0.0
    micro_batch: int = 0
    learning_rate: float = 0.0
    cpu_s: float = 0.0

    def held_out_loss(self, most_tokens: int, patience_s: float, goes_on: GoesOn) -> HeldOutLoss:
        return NOT_READ

    def sample(self, new_tokens: int) -> str:
        return ""


class KeeperRecorder(SessionRecorder):
    """Records of a session in which nothing is trained."""

    def begin(self) -> None:
        learner = self._keeper
        self.saver.begin()
        self.notebook.note(
            "keeping",
            fragments=keeping.words(learner.held),
            of=len(learner.payloads.weight_sizes()),
            size_bytes=learner.nbytes,
            progress=learner.progress,
        )

    @property
    def _keeper(self) -> Keeper:
        assert isinstance(self.learner, Keeper)
        return self.learner

    def turned(self) -> None:
        """Save if it is time and something has changed."""
        if self._keeper.changes and not self.saver.is_saved:
            self.saver.save_if_due()

    def turned_after(self, turned: Callable[[], None]) -> Callable[[], None]:
        """Return a function that calls ``turned`` and then ours."""

        def both() -> None:
            turned()
            self.turned()

        return both

    def leaving(self) -> None:
        if self._keeper.changes and not self.saver.is_saved:
            self.saver.save_soon()

    def conclude(self) -> None:
        """Save the last checkpoint, unless nothing has changed. Raises HomeError."""
        if self._keeper.changes and not self.saver.is_saved:
            self.saver.insist("the last checkpoint", self.saver.save)

    def figures(self) -> dict[str, Any]:
        return {**super().figures(), "keeps": keeping.words(self._keeper.held)}

    def summary(self) -> dict[str, Any]:
        """Return the content of a keeper's summary.json."""
        counters = self.counted()
        return {
            "id": self.me,
            "nickname": self.nickname,
            "run": self.run,
            "keeps": keeping.words(self._keeper.held),
            "checkpoint": self.checkpoints.digest,
            "tokens": 0,
            "progress": self.learner.progress,
            "outer_steps": self.learner.step,
            **{name: getattr(counters, name) for name in ("exchanges_ok", "exchanges_failed", "pulls", "donations")},
            **{name: getattr(counters, name) for name in ("sent_bytes", "received_bytes")},
            "val_loss_last": None,
            "val_loss_last_tokens": 0,
            "val_loss_of_tokens": 0,
            "finished": False,
            "why": self.why,
        }


def held_of(text: str, fragments: int) -> frozenset[int]:
    """Return the fragments that ``--keep`` names, of a run with so many. Raises UserError."""
    if text == ALL:
        return frozenset(range(fragments))
    held = parsed(text)
    if max(held) >= fragments:
        raise UserError(
            f"--keep {text}: this run has only the fragments 0 to {fragments - 1}.",
            f"Name some of these, such as --keep 0-{max(fragments // 2 - 1, 0)}, or --keep {ALL}.",
        )
    return held


def parsed(text: str) -> frozenset[int]:
    """Return the fragments in a text. Raises UserError."""
    try:
        return keeping.parse(text)
    except ValueError as error:
        raise UserError(
            f"--keep {text}: {error}.", f"Name fragments of the model, such as --keep 0-3, or --keep {ALL}."
        ) from None


def check_options(given: PeerOptions, kept: str, home: Home) -> None:
    """Raise UserError if this start's options are of a peer that trains, but its home keeps fragments."""
    if given.keep is None and any(each is not None for each in (given.device, given.stages, given.team, given.at)):
        raise UserError(
            f"The peer in {home.path} keeps fragments {kept} and does not train.",
            "Omit --device, --devices, --stages, --team and --at, or use another --home to train.",
        )


def check_run(signed: SignedManifest) -> None:
    """Raise UserError if fragments of this run cannot be kept."""
    outer = signed.manifest.outer
    if RECIPES[outer.recipe].can_be_kept and outer.topology == "random":
        return
    raise UserError(
        f"Nobody can keep fragments of this run: with recipe {outer.recipe} and topology {outer.topology}, peers "
        "exchange by plan or more than weights.",
        "Join without --keep, or keep fragments of a run with recipe swarm.",
    )


def build_keeper(
    options: PeerOptions, home: Home, identity: Identity, signed: SignedManifest, log: EventLog
) -> TrainingSession:
    """Build a keeper, resumed from the newest whole checkpoint. Raises UserError."""
    assert options.keep is not None
    manifest = signed.manifest
    check_run(signed)
    held = held_of(options.keep, manifest.outer.fragments)
    layout = FlatLayout.of(shape_module(manifest.model))
    fragments = fragments_of(manifest.outer, layout)
    check_memory(sum(fragments[each].stop - fragments[each].start for each in held), options.memory_bytes)
    codec, _ = codecs_of(manifest.codec)
    learner = Keeper(fragments, held, codec, matrices_of(layout, fragments), RECIPES[manifest.outer.recipe])
    checkpoints = Checkpoints(home.checkpoints)
    earlier = _resume(learner, checkpoints, home, signed, log)
    rules = rules_of_run(signed, learner.payloads)

    def new_core() -> Peer:
        return Peer(identity.peer_id, rules, Random(), step=learner.step, progress=learner.progress, keeps=held)

    record = KeeperRecorder(
        home=home,
        checkpoints=checkpoints,
        me=identity.peer_id,
        run=signed.run_id,
        nickname=options.nickname or "",
        learner=learner,
        task=KeeperTask(parameter_count(manifest.model)),
        corpus=None,
        run_tokens=manifest.run.tokens,
        notebook=log,
        earlier=earlier,
    )
    return TrainingSession(new_core, record, held=held, loop=keep)


def keep(learner: PeerLearner, signals: Signals, post: Callable[[Event], None], hooks: Hooks) -> None:
    """Apply what arrives until ``finished``, and leave at ``stop`` or ``last``; ``host.loop.train`` of a keeper."""
    is_leaving = False
    while not signals.finished.is_set():
        if not is_leaving and (signals.stop.is_set() or signals.last.is_set()):
            is_leaving = True
            hooks.leaving()
            post(LeaveRequested())
        for event in learner.settle(wait_s=SETTLE_S):
            post(event)
        hooks.turned()
    for event in learner.settle():
        post(event)


def check_memory(weights: int, memory_bytes: float) -> None:
    """Raise DeviceError if so many kept weights do not fit into this machine's memory."""
    needed, there = BASE_BYTES + 4 * LIVE_COPIES * weights, min(memory_bytes, installed_memory())
    if needed > there:
        raise DeviceError(
            f"These fragments take {needed / 1e9:.1f} GB of memory while they are exchanged, but this machine has "
            f"{there / 1e9:.1f} GB.",
            "Keep fewer fragments.",
        )


def _resume(learner: Keeper, checkpoints: Checkpoints, home: Home, signed: SignedManifest, log: EventLog) -> Counters:
    found = checkpoints.load_latest()
    for torn in found.passed_over:
        log.note("torn checkpoint", path=str(torn.path), why=torn.reason)
    if found.checkpoint is None:
        return Counters()
    state = found.checkpoint.state
    if state.get("run") != signed.run_id:
        raise HomeError(
            f"The checkpoint {found.checkpoint.path} belongs to another run.", "Move it away, or use another --home."
        )
    if state.get("kept") != [list(each) for each in keeping.ranges_of(learner.held)]:
        what = "a peer that trains" if (kept := kept_in(state)) is None else f"a keeper of fragments {kept}"
        raise HomeError(
            f"The checkpoints in {home.path} are those of {what}.",
            "Use another --home, or give the same --keep as before.",
        )
    try:
        learner.load_state_dict(found.checkpoint.tensors, state)
        earlier = Counters.of(state.get("counters", {}))
    except (KeyError, ValueError) as error:
        raise ManifestError(
            f"The checkpoint {found.checkpoint.path} does not fit this run's model: {error}.", "Move it away."
        ) from error
    log.note("resumed", step=learner.step, progress=learner.progress)
    return earlier


def kept_in(state: dict[str, Any]) -> str | None:
    """Return the fragments of a keeper's checkpoint in words; None for one of a peer that trains."""
    with suppress(TypeError, ValueError, KeyError):
        return keeping.words(keeping.fragments_in(tuple((first, last) for first, last in state["kept"])))
    return None
