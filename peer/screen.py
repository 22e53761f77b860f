"""Output for the owner: a progress bar with lines above it on a terminal, tagged lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from peer.messages import line

PLAIN_PROGRESS_S = 10.0
"""Seconds between two progress lines without a terminal, to keep logs readable."""


class Screen:
    """Shows notes of the event log; a context manager that restores the terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True, emoji=False)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("[train] starting", total=1.0)
        self._last_progress = float("-inf")

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def show(self, kind: str, fields: dict[str, Any]) -> None:
        text = line(kind, fields)
        if text is None:
            return
        if kind == "progress":
            self._progress(text, fields)
        else:
            self._console.print(text, markup=False)

    def _progress(self, text: str, fields: dict[str, Any]) -> None:
        if self._console.is_terminal:
            self._bar.update(self._task, description=text, completed=fields["fraction"])
        elif time.monotonic() - self._last_progress >= PLAIN_PROGRESS_S:
            self._last_progress = time.monotonic()
            self._console.print(text, markup=False)
