"""One peer from start to end, in order: home, identity, network, manifest, model, checkpoint, training, goodbye."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from p2ptrain.base import cgroups
from p2ptrain.base.clock import steady
from p2ptrain.base.ids import PeerId
from p2ptrain.base.logging_setup import logging_installed, reporting
from p2ptrain.base.telemetry import EventLog, lossy_output
from p2ptrain.base.text import command_line
from p2ptrain.checkpoint import checkpoints_in
from p2ptrain.data.corpus import check_named
from p2ptrain.data.file_store import named_files
from p2ptrain.data.stream import cache_directory
from p2ptrain.data.weight_files import check_option
from p2ptrain.manifest import SignedManifest
from p2ptrain.net.driver import DriverEnvironment
from p2ptrain.net.file_service import FILES_PROTOCOL, FileServer
from p2ptrain.net.file_service import LIMITS as FILES_LIMITS
from p2ptrain.net.identity import Identity
from p2ptrain.net.receipt_service import LIMITS as RECEIPT_LIMITS
from p2ptrain.net.receipt_service import RECEIPT_PROTOCOL
from p2ptrain.net.start_options import merged
from p2ptrain.net.throttle import Throttles
from p2ptrain.net.weight_download import Downloader
from p2ptrain.net.weight_server import COPIES_PROTOCOL, WeightServer
from p2ptrain.net.weight_server import LIMITS as COPIES_LIMITS
from p2ptrain.ports import Link, Transport
from p2ptrain.recipes import RECIPES
from p2ptrain.swarm import Presence
from p2ptrain.swarm.events import Event, LeaveRequested, TrainingEnded
from p2ptrain.train.accelerator import card_name
from p2ptrain.train.loop import Hooks, Signals, train
from peer.admission_client import AdmissionClient
from peer.assembly import PeerOptions, TrainingSession, build
from peer.contributions import Contributions
from peer.home import home_for
from peer.keeper import KeeperRecorder, build_keeper, check_options, check_run
from peer.ledger import Ledger
from peer.manifest_fetch import ask_for_manifest
from peer.network_stack import NetworkStack, connect
from peer.owner.control import OwnerControl, TrainingHandle
from peer.owner.sensors import Sensors
from peer.owner.settings import Settings, SettingsFile, compile_mode
from peer.participation import Participation, TrainerControl
from peer.paths import PathNotebook
from peer.run_files import with_files
from peer.saving import SAVE_PERIOD_S
from peer.screen import Screen
from peer.session_recorder import SessionRecorder
from peer.sharing import Sharing
from peer.space import check_space
from peer.start_options import StartFile, StartOptions
from peer.state import StatusView
from peer.stopping import Stopping
from peer.team.recovery import Recovery, TeamStoppedError
from peer.trackers import TrackedRun, Tracker, target_of
from peer.training.devices import choose_devices, other_ranks

CODEC_THREADS = 2
"""Threads that encode and decode; two, so that a large exchange does not delay a small one. torch releases the GIL."""

ENDING_S = 0.05
"""Seconds between two looks at whether the network has ended."""

GOODBYE_S = 5.0
"""Longest farewell of a peer that is stopped while its ranks start again: nothing can be applied any more. Guess: how
long partners need to hear of it."""

WrapEnvironment = Callable[[DriverEnvironment, Any, float], DriverEnvironment]
"""Maps an honest peer's environment, its learner and the run's tokens to the environment to use."""


def run_peer(options: PeerOptions, wrap: WrapEnvironment = lambda environment, learner, progress: environment) -> None:
    """Run a peer until the run ends or the owner stops it; ``wrap`` is for the lab's adversaries. Raises UserError."""
    home = home_for(options.link, options.home)
    cgroups.check_pids()
    with (
        home.locked(),
        lossy_output(),
        logging_installed(),
        closing(EventLog(home.events)) as log,
        Screen(verbose=options.verbose) as screen,
    ):
        file = SettingsFile(home.path)
        settings = file.load()
        start = StartFile(home.path)
        saved = StartOptions() if options.forget else start.load(settings)
        is_first = not start.path.exists()
        if options.device is not None:
            saved = saved.without_stages()
        given, remembered = options, merged(options, saved)
        options = _completed(remembered, settings)
        keeps = options.keep is not None
        devices = [torch.device("cpu")] if keeps else choose_devices(options.device or "auto")
        if options.keep is not None:
            check_options(given, options.keep, home)
        other_ranks(options.team, options.at, devices)  # wrong options are not remembered
        target = target_of(options.track)
        log.listen(screen.show)
        if words := saved.words():
            log.note("remembered", options=command_line(*words))
        signals, rates = Signals(), Throttles()
        sensors = Sensors(cache_directory() / "cards", [name for each in devices if (name := card_name(each))])
        owner = OwnerControl(home, file, settings, rates, signals, log, sensors)
        owner.nickname = options.nickname or ""
        log.listen(owner.on_note)
        with Stopping(signals, log) as stopping, owner, contextlib.ExitStack() as stack, stopping.handling_errors():
            identity = Identity.load_or_create(home.identity)
            signed = home.load_manifest(options.link.run_id if options.link else None)
            state = StatusView(identity.peer_id, options.nickname or "", owner.state)
            sharing = Sharing(state, owner, options.page_address, bool(options.share), is_tracked=target is not None)
            log.listen(sharing.state.on_note)
            sharing.open(stack, log)  # before the network starts: the page's port may be taken
            is_alone = signed is not None and not RECIPES[signed.manifest.outer.recipe].exchanges
            network = None if is_alone else connect(stack, options, home, identity, signed, log, rates)
            if signed is None:
                assert network is not None
                assert options.link is not None  # home_for checked it
                connection = network.connection
                signed = network.thread.call(ask_for_manifest(options.link, lambda: connection.node, log))
                home.save_manifest(signed)
            if keeps:
                check_run(signed)
            else:
                for warning in check_space(home.path, signed.manifest, cache_directory()):
                    log.note("little space", why=warning)
                check_named(signed.manifest, given.data, given.tokenizer, False, given.template)
                check_option(signed.manifest, given.weights)
            admission = None
            if network is not None:  # checked before anything costly
                admission = AdmissionClient(network.connection, home, signed, identity.peer_id, log)
                network.thread.call(admission.enter(options.link))
            if keeps:
                session = build_keeper(options, home, identity, signed, log)
                start.save(remembered, settings)
            else:
                options = with_files(options, given, home, signed, network, admission, log)
                start.save(remembered, settings)  # not what was refused
                session = build(options, devices, home, identity, signed, log, stack, signals.stop.is_set)
            if not is_first and session.record.checkpoints.digest is None:
                log.note("no checkpoint", seconds=SAVE_PERIOD_S)
            sharing.set_run(signed, home, session.record, bool(options.local))
            if target is not None:
                tracked = TrackedRun(signed.run_id, signed.manifest.run.name, identity.peer_id, options.nickname or "")
                tracker = stack.enter_context(Tracker(partial(target.open, tracked), state.momentary, log))
                log.listen(tracker.on_note)
                session.record.on_outer_step = tracker.record
            session.record.is_stopping = signals.stop.is_set
            session.record.saver.is_terminated = lambda: stopping.is_terminated
            stopping.let_finish(session.record.learner.inbox.wake)
            try:
                if network is None or admission is None:
                    _run_alone(session, signals, owner)
                else:
                    _run_in_swarm(session, signals, owner, network, signed, admission, sharing, wrap)
                Recovery(session.team, session.record).run(session.record.end)
            except TeamStoppedError:  # after the last checkpoint no ranks were left to save another
                log.note("checkpoint kept", step=max(checkpoints_in(home.checkpoints), default=None))
            except Exception:  # save hours of training, whatever failed
                if session.team is None or session.team.is_running:
                    session.record.saver.rescue()
                raise
            if network is not None and (fault := network.identity_watch.error()):
                raise fault
            place = home.path.absolute()
            if not session.record.learner.ended:
                log.note("to resume", command=command_line("p2ptrain", "peer", "--home", place))
            if session.record.learner.step and not keeps:  # else export would write untrained weights
                log.note("to export", command=home.export_command)


# --- before training --------------------------------------------------------------------------------------------------


def _completed(options: PeerOptions, settings: Settings) -> PeerOptions:
    """Fill in from the settings what the command line leaves open, and set the number of torch threads."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = settings.device if options.device is None else options.device
    return replace(
        options,
        device=device,
        stages=options.stages or settings.stages or None,
        nickname=options.nickname or settings.nickname,
        memory_bytes=settings.memory_bytes,
        track=options.track or settings.track,
        compile=compile_mode(settings.compile, os.environ),
        punch=settings.punch,
    )


# --- training ---------------------------------------------------------------------------------------------------------


def _hooks(record: SessionRecorder) -> Hooks:
    if isinstance(record, KeeperRecorder):
        return Hooks(record.turned, record.turned, record.turned, leaving=record.leaving)
    return Hooks(
        record.inner_step_done,
        record.outer_step_done,
        record.training_ended,
        record.held,
        leaving=record.leaving,
        concluded=record.conclude,
        is_due=lambda: record.saver.is_due,
    )


def _run_alone(session: TrainingSession, signals: Signals, owner: OwnerControl) -> None:
    """Train without a network, for a recipe without exchanges; the events that would end the core end the run."""
    record = session.record

    def post(event: Event) -> None:
        if isinstance(event, TrainingEnded | LeaveRequested):
            signals.finished.set()
            record.learner.inbox.wake()  # the trainer may be about to wait

    recovery = Recovery(session.team, record)
    recovery.run(record.begin)
    signals.begin.set()
    owner.take(TrainingHandle(record, None, TrainerControl(signals, record.learner.inbox.wake)))
    recovery.run(lambda: train(record.learner, signals, post, _hooks(record)))
    record.why = "the run's end" if record.learner.ended else "stopped by its owner"


def _run_in_swarm(
    session: TrainingSession,
    signals: Signals,
    owner: OwnerControl,
    network: NetworkStack,
    signed: SignedManifest,
    admission: AdmissionClient,
    sharing: Sharing,
    wrap: WrapEnvironment,
) -> None:
    record = session.record
    learner = record.learner
    control = TrainerControl(signals, learner.inbox.wake)

    def end(_: Future[str]) -> None:
        signals.finished.set()
        learner.inbox.wake()

    with ThreadPoolExecutor(CODEC_THREADS, thread_name_prefix="codec") as pool:

        async def work(function: Callable[..., Any], *arguments: Any) -> Any:
            return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)

        connection, foreign_tokens = network.connection, record.home.foreign_tokens()
        contributions = Contributions(
            signed.run_id,
            network.identity.peer_id,
            network.identity.state,
            Ledger(record.home.contributions),
            lambda: (learner.step, max(learner.tokens - foreign_tokens, 0)),
            record.notebook,
        )

        async def dial(peer: PeerId, addresses: Sequence[str]) -> Link:
            return await admission.transport(connection.speaking(COPIES_PROTOCOL, COPIES_LIMITS)).open(peer, addresses)

        sizes = learner.payloads.weight_sizes()
        environment = DriverEnvironment(
            transport=admission.transport(),
            directory=connection,
            notebook=PathNotebook(record.notebook, network.paths),
            clock=steady,
            sign=connection.sign,
            live_until=admission.live_until,
            begin_training=control.begin,
            work=work,
            committed=contributions.exchanged,
            downloader=Downloader(
                dial,
                sizes,
                work,
                record.notebook,
                contributions.taken,
                new_store=learner.payloads.new_download,
                wanted=session.held,
            ),
        )
        environment = wrap(environment, learner, float(record.run_tokens))
        weight_server = WeightServer(
            learner.payloads,
            environment.work,
            time.monotonic,
            contributions.given,
            network.rates,
            admission.counts,
            session.held,
        )
        environment = replace(environment, weight_server=weight_server)
        stored = {each.sha256: record.home.files.find(each.sha256) for each in named_files(signed.manifest)}
        file_server = FileServer({sha256: path for sha256, path in stored.items() if path is not None}, network.rates)
        participation = Participation(learner, session.new_core, environment, control)

        def stop() -> None:
            signals.stop.set()
            learner.inbox.wake()

        watch = network.identity_watch
        watch.stop_by(stop)
        record.live_peers, record.counters = lambda: participation.live_peers, participation.counters

        def records() -> list[Presence]:
            return participation.live_records(steady())

        def receipt_transport() -> Transport:
            return connection.speaking(RECEIPT_PROTOCOL, RECEIPT_LIMITS)

        async def live() -> str:
            await connection.serve_manifest(signed)
            await connection.serve(RECEIPT_PROTOCOL, RECEIPT_LIMITS, contributions.answer)
            await connection.serve(FILES_PROTOCOL, FILES_LIMITS, admission.guarded(file_server.answer))
            await connection.serve(COPIES_PROTOCOL, COPIES_LIMITS, admission.guarded(weight_server.answer))
            cache_task = asyncio.create_task(connection.keep_cache(records))
            cache_task.add_done_callback(reporting("the peer cache"))
            try:
                seen = sharing.serving(connection, participation, network.paths, contributions)
                async with admission.updating(), contributions.gathering(receipt_transport), seen:
                    why = await participation.live()
                    await watch.linger(connection.announce_briefly)
                    return why if watch.rival is None else "another process uses its identity"
            finally:
                cache_task.cancel()
                connection.save_cache(records())

        recovery = Recovery(session.team, record, participation)
        recovery.run(record.begin)
        owner.take(TrainingHandle(record, participation, control, lambda: admission.status))
        ended: Future[str] = network.thread.submit(live())
        ended.add_done_callback(end)
        hooks = replace(_hooks(record), turned=participation.turned)
        if isinstance(record, KeeperRecorder):
            hooks = replace(hooks, turned=record.turned_after(participation.turned))
        try:
            recovery.run(lambda: session.loop(learner, signals, participation.post, hooks))
        except TeamStoppedError:
            _say_goodbye(recovery, participation, ended)
            record.why = "stopped by its owner"
            raise
        record.why = ended.result()


def _say_goodbye(recovery: Recovery, participation: Participation, ended: Future[str]) -> None:
    """Leave the swarm without a generation of ranks; what partners still deliver is dropped."""
    participation.post(LeaveRequested())
    until = time.monotonic() + GOODBYE_S
    while not ended.done() and time.monotonic() < until:
        recovery.drop_deliveries()
        participation.turned()
        time.sleep(ENDING_S)
    ended.cancel()
