"""Figures of a peer for TensorBoard (``--track``): those of the page, once per outer step and held-out loss."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from p2ptrain.base.errors import UserError
from p2ptrain.base.text import command_line, printable
from p2ptrain.page.untrusted import words
from p2ptrain.ports import Notebook

NONE = "none"
PREFIX = "tensorboard:"
MOST_PLACE = 1024
"""Maximum characters of a directory: a quarter of Linux's longest path."""
MAX_QUEUED = 10_000
"""Figures that wait for the disk, those of some hundred outer steps; further ones wait, too."""
FLUSH_S = 10
"""Longest delay of a figure in seconds."""
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

    return SummaryWriter(str(folder), max_queue=MAX_QUEUED, flush_secs=FLUSH_S)


class Tracker:
    """Context manager that writes figures until a write fails. The training thread calls it.

    torch's writer has a thread and a queue of its own, so a slow disk does not delay training.

    Args:
        open_writer: as ``open_tensorboard``.
        figures: returns the outer step and the figures by name.
        notebook: gets one note about a failure.
    """

    def __init__(
        self,
        open_writer: Callable[[], Any],
        figures: Callable[[], tuple[int, Mapping[str, float]]],
        notebook: Notebook,
    ) -> None:
        self._open_writer = open_writer
        self._figures = figures
        self._notebook = notebook
        self._writer: Any = None
        self._is_faulty = False

    def __enter__(self) -> Self:
        with self._noting():
            self._writer = self._open_writer()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_faulty:
            with self._noting():
                self._writer.close()

    def on_note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Write the figures after a note that changes the held-out loss."""
        if kind in NOTES:
            self.record()

    def record(self) -> None:
        """Write the present figures."""
        if self._is_faulty:
            return
        step, figures = self._figures()
        with self._noting():
            for name, value in figures.items():
                self._writer.add_scalar(f"p2ptrain/{name}", value, step)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the writer's thread raises anything, at a later call
            self._is_faulty = True
            self._notebook.note("not tracked", why=words(f"{type(error).__name__}: {error}"))
