"""A rank of another computer's team, ``p2ptrain rank``: its line to the leader, and its rank process.

The command waits for the leader, takes part in its generations, and waits again where the line or the leader is lost.
It ends when the run ends, when its owner stops it, or when the leader refuses it for good.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue

import p2ptrain
from p2ptrain.base.errors import HomeError, ManifestError, NetworkError, RemoteError, TeamError, UserError
from p2ptrain.base.text import printable
from p2ptrain.manifest import SignedManifest
from p2ptrain.ports import Notebook
from p2ptrain.team.lan_address import LanAddress
from p2ptrain.team.lan_messages import (
    LONGEST_WORDS,
    BeatMessage,
    ControlLine,
    ControlMessage,
    EndMessage,
    JoinMessage,
    PlanMessage,
    ReadyMessage,
    RefusalMessage,
    ReportMessage,
    WelcomeMessage,
    beat,
)
from p2ptrain.team.sealed import Hello, Purpose, WrongKeyError, dial_leader, generation_key
from peer.home import Home
from peer.owner.settings import compile_mode
from peer.team.plan import decode_plan
from peer.team.processes import RankProcess

BACKOFF_S, MOST_BACKOFF_S = 1.0, 15.0
"""Seconds between two attempts to reach the leader: the first wait, doubled up to the last."""
POLL_S = 0.2
MOST_WAITING = 16
"""Messages that have come and are not handled."""


@dataclass(frozen=True, slots=True)
class RankOptions:
    """Options of the second computer's owner."""

    leader: LanAddress
    key: bytes
    home: Path
    device: str = "auto"
    data: Path | None = None
    tokenizer: Path | None = None
    weights: Path | None = None
    template: Path | None = None


class RunEnded(Exception):  # noqa: N818 (not an error)
    """The leader said that the run has ended."""


def run_rank(options: RankOptions, notebook: Notebook, stop: threading.Event) -> None:
    """Take part in the leader's team until the run ends or ``stop`` is set. Raises UserError."""
    wait_s, told = BACKOFF_S, ""
    while not stop.is_set():
        try:
            began = time.monotonic()
            with closing(LanRank(options, notebook, stop)) as rank:
                rank.join()
                told = ""
                rank.serve()
        except RunEnded:
            notebook.note("team ended")
            return
        except WrongKeyError as error:
            raise UserError(f"This key is not the team's: {error}.", "Copy the leader's team.key again.") from None
        except (NetworkError, RemoteError) as error:
            if stop.is_set():
                return
            if time.monotonic() - began > MOST_BACKOFF_S:
                wait_s = BACKOFF_S
            if str(error) != told:
                told = str(error)
                notebook.note("waiting for the leader", leader=str(options.leader), why=told)
            stop.wait(wait_s)
            wait_s = min(2 * wait_s, MOST_BACKOFF_S)


class LanRank:
    """One line to the leader, from its handshake to its end, and the rank process beside it. ``close`` it."""

    def __init__(self, options: RankOptions, notebook: Notebook, stop: threading.Event) -> None:
        self._options = options
        self._notebook = notebook
        self._stop = stop
        self._home = Home(options.home)
        self._process: RankProcess | None = None
        self._is_told = self._is_ready = self._has_reported = False
        self._heard: Queue[tuple[ControlMessage, bytes] | Exception] = Queue(MOST_WAITING)
        self._stops = threading.Event()
        leader = options.leader
        self._line = dial_leader(leader.host, leader.port, options.key, Hello(Purpose.CONTROL, 0))
        self._own_host = self._line.own_host
        self._control = ControlLine(self._line)

    def join(self) -> None:
        """Join the team, and keep its run's manifest. Raises UserError, NetworkError and RemoteError."""
        known = self._home.load_manifest(None)
        run = None if known is None else known.run_id
        device, name = self._options.device, printable(platform.node())[:64]
        self._control.send(JoinMessage(version=p2ptrain.__version__, run=run, name=name, device=device))
        message, blob = self._control.receive()
        if isinstance(message, RefusalMessage):
            reason, remedy = printable(message.reason), printable(message.remedy)
            if message.is_final:
                raise UserError(f"The leader refuses this rank: {reason.rstrip('.')}.", remedy)
            raise NetworkError(f"the leader answers: {reason}")
        if not isinstance(message, WelcomeMessage):
            raise RemoteError("the leader's first message is not a welcome")
        try:
            signed = SignedManifest.from_bytes(blob)
            if self._home.load_manifest(signed.run_id) is None:
                self._home.save_manifest(signed)
        except (ManifestError, HomeError) as error:
            refusal = RefusalMessage(reason=error.problem[:LONGEST_WORDS], remedy="", is_final=True)
            with suppress(NetworkError):
                self._control.send(refusal)
            raise
        self._rank = message.rank
        self._notebook.note("joined the team", leader=str(self._options.leader), rank=message.rank, run=signed.run_id)
        threading.Thread(target=beat, args=(self._control, self._stops), name="lan-beat", daemon=True).start()
        threading.Thread(target=self._listen, name="lan-line", daemon=True).start()

    def serve(self) -> None:
        """Take part in the leader's generations until the line ends or ``stop`` is set.

        Raises NetworkError and RemoteError where the line ends, RunEnded, UserError.
        """
        self._restart()
        while not self._stop.is_set():
            with suppress(Empty):
                self._handle(self._heard.get(timeout=POLL_S))
            self._look_at_process()

    def close(self) -> None:
        """End the rank process and the line. Safe to call twice."""
        if self._process is not None:
            self._process.kill()
        self._stops.set()
        self._control.close()

    def _listen(self) -> None:
        try:
            while True:
                message, blob = self._control.receive()
                if not isinstance(message, BeatMessage):
                    self._heard.put((message, blob), timeout=MOST_BACKOFF_S)
        except Exception as error:  # raised again in the thread that serves
            self._heard.put(error)

    def _handle(self, heard: tuple[ControlMessage, bytes] | Exception) -> None:
        if isinstance(heard, Exception):
            raise heard
        message, blob = heard
        match message:
            case PlanMessage():
                self._tell(message.meeting, blob)
            case EndMessage(is_final=True):
                raise RunEnded
            case EndMessage():
                self._restart()
            case _:
                raise RemoteError(f"the leader sent {message.op}")

    def _restart(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._process = RankProcess(
            self._home.path.absolute(),
            self._rank,
            self._options.device,
            lambda why: self._notebook.note("not compiled", why=why),
        )
        self._is_told = self._is_ready = self._has_reported = False

    def _tell(self, meeting: str, blob: bytes) -> None:
        """Start the generation that the leader has planned, with this computer's own paths and device."""
        assert self._process is not None
        options, key = self._options, generation_key(self._options.key, bytes.fromhex(meeting))
        try:
            plan = decode_plan(blob)
            if plan.rank != self._rank or plan.rank >= len(plan.devices):
                raise RemoteError("the leader's plan is for another rank")
            devices = list(plan.devices)
            devices[plan.rank] = options.device
            own = plan.model_copy(
                update={
                    "home": str(self._home.path.absolute()),
                    "devices": devices,
                    "folder": "",
                    "key": key.hex(),
                    "data": None if options.data is None else str(options.data.absolute()),
                    "tokenizer": None if options.tokenizer is None else str(options.tokenizer.absolute()),
                    "weights": None if options.weights is None else str(options.weights.absolute()),
                    "template": None if options.template is None else str(options.template.absolute()),
                    "threads": own_threads(),
                    "compile": compile_mode(plan.compile, os.environ),
                    "memory_bytes": None,
                    "leader": str(options.leader),
                    "host": self._own_host,
                    "meeting": meeting,
                }
            )
            self._is_told = True
            self._process.tell(own)
        except TeamError as error:
            self._report("team", str(error))

    def _look_at_process(self) -> None:
        process = self._process
        assert process is not None
        said = process.last_report()
        if said is not None and said.kind == "ready" and not self._is_ready:
            self._is_ready = True
            self._control.send(ReadyMessage())
        elif said is not None and said.kind != "ready":
            self._report(said.kind, said.reason, said.remedy)
        if process.has_ended and not self._is_told:  # no generation has it: the leader would wait for it forever
            why = process.how_ended()
            self._control.send(RefusalMessage(reason=why, remedy="", is_final=False))
            raise NetworkError(f"this computer's rank did not start: {why}")
        if process.has_ended and not self._has_reported:
            said = process.last_report()
            if said is not None and said.kind != "ready":
                self._report(said.kind, said.reason, said.remedy)
            else:
                self._report("ended", process.how_ended())

    def _report(self, kind: str, reason: str, remedy: str = "") -> None:
        if self._has_reported:
            return
        self._has_reported = True
        if kind not in ("team", "ended"):
            self._notebook.note("rank process failed", why=reason)
        told = {"kind": kind, "reason": reason[:LONGEST_WORDS], "remedy": remedy[:LONGEST_WORDS]}
        self._control.send(ReportMessage.model_validate(told))


def own_threads() -> int:
    """Return the threads of this computer's rank: OMP_NUM_THREADS, or one for each processor that it may use."""
    with suppress(KeyError, ValueError):
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
