"""Trackers: a peer's figures sent to TensorBoard, wandb or trackio, once per outer step and held-out loss.

The figures are those of the page (``StatusView``). The tracker's library works in a thread of its own behind a bounded
queue: a library that fails, or hangs on its server, costs its own points and nothing else.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from p2ptrain.base.errors import UserError
from p2ptrain.base.text import command_line, printable
from p2ptrain.page.untrusted import words
from p2ptrain.ports import Notebook

KINDS = ("tensorboard", "wandb", "trackio")
NONE = "none"
EXAMPLES = "tensorboard:DIR, wandb:PROJECT or trackio:PROJECT"
MOST_PLACE = 1024
"""Maximum characters of a directory or a project's name: a quarter of Linux's longest path."""
MOST_QUEUED = 256
"""Maximum points that wait for the tracker, as events for a slow reader of the page; beyond that new ones are dropped
and counted."""
CLOSE_S = 5.0
"""Longest wait at the peer's end for a tracker to write its last points: half of what docker leaves a stopped peer."""
NOTES = frozenset({"held out", "final loss"})
"""Kinds of notes after which there is a new held-out loss."""


class FigureWriter(Protocol):
    """An open run of a tracker; used in one thread."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write figures by name. Raises anything."""

    def close(self) -> None:
        """Write what is left. Raises anything."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Names under which a tracker shows this peer's figures."""

    run: str
    run_name: str
    peer: str
    nickname: str = ""

    @property
    def name(self) -> str:
        """Name of the peer: unique even if two peers of a project have the same nickname."""
        return "-".join(filter(None, [words(self.nickname).replace("/", "-"), self.peer[-6:]]))

    @property
    def facts(self) -> dict[str, str]:
        return {"run": self.run, "run_name": self.run_name, "peer": self.peer}


@dataclass(frozen=True, slots=True)
class TrackerTarget:
    """A tracker of ``KINDS``, and its directory or project."""

    kind: str
    place: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``KIND:PLACE``. Raises ValueError."""
        kind, _, place = text.partition(":")
        if kind not in KINDS or not place.strip() or len(place) > MOST_PLACE or not place.isprintable():
            raise ValueError(f"a tracker is {EXAMPLES}")
        if kind != "tensorboard" and "/" in place:  # both libraries refuse it only when they send
            raise ValueError("the name of a project has no slash")
        return cls(kind, place)

    @property
    def text(self) -> str:
        """``KIND:PLACE`` that means the same at a start in another directory."""
        is_folder = self.kind == "tensorboard"
        return f"{self.kind}:{Path(self.place).expanduser().absolute() if is_folder else self.place}"

    def check_installed(self) -> None:
        """Raise UserError if the tracker's package is missing, or if wandb would ask for a key while the peer runs."""
        if importlib.util.find_spec(self.kind) is None:
            install = command_line(sys.executable, "-m", "pip", "install", self.kind)
            raise UserError(
                f"--track {self.kind}:{self.place} needs the package {self.kind}, which is not installed.",
                f"Install it: {install}",
            )
        if self.kind == "wandb":
            _check_wandb()

    def open(self, tracked: TrackedRun) -> FigureWriter:
        """Open the tracker. Raises whatever its library raises."""
        match self.kind:
            case "tensorboard":
                return _TensorBoard(Path(self.place).expanduser() / tracked.name)
            case "wandb":
                return _Wandb(self.place, tracked)
            case _:
                return _Trackio(self.place, tracked)


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(f"p2ptrain/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, project: str, tracked: TrackedRun) -> None:
        import wandb

        quiet = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_meta=True,  # the owner's computer, user and program are nobody's business
            x_disable_machine_info=True,
            x_disable_stats=True,
        )
        self._run: Any = wandb.init(
            project=project,
            name=tracked.name,
            id=f"{tracked.run[:8]}-{tracked.peer[-24:]}",
            resume="allow",
            config=tracked.facts,
            settings=quiet,
        )

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, project: str, tracked: TrackedRun) -> None:
        import trackio

        self._trackio: Any = trackio
        trackio.init(project=project, name=tracked.name, config=tracked.facts, resume="allow")

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._trackio.log(dict(figures), step=step)

    def close(self) -> None:
        self._trackio.finish()


def tracker_name(text: str) -> str:
    """Return a valid target, or ``none``. Raises ValueError."""
    if text != NONE:
        TrackerTarget.parse(text)
    return text


def target_of(text: str | None) -> TrackerTarget | None:
    """Return the target that an option names, None for none, after a check of its package. Raises UserError."""
    if text in (None, NONE):
        return None
    try:
        target = TrackerTarget.parse(str(text))
    except ValueError as error:
        raise UserError(f"--track {printable(str(text))}: {error}.", f"Name one, as {EXAMPLES}.") from None
    target.check_installed()
    return target


def _check_wandb() -> None:
    if os.environ.get("WANDB_MODE", "online") != "online":
        return
    import wandb

    if not wandb.login(prompt=False, verify=False):  # asks neither the owner nor the server
        raise UserError(
            "This computer has no API key of wandb, which would ask for it while the peer trains.",
            "Run: wandb login. Or set WANDB_MODE=offline, and send the figures later with wandb sync.",
        )


@dataclass(slots=True)
class Tracker:
    """Sender of figures to one tracker; a context manager that ends its thread.

    Args:
        open_writer: opens the tracker, in the thread.
        figures: returns the outer step and the figures by name; safe from any thread.
        notebook: gets one note about a failure or the first dropped point, and one about all at the end.
    """

    open_writer: Callable[[], FigureWriter]
    figures: Callable[[], tuple[int, Mapping[str, float]]]
    notebook: Notebook
    dropped: int = 0
    """Points that were not written: the queue was full, or the tracker failed."""
    close_s: float = CLOSE_S
    _queue: queue.Queue[tuple[int, dict[str, float]] | None] = field(default_factory=lambda: queue.Queue(MOST_QUEUED))
    _thread: threading.Thread = field(init=False)
    _is_faulty: bool = False

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="tracker", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Write what is queued, for at most ``close_s``; a tracker that hangs longer is left behind."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:  # it hangs
            self.dropped += self._queue.qsize()
        else:
            self._thread.join(self.close_s)
            if self._thread.is_alive():
                self.dropped += max(self._queue.qsize() - 1, 0)
        if self.dropped:
            self.notebook.note("points dropped", dropped=self.dropped)

    def on_note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Send the figures after a note that changes the held-out loss."""
        if kind in NOTES:
            self.record()

    def record(self) -> None:
        """Send the present figures; returns at once."""
        step, figures = self.figures()
        try:
            self._queue.put_nowait((step, dict(figures)))
        except queue.Full:
            self._drop("it is too slow, or does not answer")

    def _drop(self, why: str) -> None:
        self.dropped += 1
        if not self._is_faulty:
            self._is_faulty = True
            self.notebook.note("not tracked", why=why)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        writer: FigureWriter | None = None
        try:
            writer = self.open_writer()
        except BaseException as error:  # some libraries raise SystemExit
            self._fail(error)
        while (point := self._queue.get()) is not None:
            if writer is None:
                self.dropped += 1
                continue
            try:
                writer.write(*point)
            except Exception as error:
                self.dropped += 1
                self._fail(error)
        if writer is not None:
            try:
                writer.close()
            except Exception as error:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._is_faulty:
            self._is_faulty = True
            self.notebook.note("not tracked", why=words(f"{type(error).__name__}: {error}"))
