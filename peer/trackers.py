"""Figures of a peer for TensorBoard (``--track``): those of the page, once per outer step and held-out loss.

A thread of its own writes them, behind a bounded queue: a disk that fails or hangs costs points and nothing else.
"""

from __future__ import annotations

import importlib.util
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from p2ptrain.base.errors import UserError
from p2ptrain.base.text import command_line, printable
from p2ptrain.page.untrusted import words
from p2ptrain.ports import Notebook

NONE = "none"
PREFIX = "tensorboard:"
MOST_PLACE = 1024
"""Maximum characters of a directory: a quarter of Linux's longest path."""
MOST_QUEUED = 256
"""Maximum points that wait for the disk, as events for a slow reader of the page; beyond that new ones are dropped."""
CLOSE_S = 5.0
"""Longest wait at the peer's end for the last points: half of what docker leaves a stopped peer."""
NOTES = frozenset({"held out", "final loss"})
"""Kinds of notes after which there is a new held-out loss."""


def tracker_name(text: str) -> str:
    """Return ``none``, or ``tensorboard:`` and a directory. Raises ValueError."""
    folder = text.removeprefix(PREFIX)
    if text != NONE and not (folder != text and folder.strip() and folder.isprintable() and len(folder) <= MOST_PLACE):
        raise ValueError("figures go to tensorboard:DIR alone")
    return text


def folder_of(text: str | None) -> Path | None:
    """Return the absolute directory of an option, None for none, if TensorBoard is installed. Raises UserError."""
    if text in (None, NONE):
        return None
    try:
        folder = tracker_name(str(text)).removeprefix(PREFIX)
    except ValueError as error:
        remedy = "Use tensorboard:DIR. To see its files in wandb: wandb sync DIR/PEER."
        raise UserError(f"--track {printable(str(text))}: {error}.", remedy) from None
    if importlib.util.find_spec("tensorboard") is None:
        install = command_line(sys.executable, "-m", "pip", "install", "tensorboard")
        problem = f"--track {text} needs the package tensorboard, which is not installed."
        raise UserError(problem, f"Install it: {install}")
    return Path(folder).expanduser().absolute()


def peer_name(nickname: str, peer: str) -> str:
    """Return the directory of a peer's figures, unique even if two peers have the same nickname."""
    return "-".join(filter(None, [words(nickname).replace("/", "-"), peer[-6:]]))


def open_tensorboard(folder: Path) -> Any:
    """Return torch's ``SummaryWriter`` of a directory. Raises OSError."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))


@dataclass(slots=True)
class Tracker:
    """Context manager whose thread writes figures, until a write fails.

    Args:
        open_writer: as ``open_tensorboard``; called in the thread, as the writer's methods are.
        figures: returns the outer step and the figures by name; safe from any thread.
        notebook: gets one note about a failure or the first dropped point.
    """

    open_writer: Callable[[], Any]
    figures: Callable[[], tuple[int, Mapping[str, float]]]
    notebook: Notebook
    close_s: float = CLOSE_S
    _queue: queue.Queue[tuple[int, Mapping[str, float]] | None] = field(
        default_factory=lambda: queue.Queue(MOST_QUEUED)
    )
    _thread: threading.Thread = field(init=False)
    _is_faulty: bool = False

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="tracker", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Write what is queued, for at most ``close_s``; a disk that hangs longer is left behind."""
        if not self._queue.full():
            self._queue.put_nowait(None)
            self._thread.join(self.close_s)

    def on_note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Write the figures after a note that changes the held-out loss."""
        if kind in NOTES:
            self.record()

    def record(self) -> None:
        """Queue the present figures; returns at once."""
        try:
            self._queue.put_nowait(self.figures())
        except queue.Full:
            self._fail("the disk is too slow, or hangs")

    def _run(self) -> None:
        try:
            writer = self.open_writer()
            while (point := self._queue.get()) is not None:
                step, figures = point
                for name, value in figures.items():
                    writer.add_scalar(f"p2ptrain/{name}", value, step)
                writer.flush()
            writer.close()
        except Exception as error:
            self._fail(words(f"{type(error).__name__}: {error}"))

    def _fail(self, why: str) -> None:
        if not self._is_faulty:
            self._is_faulty = True
            self.notebook.note("not tracked", why=why)
