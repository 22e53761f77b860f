"""One peer from start to end, in order: home, identity, network, manifest, model, checkpoint, training, goodbye.

The node is one event loop in the main thread. Beside it are the training thread, in which the learner works and waits
for the trainer's process, and two threads that encode and decode.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import uvloop

from p2ptrain.base import cgroups
from p2ptrain.base.daemon_thread import DaemonThread
from p2ptrain.base.logging_setup import logging_installed
from p2ptrain.base.telemetry import EventLog, lossy_output
from p2ptrain.base.text import command_line
from p2ptrain.data.weight_files import check_option
from p2ptrain.host.loop import Signals, train
from p2ptrain.manifest import SignedManifest
from p2ptrain.net.identity import Identity
from p2ptrain.net.start_options import OptionsFile, merged
from p2ptrain.net.throttle import Throttles
from p2ptrain.recipes import RECIPES
from p2ptrain.tokens.opened import user_store
from peer.admission_client import AdmissionClient
from peer.assembly import TrainingSession, build, fitting_mesh
from peer.duplicate_identity import IdentityWatch
from peer.home import Home, home_for
from peer.keeper import check_options, check_run
from peer.manifest_fetch import ask_for_manifest
from peer.network import connect
from peer.owner.control import OwnerControl, TrainingHandle
from peer.owner.settings import Settings, SettingsFile, compile_mode
from peer.participation import TrainerControl
from peer.run_files import RunFiles
from peer.saving import SAVE_PERIOD_S
from peer.screen import Screen
from peer.session_recorder import SessionRecorder
from peer.sharing import Sharing
from peer.space import check_space, text_bytes
from peer.start_options import PeerOptions, StartOptions
from peer.state import StatusView
from peer.stopping import Stopping
from peer.swarm_task import CODEC_THREADS, SwarmTask, WrapEnvironment, task_alone, task_in_swarm
from peer.token_supply import TokenSupply
from peer.trackers import Tracker, folder_of, open_tensorboard, peer_name
from peer.training.devices import choose_devices, other_ranks
from peer.training.lan_address import check_to_lead


def run(options: PeerOptions, wrap: WrapEnvironment = lambda environment, learner, progress: environment) -> None:
    """Run a peer until the run ends or the owner stops it; ``wrap`` is for the lab's adversaries. Raises UserError."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run_peer(options, wrap))


async def run_peer(given: PeerOptions, wrap: WrapEnvironment) -> None:
    """Run a peer in this loop, as ``run``."""
    home = home_for(given.link, given.home)
    cgroups.check_pids()
    async with contextlib.AsyncExitStack() as stack:
        # what this computer's owner wants
        log = stack.enter_context(_log_of(home, given.verbose))
        file, start = SettingsFile(home.path), OptionsFile(home.path, StartOptions)
        settings, is_first = file.load(), not start.path.exists()
        saved = _saved(start, given)
        remembered = merged(given, saved)
        options = _completed(remembered, settings)
        devices, figures = _devices(given, options, home), folder_of(options.track)
        if words := saved.words():
            log.note("remembered", options=command_line(*words))
        signals, rates = Signals(), Throttles()
        owner = OwnerControl(home, file, settings, rates, signals, log)
        log.listen(owner.on_note)
        stopping = stack.enter_context(Stopping(signals, log))
        thread = stack.enter_context(DaemonThread("training"))
        await stack.enter_async_context(owner.running(stopping.watch))
        with stopping.handling_errors():
            # the network and the manifest
            identity = Identity.load_or_create(home.identity)
            signed = home.load_manifest(options.link.run_id if options.link else None)
            sharing = _sharing(identity, options, owner, figures is not None, log, stopping)
            is_alone = signed is not None and not RECIPES[signed.manifest.outer.recipe].exchanges
            network, admission, watch = None, None, IdentityWatch(home, log)
            if not is_alone:
                network = connection = await connect(
                    stack, options, home, identity, signed, log, rates, watch, lambda: stopping.is_hasty
                )
            if signed is None:
                assert options.link is not None  # home_for checked it
                signed = await ask_for_manifest(options.link, lambda: connection.node, log)
                home.save_manifest(signed)
            await thread.run(_check, signed, given, options, devices, home, log)
            if network is not None:  # checked before anything costly
                admission = AdmissionClient(network, home, signed, identity.peer_id, log)
                await admission.enter(options.link)

            # the run's files, and the trainer
            supply: TokenSupply | None = None
            if options.keep is None:
                files = RunFiles(options, home, signed, network, admission, log, rates)
                await files.index()
                if (supply := await files.supply(identity.peer_id)) is not None:
                    stopping.watch(supply.run())
                await files.others()
                await thread.run(files.weights, thread)
                start.save(remembered)  # not what was refused
                if supply is not None:
                    await supply.until_held_out()
            session = await thread.run(
                build, options, devices, home, identity, signed, log, stack, signals.stop.is_set, supply
            )
            record = session.record
            if options.keep is not None:  # ``build`` may refuse it
                start.save(remembered)
            if not is_first and record.checkpoints.digest is None:
                log.note("no checkpoint", seconds=SAVE_PERIOD_S)
            sharing.set_run(signed, home, record, bool(options.local))
            if figures is not None:
                _track(figures, record, sharing, log, stack)
            record.losses.is_stopping = signals.stop.is_set

            # training, in the swarm or alone
            control = TrainerControl(signals, record.learner.inbox.wake, options.keep is None)
            stopping.let_finish(control.wake)
            if network is None or admission is None:
                task = task_alone(session)
            else:
                pool = stack.enter_context(ThreadPoolExecutor(CODEC_THREADS, thread_name_prefix="codec"))
                task = task_in_swarm(session, control, network, watch, signed, admission, sharing, pool, wrap)
            await _train(session, task, control, owner, thread)
            if (fault := watch.error()) is not None:
                raise fault
            if not record.learner.ended:
                log.note("to resume", command=command_line("p2ptrain", "peer", "--home", home.path.absolute()))
            if record.learner.step and options.keep is None:  # else there is nothing trained to export
                log.note("to export", command=home.export_command)


# --- parts ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _log_of(home: Home, verbose: bool) -> Iterator[EventLog]:
    """Lock the home; open its event log and the screen, which shows it."""
    with (
        home.locked(),
        lossy_output(),
        logging_installed(),
        closing(EventLog(home.events)) as log,
        Screen(verbose=verbose) as screen,
    ):
        log.listen(screen.show)
        yield log


def _saved(start: OptionsFile[StartOptions], given: PeerOptions) -> StartOptions:
    """Return the options that the home remembers, as far as this start uses them."""
    saved = StartOptions() if given.forget else start.load()
    return saved if given.device is None else saved.without_stages()


def _completed(options: PeerOptions, settings: Settings) -> PeerOptions:
    """Add what the settings allow, and set the number of torch threads."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    return replace(
        options,
        memory_bytes=settings.memory_bytes,
        compile=compile_mode(settings.compile, os.environ),
        punch=settings.punch,
    )


def _devices(given: PeerOptions, options: PeerOptions, home: Home) -> Sequence[torch.device]:
    """Return the devices to train on. Raises UserError for options that contradict each other."""
    devices = choose_devices(options.device or "auto") if options.keep is None else [torch.device("cpu")]
    if options.keep is not None:
        check_options(given, options.keep, home)
    if other_ranks(options.team, options.at, devices) and options.at:
        check_to_lead(options.at)
    return devices


def _sharing(
    identity: Identity,
    options: PeerOptions,
    owner: OwnerControl,
    is_tracked: bool,
    log: EventLog,
    stopping: Stopping,
) -> Sharing:
    """Open the page, before the network starts: the page's port may be taken."""
    state = StatusView(identity.peer_id, options.nickname or "", owner.state)
    sharing = Sharing(state, owner, options.page_address, bool(options.share), is_tracked=is_tracked)
    log.listen(state.on_note)
    sharing.open(stopping.watch, log)
    return sharing


def _check(
    signed: SignedManifest,
    given: PeerOptions,
    options: PeerOptions,
    devices: Sequence[torch.device],
    home: Home,
    log: EventLog,
) -> None:
    """Raise UserError if this machine or these options do not fit the run; note if space is little."""
    if options.keep is not None:
        check_run(signed)
        return
    for warning in check_space(home.path, signed.manifest, user_store(), text_bytes(options.text_gb)):
        log.note("little space", why=warning)
    check_option(signed.manifest, given.weights)
    fitting_mesh(options, devices, signed.manifest)


def _track(
    folder: Path, record: SessionRecorder, sharing: Sharing, log: EventLog, stack: contextlib.AsyncExitStack
) -> None:
    opened = partial(open_tensorboard, folder / peer_name(record.nickname, record.me))
    tracker = stack.enter_context(Tracker(opened, sharing.state.momentary, log))
    log.listen(tracker.on_note)
    record.on_outer_step = tracker.record


async def _train(
    session: TrainingSession, task: SwarmTask, control: TrainerControl, owner: OwnerControl, thread: DaemonThread
) -> None:
    """Train until the peer's part in the swarm ends, and save. Saves hours of training, whatever fails."""
    record, wake = session.record, control.wake

    def finish(_: asyncio.Task[str]) -> None:
        control.signals.finished.set()
        wake()

    running: asyncio.Task[str] | None = None
    try:
        await thread.run(record.begin, wake=wake)
        owner.take(TrainingHandle(record, task.participation, control, task.admission))
        running = asyncio.create_task(task.run())
        running.add_done_callback(finish)
        record.on_turn = task.turned
        await thread.run(train, record.learner, control.signals, task.post, record, wake=wake)
        record.why = await running
        await thread.run(record.end, wake=wake)
    except Exception:
        await thread.run(record.saver.rescue, wake=wake)
        raise
    finally:
        if running is not None:
            running.cancel()
            await asyncio.wait([running])
