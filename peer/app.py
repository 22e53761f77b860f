"""One peer from start to end, in order: home, identity, network, manifest, model, checkpoint, training, goodbye."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from p2ptrain import checkpoint
from p2ptrain.data import open_corpus
from p2ptrain.errors import HomeError, ManifestError
from p2ptrain.ids import short
from p2ptrain.manifest import JoinLink, SignedManifest
from p2ptrain.net.copies import Copies, Gatherer
from p2ptrain.net.directory import PeerCache
from p2ptrain.net.driver import Shore
from p2ptrain.net.identity import Identity
from p2ptrain.net.rates import Rates
from p2ptrain.net.relay import RelayLimits
from p2ptrain.outer import slices
from p2ptrain.ports import Notebook
from p2ptrain.recipes import RECIPES
from p2ptrain.swarm import Peer, Presence
from p2ptrain.swarm.events import Event, LeaveRequested, TrainingEnded
from p2ptrain.telemetry import EventLog
from p2ptrain.train import LanguageModelTask, Reader, choose_device, flat_model, place
from p2ptrain.train.learner import Learner
from p2ptrain.train.loop import Hooks, Signals, train
from p2ptrain.train.rules import codecs_of, learner_rules, matrices_of, swarm_rules
from peer.attendance import Attendance, Reins
from peer.fit import check_memory, explained
from peer.home import Addresses, Home, cache_directory, default_home
from peer.network import Connection, describe_addresses, live_until
from peer.network_thread import NetworkThread
from peer.owner.hand import Hand, Held
from peer.owner.settings import Settings, SettingsFile
from peer.paths import PathNotebook, Paths
from peer.record import Record
from peer.screen import Screen
from peer.stopping import Stopping

CODEC_THREADS = 2
"""Encoding and decoding; torch releases the GIL there. Two, so that a large exchange does not hold up a small one."""


@dataclass(frozen=True, slots=True)
class Options:
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


def run_peer(options: Options) -> None:
    """Live as a peer until the run ends or the owner stops it. Raises UserError."""
    home = _home(options)
    with home.locked(), contextlib.closing(EventLog(home.events)) as log, Screen() as screen:
        file = SettingsFile(home.path)
        settings = file.load()
        options = _completed(options, settings)
        device = choose_device(options.device or "auto")
        log.listen(screen.show)
        signals, rates = Signals(), Rates()
        hand = Hand(home, file, settings, rates, signals, log)
        log.listen(hand.hear)
        with Stopping(signals, log) as stopping, hand, contextlib.ExitStack() as stack:
            identity = Identity.load_or_create(home.identity)
            signed = home.load_manifest(options.link.run_id if options.link else None)
            is_alone = signed is not None and not _exchanges(signed)
            link = None if is_alone else _connect(stack, options, home, identity, signed, log, rates)
            if signed is None:
                assert link is not None  # a home without a manifest needs a link, and a link is a network
                signed = _fetch_manifest(link, options, home)
            session = _build(options, device, home, identity, signed, log)
            stopping.let_finish(session.record.learner.wake)
            try:
                if link is None:
                    _run_alone(session, signals, hand)
                else:
                    _run_in_swarm(session, signals, hand, link, signed)
            except Exception:  # whatever it was, hours of training outlive it
                session.record.try_to_save()
                raise
            session.record.end()


@dataclass(frozen=True, slots=True)
class Line:
    """The network thread and what stands on it."""

    thread: NetworkThread
    connection: Connection
    paths: Paths


@dataclass(frozen=True, slots=True)
class Session:
    """Everything between the network and the trainer."""

    new_core: Callable[[], Peer]
    """A protocol core where the learner stands."""
    record: Record
    notebook: Notebook


# --- before training --------------------------------------------------------------------------------------------------


def _home(options: Options) -> Home:
    if options.home is not None:
        home = Home(options.home)
    elif options.link is not None:
        home = Home(default_home(options.link.run_id))
    else:
        raise HomeError("There is neither a join link nor a home.", "Give the link, or the home of a peer with --home.")
    if options.link is None and not home.manifest.exists():
        raise HomeError(f"No peer lives in {home.path} yet.", "Give a join link to begin with.")
    return home


def _completed(options: Options, settings: Settings) -> Options:
    """What the command line leaves open, the settings decide; what counts for this process alone is done here."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = settings.device if options.device is None else options.device
    return replace(options, device=device, nickname=options.nickname or settings.nickname)


def _exchanges(signed: SignedManifest) -> bool:
    return RECIPES[signed.manifest.outer.recipe].exchanges


def _connect(
    stack: contextlib.ExitStack,
    options: Options,
    home: Home,
    identity: Identity,
    signed: SignedManifest | None,
    log: EventLog,
    rates: Rates,
) -> Line:
    """Start the network; it ends with the stack."""
    if options.link is not None:
        run = options.link.run_id
    else:
        assert signed is not None  # _home saw to it
        run = signed.run_id
    last = home.load_addresses()
    bootstraps = options.link.addresses if options.link else last.joined_by
    thread = stack.enter_context(NetworkThread())
    paths = Paths()
    connection = Connection(
        identity,
        run,
        bootstraps,
        PeerCache(home.peers),
        log,
        listen=options.listen,
        port=last.port,
        announce=options.announce,
        nickname=options.nickname,
        local=options.local,
        rates=rates,
        relay=RelayLimits() if options.relay else None,
        paths=paths,
    )
    stack.callback(lambda: thread.call(connection.close()))
    thread.call(connection.start())
    home.save_addresses(Addresses(connection.addresses, tuple(bootstraps), connection.port))
    log.note("listening", name=short(identity.peer_id), where=describe_addresses(connection.addresses))
    return Line(thread, connection, paths)


def _fetch_manifest(line: Line, options: Options, home: Home) -> SignedManifest:
    assert options.link is not None
    signed = line.thread.call(line.connection.fetch_manifest(options.link))
    home.save_manifest(signed)
    return signed


def _build(
    options: Options, device: torch.device, home: Home, identity: Identity, signed: SignedManifest, log: EventLog
) -> Session:
    """Model, data, learner and protocol core, resumed where a checkpoint is."""
    manifest = signed.manifest
    check_memory(manifest, device)
    corpus = open_corpus(manifest, cache_directory(), options.data, options.tokenizer)
    with explained(device):
        model = flat_model(manifest.model, manifest.run.seed, device)
        placement = place(model, manifest.model, manifest.training)
    reader = Reader(manifest.run.seed, identity.peer_id)
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
    )
    first_loss = _resume(home, learner, signed, log)
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

    record = Record(
        home=home,
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
    )
    return Session(new_core, record, log)


def _resume(home: Home, learner: Learner, signed: SignedManifest, log: EventLog) -> float | None:
    """Load the newest whole checkpoint, if any; returns the held-out loss of this peer's very first session."""
    found = checkpoint.load_latest(home.checkpoints)
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


# --- training ---------------------------------------------------------------------------------------------------------


def _hooks(record: Record) -> Hooks:
    return Hooks(record.inner_step_done, record.outer_step_done, record.training_ended, record.held)


def _run_alone(session: Session, signals: Signals, hand: Hand) -> None:
    """A recipe that exchanges nothing needs no network: whatever would be said to the core ends the run."""
    record = session.record

    def post(event: Event) -> None:
        if isinstance(event, TrainingEnded | LeaveRequested):
            signals.finished.set()

    record.begin()
    signals.begin.set()
    hand.take(Held(record, None, Reins(signals, record.learner.wake)))
    train(record.learner, signals, post, _hooks(record))
    record.why = "the run's end" if record.learner.ended else "stopped by its owner"


def _run_in_swarm(session: Session, signals: Signals, hand: Hand, line: Line, signed: SignedManifest) -> None:
    record = session.record
    learner = record.learner
    reins = Reins(signals, learner.wake)

    def end(_: Future[str]) -> None:
        signals.finished.set()
        learner.wake()

    with ThreadPoolExecutor(CODEC_THREADS, thread_name_prefix="codec") as pool:

        async def work(function: Callable[..., Any], *arguments: Any) -> Any:
            return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)

        connection = line.connection
        shore = Shore(
            transport=connection,
            directory=connection,
            notebook=PathNotebook(session.notebook, line.paths),
            clock=time.monotonic,
            sign=connection.sign,
            live_until=live_until,
            begin_training=reins.begin,
            work=work,
            complete=Gatherer(connection.open_copies, learner.payloads.weight_sizes(), work, session.notebook).complete,
        )
        attendance = Attendance(learner, session.new_core, shore, reins)
        record.live_peers, record.counters = lambda: attendance.live_peers, attendance.counters

        def records() -> list[Presence]:
            return attendance.live_records(time.monotonic())

        async def live() -> str:
            await connection.serve_manifest(signed)
            await connection.serve_copies(Copies(learner.payloads, work, time.monotonic))
            keeping = asyncio.create_task(connection.keep_cache(records))
            try:
                return await attendance.live()
            finally:
                keeping.cancel()
                connection.save_cache(records())

        record.begin()
        hand.take(Held(record, attendance, reins))
        ended: Future[str] = line.thread.submit(live())
        ended.add_done_callback(end)
        train(learner, signals, attendance.post, replace(_hooks(record), turned=attendance.turned))
        record.why = ended.result()
