"""Progress from the children's event logs, displayed live: bars on a terminal, tagged lines elsewhere."""

from __future__ import annotations

import json
import math
import os
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from p2ptrain.base.ids import PeerId, short
from peer.messages import duration, size
from peer.testnet.plan import TrainerProcess

PLAIN_PERIOD_S = 10.0
"""Interval between two lines per process without a terminal, chosen for a readable log."""

LAST_CHARACTERS = 48
"""Maximum length of the text beside a bar, so that it fits on one line of a terminal."""


@dataclass(frozen=True, slots=True)
class TrainerProgress:
    """Progress of one trainer, from its event log."""

    begun: bool = False
    """Whether it has begun to train."""
    catches_up: bool = False
    """Whether it has pulled weights from others."""
    fraction: float = 0.0
    loss: float = math.nan
    first_loss: float = math.nan
    """Held-out loss before training."""
    tokens_per_s: float = 0.0
    exchanges: int = 0
    last: str = "starting"
    """Latest event worth showing."""


def noted(view: TrainerProgress, note: Mapping[str, Any], names: Mapping[PeerId, str]) -> TrainerProgress:
    """Return the view after one more note of the event log."""
    match note:
        case {"kind": "progress"}:
            return replace(
                view,
                begun=True,
                fraction=float(note.get("fraction", view.fraction)),
                loss=float(note.get("loss", view.loss)),
                tokens_per_s=float(note.get("tokens_per_s", view.tokens_per_s)),
                exchanges=int(note.get("exchanges_ok", view.exchanges)),
                last="training" if view.last == "starting" else view.last,
            )
        case {"kind": "exchanged", "peer": str(partner)}:
            took = duration(float(note.get("seconds", 0.0)))
            moved = size(int(note.get("sent_bytes", 0)) + int(note.get("received_bytes", 0)))
            said = f"exchanged with {_name(partner, names)}: {took}, {moved}"
            return replace(view, exchanges=view.exchanges + 1, last=said)
        case {"kind": "skipped" | "failed" as kind, "peer": str(partner)}:
            said = "skipped" if kind == "skipped" else "gave up exchange with"
            return replace(view, last=f"{said} {_name(partner, names)}: {note.get('why', '')}")
        case {"kind": "started", "loss": float(loss)}:
            return replace(view, first_loss=loss, last="training")
        case {"kind": "started"}:
            return replace(view, last="training")
        case {"kind": "catching up"}:
            return replace(view, catches_up=True)
        case {"kind": "trained"}:
            return replace(view, fraction=1.0, last="trained")
        case {"kind": "finished"}:
            return replace(view, last="finished")
        case {"kind": "stopping"}:
            return replace(view, last="saving and leaving")
        case _:
            return view


def _name(peer: str, names: Mapping[PeerId, str]) -> str:
    return names.get(PeerId(peer), short(peer))


def described(view: TrainerProgress) -> str:
    """Format a view: ``34 %, loss 2.310, 1,203 tokens/s, 12 exchanges; exchanged with peer-2: 12 ms, 715.4 kB``."""
    if math.isnan(view.loss):  # before the first outer step there are no figures
        return view.last
    return (
        f"{100 * view.fraction:.0f} %, loss {view.loss:.3f}, {view.tokens_per_s:,.0f} tokens/s, "
        f"{view.exchanges} exchanges; {view.last}"
    )


@dataclass(slots=True)
class Tail:
    """A reader of the complete lines that a JSONL file gained since the last read."""

    path: Path
    _offset: int = 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:  # the log was rotated
                    self._offset = 0
                file.seek(self._offset)
                raw = file.read()
        except FileNotFoundError:
            return []
        whole = raw[: raw.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [note for line in whole.splitlines() if isinstance(note := _parsed(line), dict)]


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:  # a full disk may have cut a line short
        return None


class Watch:
    """The display of all trainers' progress; a context manager that restores the terminal."""

    def __init__(self, trainers: Sequence[TrainerProcess], console: Console) -> None:
        self.console = console
        self.views = {trainer.name: TrainerProgress() for trainer in trainers}
        self.heard_at = self._told_at = time.monotonic()
        """Monotonic time of the latest note of any trainer."""
        self._told: dict[str, TrainerProgress] = {}
        self._tails = {trainer.name: Tail(trainer.home.events) for trainer in trainers}
        self._names = {trainer.peer_id: trainer.name for trainer in trainers}
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("{task.fields[last]}", style="dim"),
            console=console,
        )

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            for name in self.views:
                self._bars.add_task(name, total=1.0, figures="", last="starting")
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the bars; later output appears below them."""
        if self.console.is_terminal:
            self._bars.stop()

    @property
    def all_begun(self) -> bool:
        """Whether every trainer has made its first inner step."""
        return all(view.begun for view in self.views.values())

    def say(self, text: str) -> None:
        """Print one line above the bars."""
        self.console.print(f"[testnet] {text}", markup=False, highlight=False, soft_wrap=True)

    def refresh(self) -> None:
        """Read new notes and update the display."""
        for name, tail in self._tails.items():
            for note in tail.read():
                self.views[name] = noted(self.views[name], note, self._names)
                self.heard_at = time.monotonic()
        if self.console.is_terminal:
            self._show_bars()
        elif time.monotonic() - self._told_at >= PLAIN_PERIOD_S:
            self._told_at = time.monotonic()
            for name, view in self.views.items():
                if self._told.get(name) == view:
                    continue
                self._told[name] = view
                self.console.print(f"[{name}] {described(view)}", markup=False, highlight=False, soft_wrap=True)

    def _show_bars(self) -> None:
        for task, view in zip(self._bars.task_ids, self.views.values(), strict=True):
            figures = f"loss {view.loss:.2f}  {view.tokens_per_s:,.0f} tok/s  {view.exchanges} exch."
            figures *= not math.isnan(view.loss)
            last = textwrap.shorten(view.last, LAST_CHARACTERS, placeholder="…").replace("[", r"\[")
            self._bars.update(task, completed=view.fraction, figures=figures, last=last)
