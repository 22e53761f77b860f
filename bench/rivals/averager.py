"""Peer that trains like ours and averages with hivemind's own averager; and the DHT node that it starts from.

    python -m bench.rivals.averager --meet FILE ADDRESS                  a DHT node; FILE gets its addresses
    python -m bench.rivals.averager --manifest FILE --home DIR --peers N --link FILE ADDRESS

H inner steps, then one blocking ``DecentralizedAverager.step`` over weights and progress. All settings are hivemind's
defaults, except for one group of all peers and fp16 on the wire. A newcomer calls ``load_state_from_peers``. SIGTERM
ends the process; it writes the same notes and summary as a peer of ours.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import threading
import time
from pathlib import Path
from typing import Any

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import Float16Compression

from p2ptrain.base.ids import PeerId
from p2ptrain.base.telemetry import EventLog
from p2ptrain.manifest import Manifest, parse_toml
from p2ptrain.tokens.corpus import HELD_OUT_TOKENS
from p2ptrain.tokens.opened import open_corpus, user_store
from p2ptrain.train.autofit import place
from p2ptrain.train.batches import CorpusReader
from p2ptrain.train.evaluate import validation_loss
from p2ptrain.train.inner import LanguageModelTask
from p2ptrain.train.model import flat_model
from peer.session_recorder import PROGRESS_PERIOD_S

ROUND_S = 120.0
"""Timeout of one average with retries, of OpenDiLoCo's order of magnitude. Guess: measure averages on home lines."""
STATE_S = 60.0
"""Timeout of a newcomer's download."""
TICK_S = 0.05
PROGRESS_UNIT = float(1 << 20)
"""Unit of progress in tokens, since fp16 ends at 65,504."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--meet", type=Path)
    parser.add_argument("--manifest", type=Path)
    parser.add_argument("--home", type=Path)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--link", type=Path)
    parser.add_argument("--late", action="store_true")
    parser.add_argument("address")
    given = parser.parse_args()
    leaving = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leaving.set())
    places = [f"/ip4/{given.address}/tcp/0"]
    if given.meet is not None:
        dht = hivemind.DHT(start=True, host_maddrs=places)
        given.meet.write_text("\n".join(map(str, dht.get_visible_maddrs())), encoding="utf-8")
        leaving.wait()
        dht.shutdown()
        return
    others = given.link.read_text(encoding="utf-8").split()
    dht = hivemind.DHT(others, start=True, host_maddrs=places)
    try:
        _train(given.manifest, given.home, given.peers, given.late, dht, leaving)
    finally:
        dht.shutdown()  # its process would keep ours alive


def _train(source: Path, home: Path, peers: int, late: bool, dht: hivemind.DHT, leaving: threading.Event) -> None:
    manifest = parse_toml(source.read_text(encoding="utf-8"))
    home.mkdir(parents=True, exist_ok=True)
    log = EventLog(home / "events.jsonl")
    peer = Averaging(manifest, home.name, dht, peers, log, leaving)
    try:
        if late:
            peer.catch_up()
        peer.run()
        (home / "summary.json").write_text(json.dumps(peer.summary()), encoding="utf-8")
    finally:
        peer.averager.shutdown()
        log.close()


class Averaging:
    """Peer of the averager."""

    def __init__(
        self,
        manifest: Manifest,
        name: str,
        dht: hivemind.DHT,
        peers: int,
        log: EventLog,
        leaving: threading.Event,
    ) -> None:
        self._manifest, self._log, self._leaving = manifest, log, leaving
        self._corpus = open_corpus(manifest, user_store(), None)
        device = torch.device("cpu")
        model = flat_model(manifest.model, manifest.run.seed, device)
        self._placement = place(model, manifest.model, manifest.training)
        reader = CorpusReader(manifest.run.seed, PeerId(name))
        run_tokens = manifest.run.tokens
        self._task = LanguageModelTask(model, self._corpus, manifest.training, run_tokens, reader, self._placement)
        self._peers = peers
        self._progress, self._tokens, self._step = 0.0, 0, 0
        self._loss, self._blocked_s = math.nan, 0.0
        self._began_at = self._next_note = 0.0
        self.averager = DecentralizedAverager(
            [self._task.theta.clone(), torch.zeros(1)],
            dht,
            start=True,
            prefix=manifest.run.name,
            target_group_size=peers,
            compression=Float16Compression(),
        )

    def catch_up(self) -> None:
        """Download weights and progress, with retries until ``STATE_S`` is over."""
        ends_at = time.monotonic() + STATE_S
        while (left_s := ends_at - time.monotonic()) > 0 and not self._leaving.is_set():
            found = self.averager.load_state_from_peers(timeout=left_s)
            if found is not None:
                self._take(found[1])
                self._log.note("caught up", progress=self._progress)
                return

    def run(self) -> None:
        """Train until asked to leave."""
        self._log.note("started", parameters=self._task.model.layout.parameter_count)
        self._began_at = time.monotonic()
        while not self._leaving.is_set():
            losses = []
            for _ in range(self._manifest.outer.inner_steps):
                result = self._task.inner_step(self._progress)
                self._progress += result.tokens * self._peers
                self._tokens += result.tokens
                losses.append(result.loss)
                self._note()
                if self._leaving.is_set():
                    return
            self._loss = sum(losses) / len(losses)
            self._average()
            self._step += 1

    def _average(self) -> None:
        started = time.monotonic()
        with self.averager.get_tensors() as (weights, progress):
            weights.copy_(self._task.theta)
            progress.fill_(self._progress / PROGRESS_UNIT)
        control = self.averager.step(wait=False, timeout=ROUND_S)
        while not control.done() and not self._leaving.wait(TICK_S):
            pass
        if self._leaving.is_set():
            control.cancel()
        else:
            error = control.exception()
            found = None if error is not None else control.result()
            self._log.note(
                "averaged", group=0 if found is None else len(found), why="" if error is None else str(error)
            )
            with self.averager.get_tensors() as tensors:
                self._take(tensors)
        self._blocked_s += time.monotonic() - started

    def _take(self, tensors: Any) -> None:
        weights, progress = tensors
        with torch.no_grad():
            self._task.theta.copy_(weights)
        self._progress = float(progress) * PROGRESS_UNIT

    def _note(self) -> None:
        """Note progress, as ``peer.session_recorder`` does."""
        now = time.monotonic()
        if now < self._next_note:
            return
        self._next_note = now + PROGRESS_PERIOD_S
        loss = {"loss": self._loss} if math.isfinite(self._loss) else {}
        self._log.note("progress", step=self._step, tokens=self._tokens, progress=self._progress, **loss)

    def summary(self) -> dict[str, Any]:
        elapsed_s = time.monotonic() - self._began_at
        loss = validation_loss(self._task.model.module, self._corpus, HELD_OUT_TOKENS, self._placement.autocast)
        return {
            "val_loss_last": loss.value,
            "tokens": self._tokens,
            "outer_steps": self._step,
            "blocked_fraction": self._blocked_s / elapsed_s,
        }


if __name__ == "__main__":
    main()
