"""A real swarm for tests: bootstrap and peers as processes of their own, watched through their event logs.

All files of a swarm, homes and sockets included, are in one short folder of its own. A process with that folder in
its command line belongs to the swarm, and none may be left when the swarm ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import psutil

from p2ptrain.base.ids import PeerId
from p2ptrain.manifest import JoinLink, SignedManifest, create_run, load_run, sign_run
from p2ptrain.net.identity import Identity
from p2ptrain.net.p2pd.socket_folder import sweep

T = TypeVar("T")

PATIENCE_S = 240.0
"""Timeout of each wait, in seconds: ten times what an idle machine needs."""
POLL_S = 0.02

TINY = {
    "model.config.hidden_size": 32,
    "model.config.intermediate_size": 64,
    "model.config.num_hidden_layers": 1,
    "model.config.num_attention_heads": 2,
    "model.config.num_key_value_heads": 2,
    "model.config.max_position_embeddings": 32,
    "training.sequence_length": 32,
    "training.sequences_per_step": 8,
    "training.warmup_tokens": 5_000,
    "outer.inner_steps": 5,
}
"""Manifest of a model of 19 thousand weights, whose inner step takes about 5 ms."""

TOGETHER = Path(__file__).with_name("together.py")
"""Script of a peer that trains from ``Swarm.begin_together`` on."""

STRANGER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
"""Id of a peer that does not exist."""

ENDLESS = {"run.tokens": 10**9, "training.schedule": "constant"}


def until(what: str, look: Callable[[], T | None], otherwise: Callable[[], str] = str) -> T:
    """Poll until ``look`` returns a true value, and return it. Fails the test at the timeout, with ``otherwise()``."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        seen = look()
        if seen:
            return seen
        time.sleep(POLL_S)
    raise AssertionError(f"waited {PATIENCE_S:.0f} s for {what}\n{otherwise()}")


class Program:
    """A process of the swarm, in a process group of its own, as a shell starts it in a terminal."""

    def __init__(self, home: Path, command: list[str], environment: dict[str, str]) -> None:
        self.home = home
        self.log = home.with_suffix(f".{time.monotonic_ns()}.log")
        self._events_before = len(_lines(home / "events.jsonl"))
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def peer_id(self) -> PeerId:
        return Identity.load_or_create(self.home / "identity.key").peer_id

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def events(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the notes of this process, without earlier ones in the same home, that have these fields."""
        notes = [json.loads(line) for line in _lines(self.home / "events.jsonl")[self._events_before :]]
        return [note for note in notes if note["kind"] == kind and fields.items() <= note.items()]

    def wait_for(self, kind: str, more_than: int = 0, **fields: Any) -> dict[str, Any]:
        """Return the newest such note once there are more than so many."""

        def look() -> dict[str, Any] | None:
            found = self.events(kind, **fields)
            if len(found) > more_than:
                return found[-1]
            assert self.process.poll() is None, f"{self.home.name} ended before {kind!r}:\n{self.output[-3000:]}"
            return None

        return until(f"{self.home.name} to note {kind!r} {fields}", look, self._both_ends)

    def _both_ends(self) -> str:
        return f"{self.output[:3000]}\n…\n{self.output[-3000:]}"

    def wait_for_more(self, kind: str, more: int = 1, **fields: Any) -> dict[str, Any]:
        """Wait for so many new notes, and return the newest."""
        return self.wait_for(kind, len(self.events(kind, **fields)) + more - 1, **fields)

    def wait_to_say(self, text: str) -> None:
        until(f"{self.home.name} to say {text!r}", lambda: text in self.output, self._both_ends)

    def daemons(self) -> list[psutil.Process]:
        """Return the p2pd processes, once there is one."""
        process = psutil.Process(self.process.pid)
        return until("a p2pd", lambda: [each for each in process.children() if each.name() == "p2pd"])

    def processes(self) -> list[psutil.Process]:
        """Return the running processes, p2pd included, whose command line names the identity key in the home."""
        return _processes_of(self.home)

    def give_way(self) -> None:
        """Lower the priority of a peer that trains all the time: newcomers need the processor for imports."""
        psutil.Process(self.process.pid).nice(15)

    def interrupt(self) -> None:
        """Send SIGINT to the whole process group, as Ctrl+C in its terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> int:
        """Wait for the end, and return the exit status, negative for a signal."""
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # faulthandler shows what every thread waits for
            self.process.wait()
            raise AssertionError(f"{self.home.name} did not end:\n{self.output[-6000:]}") from None

    def terminate(self) -> int:
        self.process.terminate()
        return self.end()

    def kill(self) -> int:
        self.process.kill()
        return self.end()


class Swarm:
    """One run and its processes. The context manager ends leftover processes and then fails the test."""

    def __init__(self, **changes: Any) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="pt-", dir="/tmp"))  # short: sockets lie below it
        self.sockets = self.root / "t"
        self.sockets.mkdir()
        self.link = ""
        self.programs: list[Program] = []
        dotted = {path.replace("__", "."): value for path, value in changes.items()}
        create_run(self.root / "run", "demo", TINY | dotted)
        sign_run(self.root / "run")
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.sockets),
            "XDG_CACHE_HOME": str(self.root / "cache"),
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
        }

    @property
    def signed(self) -> SignedManifest:
        return load_run(self.root / "run")

    def bootstrap(self, *arguments: str) -> Program:
        """Start the bootstrap; ``link`` is its join link."""
        home = self.root / "bootstrap"
        program = self._start(
            home, "-m", "bootstrap", str(self.root / "run"), "--local", "--home", str(home), *arguments
        )
        place = home / "join-link.txt"
        self.link = until("the join link", lambda: place.exists() and place.read_text().strip())
        return program

    def peer(self, name: str, *arguments: str, link: str | None = "", script: Path | None = None) -> Program:
        """Start a peer in its home. With link None, the home must know the run."""
        home = self.root / name
        words = [] if link is None else [link or self.link]
        how = ["-m", "peer"] if script is None else [str(script)]
        return self._start(home, *how, *words, "--home", str(home), "--local", "--nickname", name, *arguments)

    def begin_together(self, peers: list[Program]) -> None:
        """Let peers of the script ``together`` train once each of them has found another one."""
        for each in peers:
            each.wait_for("found")
        (self.root / "go").touch()

    def processes(self) -> list[psutil.Process]:
        """Return every process on this machine that belongs to the swarm."""
        return _processes_of(self.root)

    def socket_folders(self) -> list[Path]:
        """Return the folders for sockets of live and dead p2pds."""
        return list(self.sockets.glob("p2ptrain.*"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for program in self.programs:
                program.process.terminate()
            for program in self.programs:
                program.end()
            until("all processes to be gone", lambda: not self.processes())
            sweep(self.sockets)  # folders of killed peers; the next peer to start would do this
            assert self.socket_folders() == []
            shutil.rmtree(self.root)
        finally:
            for process in self.processes():
                process.kill()

    def program(self, home: Path, *arguments: str) -> Program:
        """Start Python with these arguments as a process of the swarm."""
        return self._start(home, *arguments)

    def _start(self, home: Path, *arguments: str) -> Program:
        program = Program(home, [sys.executable, *arguments], self.environment)
        self.programs.append(program)
        return program


@contextlib.contextmanager
def endless_swarm(*names: str) -> Iterator[tuple[Swarm, Program, list[Program]]]:
    """Yield a bootstrap and peers that train without end, once each has exchanged and another has its address."""
    with Swarm(**ENDLESS) as swarm:
        bootstrap = swarm.bootstrap()
        peers = [swarm.peer(name) for name in names]
        for each in peers:
            each.wait_for("exchanged")
            each.wait_for("found")
        for each in peers:
            each.give_way()
        yield swarm, bootstrap, peers


@contextlib.contextmanager
def nowhere() -> Iterator[Swarm]:
    """Yield a swarm without processes, whose link leads to a closed port."""
    with Swarm() as swarm, socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        port = reserved.getsockname()[1]
        swarm.link = str(JoinLink(swarm.signed.run_id, (f"/ip4/127.0.0.1/tcp/{port}/p2p/{STRANGER}",)))
        yield swarm


def _processes_of(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(f"{folder}/" in f"{word}/" for word in process.cmdline()):
                found.append(process)
    return found


def _lines(path: Path) -> list[str]:
    """Return the complete lines: the last one may be half-written."""
    try:
        return path.read_text(encoding="utf-8").split("\n")[:-1]
    except FileNotFoundError:
        return []
