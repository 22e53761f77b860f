"""Rank processes of a team as its leader sees them: started, told their plans, watched and ended."""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import Protocol

from p2ptrain.base.errors import TeamError
from p2ptrain.base.launcher import launched
from p2ptrain.base.text import printable
from peer.team.plan import LONGEST_LINE, PASSING, RankPlan, RankReport, decode_report

READY_S = 300.0
"""Timeout of a rank's imports. Guess: the slowest disks of volunteers would settle it."""
MOST_REPORTS = 8
FINAL_REPORT_S = 3.0
"""Seconds in which ranks that notice a failure report it and end; one that has not is frozen."""


LISTENING_S, SILENT_S = 1.0, 15
"""Seconds of one wait for a rank's next line, and waits in a row without one after which the rank counts as frozen.
Waits are counted, so that nothing follows from a time in which this process was stopped, too. Guess: pauses of
machines that swap."""


class RankHandle(Protocol):
    """Rank process as its leader sees it: ``RankProcess``, or ``remote_rank.RemoteRank`` on another computer."""

    rank: int

    @property
    def pid(self) -> int | None:
        """Process id; None: on another computer."""

    @property
    def name(self) -> str:
        """What to call it in messages."""

    @property
    def has_ended(self) -> bool: ...

    @property
    def compiler(self) -> str:
        """What its compiler does; "" while unknown."""

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the process has imported its libraries. Raises TeamError."""

    def tell(self, plan: RankPlan) -> None:
        """Send the plan. Raises TeamError."""

    def last_report(self) -> RankReport | None:
        """Return the last report that has not been read."""

    def begin_kill(self) -> None:
        """Begin what ``kill`` does, without waiting. Any thread may call it."""

    def kill(self) -> None:
        """End the process. Safe to call twice."""

    def wait(self, until: float) -> bool:
        """Wait for the end until this time of ``time.monotonic``; return whether it has come."""

    def how_ended(self) -> str:
        """Say how the process has ended."""


class RankProcess:
    """One rank's process. It ends with this one: its standard input closes, and it gets the parent-death signal.

    Args:
        is_eager: called with the reason if the rank's stage cannot be compiled, by another thread.
    """

    def __init__(
        self, home: Path, rank: int, device: str, is_eager: Callable[[str], object] = lambda why: None
    ) -> None:
        self.rank = rank
        self.device = device
        self.compiler = ""
        self._is_eager = is_eager
        command = launched(sys.executable, "-P", "-m", "peer.team.rank", str(home), str(rank))  # named for people
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self._is_silent = False
        self._reports: Queue[RankReport | None] = Queue(MOST_REPORTS)
        self._thread = threading.Thread(target=self._read, name=f"rank-{rank}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def name(self) -> str:
        return f"its process {self.pid}"

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the process has imported its libraries. Raises TeamError."""
        try:
            said = self._reports.get(timeout=timeout_s)
        except Empty:
            raise TeamError("starting the ranks", f"rank {self.rank} did not start in {timeout_s:.0f} s") from None
        if said is None or said.kind != "ready":
            raise TeamError("starting the ranks", f"rank {self.rank} ended at its start")

    def tell(self, plan: RankPlan) -> None:
        """Send the plan. Raises TeamError if the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(plan.model_dump_json().encode() + b"\n")
        except OSError as error:
            raise TeamError("starting the ranks", f"rank {self.rank} ended at its start") from error

    def last_report(self) -> RankReport | None:
        """Return the last report that has not been read."""
        found = None
        with contextlib.suppress(Empty):
            while (said := self._reports.get_nowait()) is not None:
                found = said
        return found

    def begin_kill(self) -> None:
        """Send the signal of ``kill``, without waiting. Any thread may call it."""
        self._process.kill()

    def kill(self) -> None:
        """End the process at once, also if it is stopped, and wait for it. Safe to call twice."""
        self._process.kill()
        self._process.wait()
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def wait(self, until: float) -> bool:
        """Wait for the process to end until this time of ``time.monotonic``; return whether it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, until - time.monotonic()))
        return self.has_ended

    def how_ended(self) -> str:
        """Say how the process has ended."""
        if self._is_silent:
            return f"its process {self.pid} gave no sign of life for {SILENT_S * LISTENING_S:.0f} s"
        code = self._process.returncode
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit status {code}"
        return f"its process {self.pid} {how}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        line, waits, is_alive = bytearray(), 0, False
        while True:
            readable, _, _ = select.select([self._process.stdout], [], [], LISTENING_S)
            if not readable:
                waits += 1
                if is_alive and waits >= SILENT_S:
                    self._is_silent = True
                    self._process.kill()
                continue
            waits = 0
            if not (chunk := self._process.stdout.read(4096)):
                break
            line += chunk
            while (end := line.find(b"\n")) >= 0:
                if (said := decode_report(bytes(line[:end]))) is not None:
                    self._take(said)
                is_alive |= said is not None and said.kind == "alive"
                del line[: end + 1]
            if len(line) > LONGEST_LINE:
                line.clear()
        self._put(None)

    def _take(self, said: RankReport) -> None:
        if said.kind == "compiler":
            self.compiler = printable(said.reason)
        elif said.kind == "eager":
            self._is_eager(printable(said.reason))
        elif said.kind not in PASSING:
            self._put(said)

    def _put(self, said: RankReport | None) -> None:
        while self._reports.full():  # the last ones count
            with contextlib.suppress(Empty):
                self._reports.get_nowait()
        self._reports.put(said)


def failed_rank(ranks: Sequence[RankHandle]) -> tuple[RankHandle | None, str, RankReport | None]:
    """Return the rank whose failure ended the team, why, and its report; None: the leader itself, or unknown.

    Waits ``FINAL_REPORT_S`` for ranks that end because another one failed. Ends those that are left.
    """
    until = time.monotonic() + FINAL_REPORT_S
    alive = [each for each in ranks if not each.wait(until)]
    reports = {each.rank: None if each in alive else each.last_report() for each in ranks}
    for each in ranks:
        said = reports[each.rank]
        if said is not None and said.kind not in ("team", "ready"):
            return each, printable(said.reason), said
    for each in ranks:
        if each not in alive and reports[each.rank] is None:
            return each, each.how_ended(), None
    if alive and len(alive) < max(2, len(ranks)):
        return alive[0], f"{alive[0].name} does not answer", None
    return None, "", None
