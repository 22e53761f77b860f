"""Swarm of two peers for measurements: ours trains; the partner, in its own process, only exchanges on command.

Everything except the partner's training is real: protocol core, driver, p2pd, DHT and codec threads, as ``peer.app``
builds them. A measurement announces an outer step to both cores to get exchanges, and to none to get quiet.

On Linux with at least two cores, the trainer has a core to itself and everything else shares another one.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from bench.network_thread import NetworkThread
from p2ptrain.base.ids import PeerId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.host.learner import Learner
from p2ptrain.host.rules import codecs_of, learner_rules, swarm_rules
from p2ptrain.manifest import Manifest, SignedManifest, preset, with_changes
from p2ptrain.net.driver import Driver, DriverEnvironment
from p2ptrain.net.identity import Identity
from p2ptrain.outer.fragments import slices
from p2ptrain.ports import InnerTask
from p2ptrain.swarm import Peer
from p2ptrain.swarm.events import Applied, Event, ExchangeDue, OuterStepDone
from p2ptrain.tokens.opened import open_corpus, user_store
from p2ptrain.train.autofit import Placement, place
from p2ptrain.train.batches import CorpusReader
from p2ptrain.train.inner import LanguageModelTask
from p2ptrain.train.model import flat_model
from peer.home import Addresses, Home
from peer.network import Connection
from peer.start_options import PeerOptions
from peer.swarm_task import CODEC_THREADS

CPU = torch.device("cpu")
TOKENS = 1000
"""Tokens of a fake outer step."""
QUIET_S = 1.0
"""Time without any counted event after which exchanges are over."""
BEGIN_DEADLINE_S = 60.0
_READER = PeerId("bench")


def manifest_of(preset_name: str, changes: Mapping[str, Any]) -> Manifest:
    return with_changes(preset(preset_name), changes)


def language_model_task(
    manifest: Manifest, device: torch.device = CPU, placement: Placement | None = None
) -> LanguageModelTask:
    """Return the inner task of the run with the model on the device, placed by ``place`` if no placement is given."""
    model = flat_model(manifest.model, manifest.run.seed, device)
    return LanguageModelTask(
        model,
        open_corpus(manifest, user_store(), None),
        manifest.training,
        manifest.run.tokens,
        CorpusReader(manifest.run.seed, _READER),
        placement or place(model, manifest.model, manifest.training),
    )


# --- processor cores --------------------------------------------------------------------------------------------------


def can_pin() -> bool:
    """Return whether the trainer can have a core to itself."""
    return hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) > 1


@contextmanager
def on_core(trainer: bool) -> Iterator[None]:
    """Bind this thread, and the threads and processes it starts, to the trainer's core or to the other one."""
    if not can_pin():
        yield
        return
    before = os.sched_getaffinity(0)
    first, second, *_ = sorted(before)
    os.sched_setaffinity(0, {first if trainer else second})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# --- one side ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Side:
    """Peer without a training loop."""

    learner: Learner
    core: Peer
    driver: Driver
    begun: threading.Event
    """Set when the core lets the trainer run."""
    address: str
    due: int
    """Exchanges that are due within an inner phase; 0 if they are due at the outer step."""

    def make_due(self, step: int, progress: float) -> None:
        """Tell the core about an outer step and about every exchange that is due in the next phase."""
        self.driver.post(OuterStepDone(step, progress, TOKENS))
        for _ in range(self.due):
            self.driver.post(ExchangeDue())


@contextmanager
def side(manifest: Manifest, task: InnerTask, key: Path, bootstraps: tuple[str, ...] = ()) -> Iterator[Side]:
    """Yield a learner for this task with a network that exchanges its weights until the block ends."""
    fragments = slices(len(task.theta), manifest.outer.fragments)
    chosen, _ = codecs_of(manifest.codec)
    tokens = manifest.run.tokens
    learned = learner_rules(manifest.outer, tokens)
    learner = Learner(task, learned, fragments, chosen, MemoryLog())
    identity = Identity.load_or_create(key)
    signed = SignedManifest(manifest, "")  # never shown to anyone
    rules = swarm_rules(
        signed.run_id, manifest.outer, manifest.swarm, learner.payloads, tokens, manifest.tokens_per_outer_step
    )
    core = Peer(identity.peer_id, rules, Random(0))
    notebook, begun = MemoryLog(), threading.Event()
    home = Home(key.with_suffix(".home"))
    home.path.mkdir(exist_ok=True)
    home.save_addresses(Addresses((), bootstraps))
    with NetworkThread() as thread, ThreadPoolExecutor(CODEC_THREADS) as pool:

        async def work(function: Callable[..., Any], *arguments: Any) -> Any:
            return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)

        connection = Connection(home, identity, signed.run_id, PeerOptions(link=None, local=True), notebook)
        thread.call(connection.start())
        environment = DriverEnvironment(
            transport=connection,
            directory=connection,
            notebook=notebook,
            clock=time.monotonic,
            sign=connection.sign,
            live_until=lambda presence: presence.issued_at + presence.lifetime_s,
            begin_training=begun.set,
            work=work,
        )
        driver = Driver(core, learner, environment)
        running = thread.submit(driver.run())
        try:
            yield Side(learner, core, driver, begun, connection.addresses[0], len(learned.due))
        finally:
            running.cancel()
            thread.call(connection.close())


# --- both -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Couple:
    """Our side, and the pipe that announces outer steps to the partner."""

    ours: Side
    partner: subprocess.Popen[str]
    taken_in: int = 0
    """Displacements that our trainer has applied."""

    def advance(self) -> None:
        """Apply what is ready, then make one inner step."""
        self._tell(self.ours.learner.advance())

    def exchange(self) -> None:
        """Make the exchanges of one outer step due on both sides."""
        learner = self.ours.learner
        self.ours.make_due(learner.step, learner.progress)
        assert self.partner.stdin is not None
        self.partner.stdin.write(json.dumps([learner.step, learner.progress]) + "\n")
        self.partner.stdin.flush()

    def settle(self) -> None:
        """Wait until no exchange is in progress."""
        counted, since = -1, time.monotonic()
        while time.monotonic() - since < QUIET_S:
            self._tell(self.ours.learner.settle(wait_s=0.1))
            counters = self.ours.core.counters
            now = self.taken_in + counters.exchanges_ok + counters.exchanges_failed + counters.offers_refused
            if now != counted:
                counted, since = now, time.monotonic()

    def _tell(self, events: list[Event]) -> None:
        """Tell the core about displacements; only ``exchange`` makes exchanges due."""
        for event in events:
            self.taken_in += isinstance(event, Applied)
            if not isinstance(event, OuterStepDone | ExchangeDue):
                self.ours.driver.post(event)


@contextmanager
def couple(preset_name: str, changes: Mapping[str, Any], folder: Path, device: torch.device = CPU) -> Iterator[Couple]:
    """Yield two connected peers, of which ours trains on the device. The block runs on the trainer's core."""
    manifest = manifest_of(preset_name, changes)
    with on_core(trainer=False):
        command = [sys.executable, "-m", "bench.couple", preset_name, json.dumps(changes), str(folder / "partner.key")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as partner:
            assert partner.stdin is not None
            assert partner.stdout is not None
            try:
                address = json.loads(partner.stdout.readline())
                task = language_model_task(manifest, device)
                with side(manifest, task, folder / "trainer.key", (address,)) as ours:
                    if not ours.begun.wait(BEGIN_DEADLINE_S):
                        raise RuntimeError("the protocol core never let the trainer begin")
                    with on_core(trainer=True):
                        yield Couple(ours, partner)
            finally:
                partner.stdin.close()
                partner.wait(30)


class IdleTask:
    """Inner task of the partner: weights without training (``ports.InnerTask``)."""

    def __init__(self, theta: Tensor) -> None:
        self.theta = theta

    def inner_step(self, progress: float) -> Any:
        raise RuntimeError("the partner does not train")

    def reset(self, warmup_steps: int) -> None:
        """Do nothing: there is no optimizer."""

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Do nothing: there is no state."""


def be_partner(preset_name: str, changes: Mapping[str, Any], key: Path) -> None:
    """Exchange for each outer step that a line of standard input names, until it ends."""
    manifest = manifest_of(preset_name, changes)
    task = IdleTask(flat_model(manifest.model, manifest.run.seed, CPU).theta)
    over = threading.Event()
    with side(manifest, task, key) as ours:

        def listen() -> None:
            for line in sys.stdin:
                step, progress = json.loads(line)
                ours.make_due(step, progress)
            over.set()
            ours.learner.inbox.wake()

        sys.stdout.write(json.dumps(ours.address) + "\n")
        sys.stdout.flush()
        threading.Thread(target=listen, daemon=True).start()
        while not over.is_set():
            for event in ours.learner.settle(wait_s=60.0):
                ours.driver.post(event)


if __name__ == "__main__":
    be_partner(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
