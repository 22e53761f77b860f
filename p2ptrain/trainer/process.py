"""A trainer's process as its node sees it: started, asked, watched and ended."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

from p2ptrain.base import files
from p2ptrain.base.errors import P2pTrainError, UserError
from p2ptrain.base.launcher import kill_tree, launched
from p2ptrain.base.text import printable
from p2ptrain.outer.flat import FlatLayout
from p2ptrain.ports import Notebook
from p2ptrain.trainer.attached import LOST
from p2ptrain.trainer.host_vector import HostVector
from p2ptrain.trainer.line import Line, LineClosedError, LineServer

LISTENING_S, SILENT_S, STARTING_S = 1.0, 15, 300
"""Seconds of one wait for a trainer's next line, and waits in a row without one after which it counts as frozen, later
and before its first line. Waits are counted, so that nothing follows from a time in which this process was stopped,
too. Guess: how long a computer that swaps keeps a process from running."""
ENDING_S = 5.0
"""Longest wait for a trainer that ends because its node has closed the line."""

OnNote = Callable[[Mapping[str, Any]], bool]
"""Called with each note that precedes an answer; returns whether the answer should go on."""


def _goes_on(note: Mapping[str, Any]) -> bool:
    return True


class TrainerDiedError(P2pTrainError):
    """A trainer ended, or froze and was ended; the message says how, in a phrase without a period.

    Args:
        kind: "" if it said nothing, else as in ``Attachment.fail``.
        was_killed: whether SIGKILL ended it, as the system does when memory is short.
    """

    def __init__(self, how: str, kind: str = "", was_killed: bool = False) -> None:
        super().__init__(how)
        self.kind = kind
        self.was_killed = was_killed


class TrainerHandle:
    """One trainer. It ends with this process: the line closes, and it gets the parent-death signal.

    Args:
        command: the program and its arguments.
        notebook: receives the trainer's notes.
        ranks: processes that train together, which the program starts.
        waits: returns whether ranks may still wait for other computers; None: they need nobody.

    Raises OSError if the process cannot begin.
    """

    def __init__(
        self, command: Sequence[str], notebook: Notebook, ranks: int = 1, waits: Callable[[], bool] | None = None
    ) -> None:
        self._notebook = notebook
        self._waits = waits
        self._server = LineServer()
        self._lines: list[Line] = []
        """To the ranks, in order."""
        self._ranks: list[psutil.Process] = []
        self._silent = [0] * ranks
        """Waits in a row without a line, of each rank."""
        self._counted_at = 0.0
        """When the waits for further ranks were counted last."""
        self._has_ended = False
        words = launched(*command, P2PTRAIN_NODE=self._server.address, TORCH_CPP_LOG_LEVEL="ERROR")
        try:
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL)
        except OSError:
            self._server.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def attach(
        self,
        plan: Mapping[str, Any],
        memory: Callable[[FlatLayout, int], tuple[HostVector, bool]],
    ) -> dict[str, Any]:
        """Tell the trainer what to train, give it the host vector, and return its first answer.

        Args:
            plan: JSON values that the trainer's program knows.
            memory: returns the host vector with so many vectors of this layout, and whether it is new. Raises
                ValueError or OSError if there can be none.

        Raises TrainerDiedError, and UserError as ``ask``.
        """
        self._wait_for_ranks()
        self._send({"plan": dict(plan)})
        wanted = self._reply("attach")
        try:
            host, is_new = memory(FlatLayout.of_shapes(wanted["names"], wanted["shapes"]), int(wanted["vectors"]))
        except OSError as error:
            self.kill()
            raise TrainerDiedError(f"there is no memory for its weights: {files.cause(error)}") from error
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise self.misfit(error) from error
        self._send({"attached": is_new}, host.fd)
        return self._reply("answer")

    def ask(self, name: str, on_note: OnNote = _goes_on, **arguments: Any) -> dict[str, Any]:
        """Return the trainer's answer to a question.

        Raises TrainerDiedError, and UserError if the trainer says what its owner must mend.
        """
        self.post(name, **arguments)
        return self.answer(on_note)

    def post(self, name: str, **arguments: Any) -> None:
        """Ask a question; ``answer`` returns the answers in order. Raises TrainerDiedError."""
        self._send({"ask": name, **arguments})

    def answer(self, on_note: OnNote = _goes_on) -> dict[str, Any]:
        """Return the next answer. Raises as ``ask``."""
        return self._reply("answer", on_note)

    def misfit(self, error: Exception) -> TrainerDiedError:
        """End a trainer that has answered what nobody can use; return that as an error."""
        self.kill()
        return TrainerDiedError(f"its process {self.pid} gave an answer that does not fit: {error!r}")

    def close(self) -> None:
        """End the trainer: close the line, and kill it if it does not end. Safe to call twice."""
        self._close_lines()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_S)
        self.kill()

    def kill(self) -> None:
        """End the trainer at once, with what it has started, and wait for it. Any thread; safe to call twice."""
        kill_tree(self._process)
        if not self._has_ended:
            self._has_ended = True
            for pid in (self.pid, *(each.pid for each in self._ranks if _lives(each))):  # leaders of process groups
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
        self._close_lines()
        until = time.monotonic() + ENDING_S
        while any(map(_lives, self._ranks)) and time.monotonic() < until:  # the launcher's children, not ours
            time.sleep(0.01)

    def _close_lines(self) -> None:
        self._server.close()
        for line in self._lines:
            line.close()

    def _send(self, message: Mapping[str, Any], file: int | None = None) -> None:
        try:
            for line in self._lines if "ask" not in message else self._lines[:1]:
                line.send(message, file)
        except LineClosedError:
            raise self._death() from None

    def _wait_for_ranks(self) -> None:
        """Raises TrainerDiedError."""
        found: dict[int, tuple[Line, psutil.Process]] = {}
        try:
            waits = 0
            while waits < STARTING_S and (self._waits is None or self._waits()):
                waits += self._waits is None
                while len(found) < len(self._silent) and (line := self._server.accept(LISTENING_S)) is not None:
                    with contextlib.suppress(LineClosedError, LookupError, TypeError, ValueError, psutil.NoSuchProcess):
                        hello = line.receive(SILENT_S * LISTENING_S) or {}
                        found[range(len(self._silent))[hello["rank"]]] = line, psutil.Process(hello["pid"])
                if len(found) == len(self._silent):
                    self._lines, self._ranks = map(list, zip(*(found[rank] for rank in sorted(found)), strict=True))
                    return
                if self._process.poll() is not None:
                    raise self._death()
        finally:
            self._server.close()
        self.kill()
        raise TrainerDiedError(f"its process {self.pid} did not begin within {STARTING_S * LISTENING_S:.0f} s")

    def _reply(self, kind: str, on_note: OnNote = _goes_on) -> dict[str, Any]:
        while True:
            message = self._next(0, LISTENING_S)
            if message is None or "alive" in message:
                self._hear_others()
            elif kind in message:
                found = message[kind]
                if not isinstance(found, dict):
                    raise self.misfit(TypeError(f"{kind} is not a JSON object"))
                return found
            elif not self._take(message) and not on_note(message):
                self._send({"enough": True})

    def _hear_others(self) -> None:
        """Take what further ranks have sent. Their silence counts by time, not by the first one's signs of life: after
        a stop of this process many of these are there at once.
        """
        counts = time.monotonic() - self._counted_at > LISTENING_S / 2
        if counts:
            self._counted_at = time.monotonic()
        for rank in range(1, len(self._lines)):
            while (heard := self._next(rank, 0.0, counts)) is not None:
                self._take(heard)

    def _next(self, rank: int, timeout_s: float, counts: bool = True) -> dict[str, Any] | None:
        """Return a rank's next message, or None after the timeout. Raises TrainerDiedError, also if it is frozen.

        ``counts``: whether this counts as a wait.
        """
        try:
            message = self._lines[rank].receive(timeout_s)
        except LineClosedError as error:
            raise self._death(str(error)) from None
        self._silent[rank] = 0 if message is not None else self._silent[rank] + counts
        if self._silent[rank] >= SILENT_S:
            self.kill()
            pid, silent_s = self._ranks[rank].pid, SILENT_S * LISTENING_S
            raise TrainerDiedError(f"its process {pid} gave no sign of life for {silent_s:.0f} s")
        return message

    def _take(self, message: Mapping[str, Any]) -> bool:
        """Take a message that any rank may send at any time; return False if it is another one."""
        try:
            if "failed" in message:
                raise self._failure(message)
            if "log" in message:
                logger = logging.getLogger(str(message["logger"]))
                logger.log(int(message["log"]), "%s", printable(str(message["message"])))
            elif "note" in message:
                self._notebook.note(str(message["note"]), **message["fields"])
            else:
                return "alive" in message
        except (KeyError, TypeError, ValueError) as error:
            raise self.misfit(error) from error
        return True

    def _failure(self, message: Mapping[str, Any]) -> Exception:
        kind = str(message["failed"])
        if kind == LOST:
            return self._death()
        problem, remedy = (printable(str(message.get(name, ""))) for name in ("problem", "remedy"))
        self.close()
        return UserError(problem, remedy) if kind == "user" else TrainerDiedError(problem, kind)

    def _death(self, why: str = "") -> Exception:
        """End the trainer after its line has closed; return how it ended, by what a rank has said or by its status."""
        if not why:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(ENDING_S)
        code = self._process.poll()
        for line in self._lines:
            with contextlib.suppress(LineClosedError):
                while (message := line.receive(0.0)) is not None:
                    if message.get("failed", LOST) != LOST:
                        return self._failure(message)
        self.kill()
        if code is None:
            return TrainerDiedError(f"its process {self.pid} {why or 'closed its line'}")
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit status {code}"
        return TrainerDiedError(f"its process {self.pid} {how}", was_killed=code == -signal.SIGKILL)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
