"""What a node does while its trainer trains: take part in the swarm and serve its peers, or nothing without a swarm."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from p2ptrain.base.background import in_background
from p2ptrain.base.clock import steady
from p2ptrain.base.ids import PeerId
from p2ptrain.data.file_store import named_files
from p2ptrain.manifest import SignedManifest
from p2ptrain.net.driver import DriverEnvironment
from p2ptrain.net.file_service import FILES_PROTOCOL, FileServer
from p2ptrain.net.file_service import LIMITS as FILES_LIMITS
from p2ptrain.net.weight_download import Downloader
from p2ptrain.net.weight_server import COPIES_PROTOCOL, WeightServer
from p2ptrain.net.weight_server import LIMITS as COPIES_LIMITS
from p2ptrain.ports import Link, Transport
from p2ptrain.swarm import Presence
from p2ptrain.swarm.events import Event, LeaveRequested, TrainingEnded
from peer.admission_client import AdmissionClient
from peer.assembly import TrainingSession
from peer.contributions import LIMITS as RECEIPT_LIMITS
from peer.contributions import RECEIPT_PROTOCOL, Contributions
from peer.duplicate_identity import IdentityWatch
from peer.ledger import Ledger
from peer.network import Connection
from peer.participation import Participation, TrainerControl
from peer.paths import PathNotebook
from peer.sharing import Sharing

CODEC_THREADS = 2
"""Threads that encode and decode; two, so that a large exchange does not delay a small one. torch releases the GIL."""

WrapEnvironment = Callable[[DriverEnvironment, Any, float], DriverEnvironment]
"""Maps an honest peer's environment, its learner and the run's tokens to the environment to use."""


@dataclass(frozen=True, slots=True)
class SwarmTask:
    run: Callable[[], Coroutine[Any, Any, str]]
    """Runs until nothing is left to do; returns why the peer ends."""
    post: Callable[[Event], None]
    """Passes on an event of the training loop, in its thread."""
    turned: Callable[[], None] = lambda: None
    """As ``Hooks.turned``."""
    participation: Participation | None = None
    admission: Callable[[], str] = str
    """Returns whether the run admits this peer; empty in an open run."""


def task_alone(session: TrainingSession) -> SwarmTask:
    """Return the task of a peer whose recipe exchanges nothing: what would end the core ends it."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def post(event: Event) -> None:
        if isinstance(event, TrainingEnded | LeaveRequested):
            loop.call_soon_threadsafe(over.set)

    async def run() -> str:
        await over.wait()
        return "the run's end" if session.record.learner.ended else "stopped by its owner"

    return SwarmTask(run, post)


def task_in_swarm(
    session: TrainingSession,
    control: TrainerControl,
    connection: Connection,
    watch: IdentityWatch,
    signed: SignedManifest,
    admission: AdmissionClient,
    sharing: Sharing,
    pool: ThreadPoolExecutor,
    wrap: WrapEnvironment,
) -> SwarmTask:
    """Return the task of a peer in the swarm.

    Args:
        pool: encodes and decodes, with ``CODEC_THREADS`` threads.
    """
    record, learner = session.record, session.record.learner
    foreign_tokens = record.home.foreign_tokens()

    async def work(function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)

    async def dial(peer: PeerId, addresses: Sequence[str]) -> Link:
        return await admission.transport(connection.speaking(COPIES_PROTOCOL, COPIES_LIMITS)).open(peer, addresses)

    contributions = Contributions(
        signed.run_id,
        connection.identity.peer_id,
        connection.identity.state,
        Ledger(record.home.contributions),
        lambda: (learner.step, max(learner.tokens - foreign_tokens, 0)),
        record.notebook,
    )
    environment = DriverEnvironment(
        transport=admission.transport(),
        directory=connection,
        notebook=PathNotebook(record.notebook, connection.paths),
        clock=steady,
        sign=connection.sign,
        live_until=admission.live_until,
        begin_training=control.begin,
        work=work,
        committed=contributions.exchanged,
        downloader=Downloader(
            dial,
            learner.payloads.weight_sizes(),
            work,
            record.notebook,
            contributions.taken,
            wanted=session.record.keeps,
        ),
    )
    environment = wrap(environment, learner, float(record.run_tokens))
    weight_server = WeightServer(
        learner.payloads,
        environment.work,
        time.monotonic,
        contributions.given,
        connection.rates,
        admission.counts,
        session.record.keeps,
    )
    stored = {each.sha256: record.home.files.find(each.sha256) for each in named_files(signed.manifest)}
    file_server = FileServer({sha256: path for sha256, path in stored.items() if path is not None}, connection.rates)
    participation = Participation(learner, session.new_core, replace(environment, weight_server=weight_server), control)
    record.live_peers, record.counters = lambda: participation.live_peers, participation.counters

    def stop() -> None:
        control.signals.stop.set()
        control.wake()

    watch.stop_by(stop)

    def records() -> list[Presence]:
        return participation.live_records(steady())

    def receipt_transport() -> Transport:
        return connection.speaking(RECEIPT_PROTOCOL, RECEIPT_LIMITS)

    async def run() -> str:
        await connection.serve_manifest(signed)
        await connection.serve(RECEIPT_PROTOCOL, RECEIPT_LIMITS, contributions.answer)
        await connection.serve(FILES_PROTOCOL, FILES_LIMITS, admission.guarded(file_server.answer))
        await connection.serve(COPIES_PROTOCOL, COPIES_LIMITS, admission.guarded(weight_server.answer))
        tasks = in_background(
            connection.keep_cache(records),
            admission.update(),
            sharing.update(connection, participation, connection.paths, contributions),
        )
        try:
            async with tasks, contributions.gathering(receipt_transport):
                why = await participation.live()
                return why if watch.rival is None else "another process uses its identity"
        finally:
            connection.save_cache(records())

    return SwarmTask(run, participation.post, participation.turned, participation, lambda: admission.status)
