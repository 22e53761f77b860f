"""Run of one case in a cell (``lab.cell``): ``python -m bench.rivals.runner FOLDER CASE``. Writes record.json."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.rivals.cases import SIZES, RivalCase, RivalRecord
from lab.cell import unblock_sigterm
from lab.hosts import Access, Host, Network
from lab.stages import LocalProcesses
from p2ptrain.base import files
from peer.testnet import processes
from peer.testnet.processes import Child
from peer.testnet.watch import Tail

HOME_LINE = Access(up_mbit_s=20.0, down_mbit_s=100.0, delay_s=0.02)
START_TIMEOUT_S = 240.0
"""Timeout of the first progress note of all peers. Guess: measure the start of 8 peers, a minute on two idle
cores, on a busy machine."""
LEAVING_S = 90.0
TICK_S = 0.5
MEETING_POINT = "meeting-point"


@dataclass(slots=True)
class RivalSession:
    """Processes and hosts of a run."""

    folder: Path
    case: RivalCase
    network: Network
    record: RivalRecord
    hosts: dict[str, Host] = field(default_factory=dict)
    children: dict[str, Child] = field(default_factory=dict)
    tails: dict[str, Tail] = field(default_factory=dict)
    trains: set[str] = field(default_factory=set)

    def home(self, who: str) -> Path:
        return self.folder / who

    @property
    def link_file(self) -> Path:
        return self.home(MEETING_POINT) / "join-link.txt"

    async def open(self) -> None:
        """Start the meeting point, on a line without limits."""
        host = self.hosts[MEETING_POINT] = self.network.add(MEETING_POINT)
        home = self.home(MEETING_POINT)
        home.mkdir(parents=True)
        if self.case.rival == "averager":
            module, arguments = "bench.rivals.averager", ["--meet", str(self.link_file), host.address]
        else:
            module, arguments = "bootstrap", [str(self.folder / "run"), "--home", str(home)]
        child = await processes.start(MEETING_POINT, module, arguments, self.log(MEETING_POINT), 1, host.inside)
        self.children[MEETING_POINT] = child
        await self.until(lambda: self.link_file.exists() and bool(self.link_file.read_text().strip()), START_TIMEOUT_S)

    async def enter(self, who: str, late: bool = False) -> None:
        """Start a peer on its own host."""
        host = self.hosts[who] = self.network.add(who, HOME_LINE, self.case.seed)
        home = self.home(who)
        if self.case.rival == "averager":
            module = "bench.rivals.averager"
            arguments = ["--manifest", str(self.folder / "run" / "manifest.toml"), "--home", str(home)]
            arguments += ["--peers", str(self.case.peers), "--link", str(self.link_file)]
            arguments += ["--late", host.address] if late else [host.address]
        else:
            module = "peer"
            arguments = [self.link_file.read_text(encoding="utf-8").strip(), "--nickname", who, "--home", str(home)]
        self.tails[who] = Tail(home / "events.jsonl")
        self.children[who] = await processes.start(who, module, arguments, self.log(who), 1, host.inside)

    def log(self, who: str) -> Path:
        return self.folder / f"{who}.log"

    def look(self) -> None:
        """Update which peers train, and the bytes of every line."""
        for who, tail in self.tails.items():
            if any(note.get("kind") == "progress" for note in tail.read()):
                self.trains.add(who)
            if (sent := _sent_bytes(self.children[who])) is not None:
                self.record.traffic.setdefault(who, []).append((time.time(), sent))

    async def until(self, is_so: Callable[[], bool], deadline_s: float) -> None:
        """Wait for a condition. Raises RuntimeError on timeout or if a peer ends unexpectedly."""
        deadline = time.monotonic() + deadline_s
        while not is_so():
            await self.wait(TICK_S)
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.case.name}: not all came within {deadline_s:g} s; see {self.folder}")

    async def wait(self, seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        while True:
            self.look()
            for who, child in self.children.items():
                if child.status is not None and who != self.record.victim:
                    raise RuntimeError(f"{who} ended with status {child.status}; {processes.last_words(child.log)}")
            if (left := ends_at - time.monotonic()) <= 0:
                return
            await asyncio.sleep(min(TICK_S, left))


def _sent_bytes(child: Child) -> int | None:
    """Return the bytes sent through the host's line; None if the process is gone."""
    try:
        lines = Path(f"/proc/{child.process.pid}/net/dev").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, numbers = line.partition(":")
        if name.strip() == "wan0":
            return int(numbers.split()[8])
    return None


async def run_rival(folder: Path, case: RivalCase) -> RivalRecord:
    """Make the whole run; all processes have ended when it returns."""
    size = SIZES[case.size]
    record = RivalRecord(case)
    with Network() as network:
        session = RivalSession(folder, case, network, record)
        names = [f"peer-{number}" for number in range(1, case.peers + 1)]
        try:
            await session.open()
            for who in names:
                await session.enter(who)
            await session.until(lambda: session.trains.issuperset(names), START_TIMEOUT_S)
            record.zero = time.time()
            await session.wait(size.calm_s / case.hurry)
            record.victim, record.killed = names[-1], time.time()
            LocalProcesses().kill(record.victim, session.children[record.victim].process.pid)
            await session.wait(size.wounded_s / case.hurry)
            record.newcomer, record.came = "newcomer", time.time()
            await session.enter(record.newcomer, late=True)
            await session.wait(size.healing_s / case.hurry)
            record.ended = time.time()
        except RuntimeError as error:
            record.troubles.append(str(error))
        finally:
            meeting_point = session.children.pop(MEETING_POINT, None)
            await processes.stop(list(session.children.values()), LEAVING_S)
            await processes.stop([meeting_point] if meeting_point else [], LEAVING_S)
    return record


def main() -> None:
    folder, case = Path(sys.argv[1]), RivalCase(**json.loads(sys.argv[2]))
    unblock_sigterm()
    record = asyncio.run(run_rival(folder, case))
    files.replace(folder / "record.json", json.dumps(dataclasses.asdict(record)).encode())


if __name__ == "__main__":
    main()
