"""Terminal output of Python's logging: short, printable lines at a limited rate.

Libraries log freely, partly text from strangers: hivemind passes on p2pd's lines, asyncio prints tracebacks of tasks
that nobody awaits. A stranger who makes a library complain must fill neither terminal nor log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from p2ptrain.base.text import one_line

MOST_LINES = 60
"""Lines of one message; a traceback has about two per call, and its end says most. Guess: the lengths of real
tracebacks would settle it."""
PERIOD_S = 60.0
MOST_A_PERIOD = 20
"""Messages printed per period; the rest are only counted. A healthy process prints none in a day. Guess: message counts
of real faults would settle it."""


class OneLineFormatter(logging.Formatter):
    """Formatter for ``[source] message`` in one line, followed by the traceback if there is one.

    The source is the last part of the logger's name for p2ptrain's own modules, the full name for all others.
    """

    def format(self, record: logging.LogRecord) -> str:
        who = record.name.rpartition(".")[2] if record.name.startswith(("p2ptrain.", "peer.")) else record.name
        lines = [one_line(f"[{who}] {record.getMessage()}")]
        if record.exc_info:
            traceback = self.formatException(record.exc_info).split("\n")
            lines += map(one_line, traceback[-MOST_LINES:])
        return "\n".join(lines)


class RateLimitedHandler(logging.Handler):
    """Handler that prints warnings and errors on the current standard error; what cannot be printed is lost."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(OneLineFormatter())
        self._clock = clock
        self._since = clock()
        self._messages = 0

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):  # arguments that do not match the format, or a closed output
            if _is_taken(record):
                return
            if withheld := self._count():
                sys.stderr.write(f"[p2ptrain] {withheld} more messages were not shown\n")
            if self._messages <= MOST_A_PERIOD:
                sys.stderr.write(self.format(record) + "\n")

    def _count(self) -> int:
        """Count one message; return how many of the last period were not shown if a new period begins, else 0."""
        now, withheld = self._clock(), 0
        if now - self._since >= PERIOD_S:
            self._since, withheld, self._messages = now, max(self._messages - MOST_A_PERIOD, 0), 0
        self._messages += 1
        return withheld


def _is_taken(record: logging.LogRecord) -> bool:
    """Whether a library already prints this record through its own handler (transformers, torch)."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None and logger.parent is not None:
        if logger.handlers:
            return True
        logger = logger.parent
    return False


def reporting(who: str) -> Callable[[asyncio.Task[Any]], None]:
    """Return a done-callback for tasks that nobody awaits: an exception is a bug and goes to the loop's handler."""

    def report(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler({"message": f"{who} failed", "exception": error})

    return report


@contextlib.contextmanager
def logging_installed() -> Iterator[None]:
    """Send log records that no other handler takes to the terminal through ``RateLimitedHandler``."""
    root, terminal = logging.getLogger(), RateLimitedHandler()
    root.addHandler(terminal)
    try:
        yield
    finally:
        root.removeHandler(terminal)
