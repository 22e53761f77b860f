"""A trainer's process as its node sees it: started, asked, watched and ended."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from p2ptrain.base.errors import P2pTrainError, UserError
from p2ptrain.base.launcher import kill_tree, launched
from p2ptrain.base.text import printable
from p2ptrain.outer.flat import FlatLayout
from p2ptrain.ports import Notebook
from p2ptrain.trainer.attached import LOST
from p2ptrain.trainer.host_vector import HostVector
from p2ptrain.trainer.line import Door, Line, LineClosedError

LISTENING_S, SILENT_S, STARTING_S = 1.0, 15, 300
"""Seconds of one wait for a trainer's next line, and waits in a row without one after which it counts as frozen, later
and before its first line. Waits are counted, so that nothing follows from a time in which this process was stopped,
too."""
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
    """

    def __init__(
        self, command: Sequence[str], notebook: Notebook, ranks: int = 1, waits: Callable[[], bool] | None = None
    ) -> None:
        self._notebook = notebook
        self._ranks = ranks
        self._waits = waits
        self._door = Door()
        self._lines: list[Line] = []
        """To the ranks, in order."""
        self._process = subprocess.Popen(
            launched(*command, P2PTRAIN_NODE=self._door.address, TORCH_CPP_LOG_LEVEL="ERROR"),  # of hosts without names
            stdin=subprocess.DEVNULL,
        )

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
            memory: returns the host vector with so many vectors of this layout, and whether it is new.

        Raises TrainerDiedError, and UserError as ``ask``.
        """
        self._lines = self._arrived()
        self._send({"plan": dict(plan)})
        wanted = self._reply("attach")
        host, is_new = memory(FlatLayout.of_shapes(wanted["names"], wanted["shapes"]), int(wanted["vectors"]))
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

    def close(self) -> None:
        """End the trainer: close the line, and kill it if it does not end. Safe to call twice."""
        self._close_lines()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_S)
        self.kill()

    def kill(self) -> None:
        """End the trainer at once, with what it has started, and wait for it. Any thread; safe to call twice."""
        kill_tree(self._process)
        self._close_lines()

    def _close_lines(self) -> None:
        self._door.close()
        for line in self._lines:
            line.close()

    def _send(self, message: Mapping[str, Any], file: int | None = None) -> None:
        try:
            for line in self._lines if "ask" not in message else self._lines[:1]:
                line.send(message, file)
        except LineClosedError:
            raise self._death() from None

    def _arrived(self) -> list[Line]:
        """Wait for all ranks; return their lines in order. Raises TrainerDiedError."""
        found: dict[int, Line] = {}
        try:
            waits = 0
            while waits < STARTING_S and (self._waits is None or self._waits()):
                waits += self._waits is None
                while len(found) < self._ranks and (line := self._door.accept(LISTENING_S)) is not None:
                    hello = line.receive(LISTENING_S)
                    if hello is not None and "rank" in hello:
                        found[int(hello["rank"])] = line
                if len(found) == self._ranks:
                    return [found[rank] for rank in sorted(found)]
                if self._process.poll() is not None:
                    raise self._death()
        except LineClosedError:
            raise self._death() from None
        finally:
            self._door.close()
        self.kill()
        raise TrainerDiedError(f"its process {self.pid} did not begin within {STARTING_S * LISTENING_S:.0f} s")

    def _reply(self, kind: str, on_note: OnNote = _goes_on) -> dict[str, Any]:
        waits = 0
        while True:
            try:
                message = self._lines[0].receive(LISTENING_S)
            except LineClosedError:
                raise self._death() from None
            if message is None:
                waits += 1
                if waits >= SILENT_S:
                    self.kill()
                    raise TrainerDiedError(
                        f"its process {self.pid} gave no sign of life for {waits * LISTENING_S:.0f} s"
                    )
                continue
            waits = 0
            if kind in message:
                found: dict[str, Any] = message[kind]
                return found
            if "failed" in message:
                raise self._failure(message)
            if "log" in message:
                logger = logging.getLogger(str(message["logger"]))
                logger.log(int(message["log"]), "%s", printable(str(message["message"])))
            elif "note" in message:
                self._notebook.note(str(message["note"]), **message["fields"])
            elif "alive" not in message and not on_note(message):
                self._send({"enough": True})

    def _failure(self, message: Mapping[str, Any]) -> Exception:
        if message["failed"] == LOST:
            message = self._said_by_others() or message
        self.close()
        kind, problem = str(message["failed"]), printable(str(message["problem"]))
        if kind == "user":
            return UserError(problem, printable(str(message["remedy"])))
        return TrainerDiedError(problem, kind)

    def _said_by_others(self) -> Mapping[str, Any] | None:
        """Return why one of the further ranks has ended, if it said so."""
        for line in self._lines[1:]:
            with contextlib.suppress(LineClosedError, OSError, ValueError):  # ValueError: this side has closed it
                while (message := line.receive(0.0)) is not None:
                    if message.get("failed", LOST) != LOST:
                        return message
        return None

    def _death(self) -> TrainerDiedError:
        """Return how the trainer ended, once it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_S)
        if (code := self._process.poll()) is None:
            self.kill()
            return TrainerDiedError(f"its process {self.pid} closed its line")
        if (said := self._said_by_others()) is not None:
            return TrainerDiedError(printable(str(said["problem"])), str(said["failed"]))
        self._close_lines()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit status {code}"
        return TrainerDiedError(f"its process {self.pid} {how}", was_killed=code == -signal.SIGKILL)
