"""A trainer's side of its node: what it has of the host vector, and the answers to the node's questions.

::

    node                                        trainer
    ------------------------------------------  ----------------------------------------------------
                                                {"rank": r, "pid": process}
    {"plan": ...}                               {"attach": {"names": ..., "shapes": ..., "vectors": n}}
    {"attached": is_new}, descriptor            {"answer": ...}
    {"ask": name, ...}                          {"alive": true} every second, then {"answer": ...}
                                                or {"failed": kind, "problem": ..., "remedy": ...}
    {"enough": true}                            an answer may end early

All ranks of a trainer get plan and descriptor, show life and may fail; the first one does the rest. Nothing else is
asked before the answer to the last question. A trainer whose node dies ends itself within seconds.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

from p2ptrain.base import files
from p2ptrain.base.errors import UserError
from p2ptrain.base.launcher import lower_priority
from p2ptrain.outer.flat import FlatLayout
from p2ptrain.trainer.host_vector import HostVector
from p2ptrain.trainer.line import Line, LineClosedError

LOST = "lost"
"""Kind of the failure of a rank because another one has ended, which may have said why."""
HEARTBEAT_S = 1.0
"""Seconds between two signs of life of a trainer that works on an answer."""
NICENESS = 10
"""Priority of a trainer below that of its node (nice(2)): an exchange that both sides share a core with took 20 ms
instead of 27, at the same throughput (demo, docs/LOG.md)."""
IDLE_S = 60.0
"""Seconds without a question, as of a peer that pauses, after which several ranks make sure that all are there."""

Answers = Mapping[str, Callable[..., Mapping[str, Any]]]
"""What a trainer answers, by the name of the question; its arguments are JSON values."""


class Attachment:
    """A trainer's place at its node, or that of one of its ranks.

    Args:
        line: to the node.
        rank: of several processes that train together; the first one answers for all.
    """

    def __init__(self, line: Line, rank: int = 0) -> None:
        self._line = line
        self._rank = rank
        line.send({"rank": rank, "pid": os.getpid()})
        self._works = threading.Event()
        threading.Thread(target=self._show_life, name="life", daemon=True).start()
        self._works.set()  # until the first answer; further ranks never rest

    @classmethod
    def of_environment(cls) -> Self:
        """Return the attachment to the node that has started this process, which yields to it from now on."""
        lower_priority(NICENESS)
        return cls(Line.to(os.environ["P2PTRAIN_NODE"]), int(os.environ.get("RANK", "0")))

    def plan(self) -> dict[str, Any]:
        """Return what the node wants to be trained. Raises LineClosedError."""
        found: dict[str, Any] = self._received()["plan"]
        return found

    def host_vector(self, layout: FlatLayout, vectors: int) -> tuple[HostVector, bool]:
        """Return so many vectors of this layout, and whether they are new. Raises LineClosedError."""
        if self._rank == 0:
            self._line.send({"attach": {"names": layout.names, "shapes": layout.shapes, "vectors": vectors}})
        is_new = bool(self._received()["attached"])
        return HostVector.attach(self._line.take_file(), layout.total), is_new

    def say(self, **note: Any) -> None:
        """Send a note in the middle of an answer. Raises LineClosedError."""
        self._line.send(note)

    def has_enough(self) -> bool:
        """Return whether the node has asked to end this answer early. Raises LineClosedError."""
        return self._line.receive(0.0) is not None

    def note(self, kind: str, **fields: Any) -> None:
        """Pass a note on to the node (``ports.Notebook``); any thread. Raises LineClosedError."""
        self._line.send({"note": kind, "fields": fields})

    def serve(self, first: Mapping[str, Any], answers: Answers, on_idle: Callable[[], object] = lambda: None) -> None:
        """Answer questions until the node closes the line.

        Args:
            first: the answer that says that this trainer is ready.
            on_idle: called every ``IDLE_S`` without a question.
        """
        self.answer(first)
        while True:
            try:
                question = self.question(on_idle)
            except LineClosedError:
                return
            name = question.pop("ask")
            self.answer(answers[name](**question))

    def answer(self, answer: Mapping[str, Any]) -> None:
        """Answer the last question, or say that this trainer is ready. Raises LineClosedError."""
        self._line.send({"answer": dict(answer)})

    def question(self, on_idle: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """Return the next question, with its name as "ask". Raises LineClosedError.

        ``on_idle``: called every ``IDLE_S`` without one.
        """
        self._works.clear()
        while True:
            found = self._line.receive(IDLE_S)
            if found is None:
                on_idle()
            elif "ask" in found:  # else "enough", of an answer that has ended
                self._works.set()
                return found

    def fail(self, kind: str, error: BaseException) -> None:
        """Say why this trainer ends; "user" for a UserError, ``LOST``, or another kind. Raises LineClosedError."""
        problem, remedy = str(error).partition("\n")[0], ""
        if isinstance(error, UserError):
            problem, remedy = error.problem, error.remedy
        elif isinstance(error, OSError):
            problem = files.cause(error) if error.filename is None else f"{error.filename}: {files.cause(error)}"
        self._line.send({"failed": kind, "problem": problem, "remedy": remedy})

    def _received(self) -> dict[str, Any]:
        found = self._line.receive()
        assert found is not None, "no timeout"
        return found

    def _show_life(self) -> None:
        while True:
            self._works.wait()
            try:
                self._line.send({"alive": True})
            except LineClosedError:
                os._exit(1)  # whatever the trainer does: nobody waits for it any more
            threading.Event().wait(HEARTBEAT_S)


class LogLines(logging.Handler):
    """Passes this process's log on to the node, which shows it to the owner."""

    def __init__(self, attachment: Attachment) -> None:
        super().__init__()
        self._attachment = attachment

    def emit(self, record: logging.LogRecord) -> None:
        self._attachment.say(log=record.levelno, logger=record.name, message=record.getMessage())
