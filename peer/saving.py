"""Saving a session's checkpoints: when one is due, and what to do while the disk is full."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from p2ptrain.base.daemon_thread import nap
from p2ptrain.base.errors import HomeError, UserError
from p2ptrain.checkpoint import Checkpoints
from p2ptrain.host.tasks import PeerLearner
from p2ptrain.ports import Clock, Notebook

SAVE_PERIOD_S = 120.0
"""Minimum seconds between two checkpoints, also in an inner phase, and so the work that a power cut costs. More for a
large model (SAVE_RATE) or a slow disk (SAVE_SHARE). Saving the demo model takes 20 ms. Guess: how often volunteers'
machines lose power."""
SAVE_SHARE = 50
"""Minimum ratio of training time to the time for saving: saving costs at most 2 %. Guess: which slowdown volunteers
notice."""
SAVE_RATE = 100e9 / 86_400
"""Maximum bytes per second that checkpoints write on average: 100 GB per day. A solid-state disk of 250 GB is warranted
for 150 TB (Samsung, 970 EVO Plus), which lasts four years. llama-15m is saved every 4.5 minutes, llama-135m every
39."""

RETRY_S = 10.0
"""Seconds between two tries to save at the end of a session, on a full disk. Guess: how long owners take to free some
space."""
LAST_PATIENCE_S = 300.0
"""Seconds for which saving is retried, so that an owner can free some space. Guess: how long owners take to notice and
do so."""


@dataclass(slots=True)
class CheckpointSaver:
    """Saves checkpoints of one session. Runs in the training thread."""

    checkpoints: Checkpoints
    learner: PeerLearner
    state: Callable[[], dict[str, Any]]
    """Returns what a checkpoint holds besides the learner's state."""
    notebook: Notebook
    clock: Clock = time.monotonic
    sleep: Callable[[float], None] = nap
    """Sleeps between retries; an interrupt may raise out of it."""
    _next: float = 0.0
    _saved: int | None = None
    """``learner.changes`` at the last save of this session."""
    _saved_at: float = 0.0
    _unsaved_since: float | None = None
    """Time of the last save, or of the start, if saving has failed since."""

    def begin(self, is_saved: bool = False) -> None:
        """Start the session: the loaded checkpoint, or none, is as good as saved now.

        ``is_saved``: a checkpoint was loaded, so that nothing is to be saved before something changes.
        """
        self._saved_at = time.monotonic()
        self._saved = self.learner.changes if is_saved else None
        self._next = self._saved_at + SAVE_PERIOD_S

    @property
    def is_saved(self) -> bool:
        return self._saved == self.learner.changes

    @property
    def unsaved_s(self) -> float | None:
        """Seconds since the last save, or since the start, if saving has failed since; else None."""
        return None if (since := self._unsaved_since) is None else time.monotonic() - since

    @property
    def is_due(self) -> bool:
        """Whether it is time to save."""
        return time.monotonic() >= self._next

    def save_if_due(self) -> None:
        """Save if it is time, but never an unfinished outer step, which a checkpoint cannot hold."""
        if self.is_due and not self.learner.is_waiting and not self.learner.is_ahead:
            self.try_to_save()

    def save_soon(self) -> None:
        """Save at once or, if the trainer waits for partners, when ``save_if_due`` is called after that outer step."""
        self._next = 0.0
        self.save_if_due()

    def try_to_save(self) -> None:
        """Save a checkpoint; a full disk is noted and does not stop training."""
        began, written = time.monotonic(), 0
        try:
            written = self.save()
        except HomeError as error:
            self._unsaved_since = self._saved_at
            self.notebook.note("not saved", what="a checkpoint", why=error.problem.removesuffix("."))
        now = time.monotonic()
        self._next = now + max(SAVE_PERIOD_S, SAVE_SHARE * (now - began), written / SAVE_RATE)

    def rescue(self) -> None:
        """Try to save a checkpoint after training failed; an error here does not hide the first one."""
        try:
            while self.learner.is_ahead:  # the trainer moves the weights
                self.learner.advance()
            self.save()
        except Exception as error:  # for example, nothing can be read from a GPU after a CUDA error
            self.notebook.note("not saved", what="a checkpoint", why=reason_of(error))

    def save(self) -> int:
        """Save a checkpoint; return its size in bytes. Raises HomeError."""
        tensors, numbers = self.learner.state_dict()
        path = self.checkpoints.save(tensors, {**self.state(), **numbers})
        self._saved, self._saved_at, self._unsaved_since = self.learner.changes, time.monotonic(), None
        self.notebook.note("saved", path=str(path))
        return sum(file.stat().st_size for file in path.iterdir())

    def insist(self, what: str, write: Callable[[], object]) -> None:
        """Retry ``write`` for ``LAST_PATIENCE_S``. Raises HomeError after that."""
        deadline, is_noted = self.clock() + LAST_PATIENCE_S, False
        while True:
            try:
                write()
                return
            except HomeError as error:
                left_s, why, remedy = deadline - self.clock(), error.problem.removesuffix("."), error.remedy
                if left_s <= 0:
                    self.notebook.note("not saved", what=what, why=f"{why}; given up")
                    raise
            if not is_noted:
                is_noted = True
                terms = {"every_s": RETRY_S, "seconds": LAST_PATIENCE_S, "remedy": remedy}
                self.notebook.note("save waits", what=what, why=why, **terms)
            self.sleep(min(RETRY_S, left_s))


def reason_of(error: Exception) -> str:
    return error.problem if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
