"""Progress from the children's event logs, in one line now and then."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from peer.testnet.plan import TrainerProcess

PERIOD_S = 10.0
"""Interval between two lines, chosen for a readable log."""


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


def noted(view: TrainerProgress, note: Mapping[str, Any]) -> TrainerProgress:
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
            )
        case {"kind": "started", "loss": float(loss)}:
            return replace(view, first_loss=loss)
        case {"kind": "catching up"}:
            return replace(view, catches_up=True)
        case {"kind": "trained"}:
            return replace(view, fraction=1.0)
        case _:
            return view


def described(views: Mapping[str, TrainerProgress]) -> str:
    """Format the views: ``peer-1 34 % loss 2.310, peer-2 starting; 1,203 tokens/s, 12 exchanges``."""
    losses = {name: f" loss {view.loss:.3f}" if view.loss > 0 else "" for name, view in views.items()}
    each = [
        f"{name} {100 * view.fraction:.0f} %{losses[name]}" if view.begun else f"{name} starting"
        for name, view in views.items()
    ]
    tokens_per_s = sum(view.tokens_per_s for view in views.values())
    exchanges = sum(view.exchanges for view in views.values())
    return f"{', '.join(each)}; {tokens_per_s:,.0f} tokens/s, {exchanges} exchanges"


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
    """All trainers' progress, and its display."""

    def __init__(self, trainers: Sequence[TrainerProcess], console: Console) -> None:
        self.views = {trainer.name: TrainerProgress() for trainer in trainers}
        self.heard_at = self._told_at = time.monotonic()
        """Monotonic time of the latest note of any trainer."""
        self._console = console
        self._told = ""
        self._tails = {trainer.name: Tail(trainer.home.events) for trainer in trainers}

    @property
    def all_begun(self) -> bool:
        """Whether every trainer has made its first inner step."""
        return all(view.begun for view in self.views.values())

    def say(self, text: str) -> None:
        self._console.print(f"[testnet] {text}", markup=False, highlight=False, soft_wrap=True)

    def refresh(self) -> None:
        """Read new notes, and print the progress if it is due."""
        for name, tail in self._tails.items():
            for note in tail.read():
                self.views[name] = noted(self.views[name], note)
                self.heard_at = time.monotonic()
        if time.monotonic() - self._told_at >= PERIOD_S and (text := described(self.views)) != self._told:
            self._told_at, self._told = time.monotonic(), text
            self.say(text)
