"""What Python's logging says in a process's terminal: short lines that steer nothing. Parts may be a stranger's words.

Libraries log what they like: hivemind the lines of p2pd, asyncio the traceback of a task that nobody waits for. Without
a handler of our own Python would print all of it as it is. ``logging_installed`` has it printed line by line, each
printable and cut, and so many lines a minute: a stranger who knows how to make a library complain fills neither
terminal nor log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

MOST_CHARS = 300
"""Of a line; a path and what is wrong with it have room. A guess."""
MOST_LINES = 60
"""Of one message: a traceback has some two per call, and its end says most. A guess."""
PERIOD_S = 60.0
MOST_A_PERIOD = 20
"""Messages printed; of the others their number is told. A guess: a healthy process prints none in a day."""


def printable(text: str) -> str:
    """One line that steers no terminal: parts of it may be a stranger's words. What cannot be shown becomes U+FFFD."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def one_line(text: str, most: int = MOST_CHARS) -> str:
    """The same, and no longer than ``most`` characters."""
    return printable(text if len(text) <= most else f"{text[: most - 1]}…")


class OneLineFormatter(logging.Formatter):
    """``[who] what`` in one line, and under it the traceback if there is one. Of ours, who is the module alone."""

    def format(self, record: logging.LogRecord) -> str:
        who = record.name.rpartition(".")[2] if record.name.startswith(("p2ptrain.", "peer.")) else record.name
        lines = [one_line(f"[{who}] {record.getMessage()}")]
        if record.exc_info:
            told = self.formatException(record.exc_info).split("\n")
            lines += map(one_line, told[-MOST_LINES:])
        return "\n".join(lines)


class RateLimitedHandler(logging.Handler):
    """Prints warnings and worse on the standard error of the moment; what cannot be printed is lost."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(OneLineFormatter())
        self._clock = clock
        self._since = clock()
        self._messages = 0

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):  # arguments that do not fit, an output that nobody takes
            if _is_taken(record):
                return
            if withheld := self._count():
                sys.stderr.write(f"[p2ptrain] {withheld} more messages were not shown\n")
            if self._messages <= MOST_A_PERIOD:
                sys.stderr.write(self.format(record) + "\n")

    def _count(self) -> int:
        """One message more. How many of the last period were not shown, where a new one begins."""
        now, withheld = self._clock(), 0
        if now - self._since >= PERIOD_S:
            self._since, withheld, self._messages = now, max(self._messages - MOST_A_PERIOD, 0), 0
        self._messages += 1
        return withheld


def _is_taken(record: logging.LogRecord) -> bool:
    """Whether a library prints it by itself already (transformers, torch)."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None and logger.parent is not None:
        if logger.handlers:
            return True
        logger = logger.parent
    return False


def reporting(who: str) -> Callable[[asyncio.Task[Any]], None]:
    """A done-callback for tasks that nobody waits for. One that ended by an exception has a bug: its loop tells."""

    def report(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler({"message": f"{who} failed", "exception": error})

    return report


@contextlib.contextmanager
def logging_installed() -> Iterator[None]:
    """Inside, what the whole process logs and nobody else takes goes to the terminal through ``RateLimitedHandler``."""
    root, terminal = logging.getLogger(), RateLimitedHandler()
    root.addHandler(terminal)
    try:
        yield
    finally:
        root.removeHandler(terminal)
