"""Supervision of a node's trainer: one that dies is replaced after a growing pause."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from p2ptrain.base import files
from p2ptrain.base.backoff import PAUSE_S, backoff
from p2ptrain.base.daemon_thread import NAP_S, nap
from p2ptrain.base.errors import DeviceError, TrainerAwayError, UserError
from p2ptrain.ports import Notebook
from p2ptrain.trainer.process import TrainerDiedError, TrainerHandle

LASTING_S = 20 * PAUSE_S[1]
"""Seconds of training after which a trainer's death has the first pause again: pauses then take at most a twentieth."""
FIRST_TRIES = 3
"""Trainers that may die before the first one is ready; what kills so many needs the owner."""


class TrainerSupervisor:
    """The trainer of one node. One thread asks; another one starts trainers, and lasts as long as they do: a process
    gets its parent-death signal when the thread ends that has started it (prctl(2)).

    Args:
        new: starts a trainer's process.
        attach: attaches it; returns its first answer. Raises TrainerDiedError and UserError.
        adopt: lets it go on where the last one was, in the asking thread. Raises TrainerDiedError.
        shrink: makes the next trainer need less memory; returns its largest micro-batch.
        notebook: receives a note when a trainer dies, and when it has been replaced.
        gives_up: whether ``start`` does so after some tries; else another computer may return.
    """

    def __init__(
        self,
        new: Callable[[], TrainerHandle],
        attach: Callable[[TrainerHandle], dict[str, Any]],
        adopt: Callable[[TrainerHandle, dict[str, Any]], None],
        shrink: Callable[[], int],
        notebook: Notebook,
        gives_up: bool = True,
    ) -> None:
        self.on_return: Callable[[], object] = lambda: None
        """Called, by another thread, when a trainer has been replaced."""
        self.current: TrainerHandle | None = None
        self._new, self._attach, self._adopt, self._shrink = new, attach, adopt, shrink
        self._notebook = notebook
        self._gives_up = gives_up
        self._starting: TrainerHandle | None = None
        self._replacement: tuple[TrainerHandle, dict[str, Any]] | None = None
        """A trainer that is ready to go on, and its first answer."""
        self._pauses_s = backoff(*PAUSE_S)
        self._began_at, self._died_at = math.inf, 0.0
        self._closing = threading.Event()
        self._starter = ThreadPoolExecutor(1, "trainer start")
        self._another: Future[None] | None = None
        """The start of another trainer."""
        self._fault: BaseException | None = None
        """What ended that."""
        self._oom_kills = oom_kills()

    def start(self) -> None:
        """Start the first trainer and wait until it is ready; ``DaemonThread.run`` can interrupt. Raises UserError."""
        for tries in itertools.count(1):
            starting = self._starter.submit(self._started)
            while not starting.done():
                wait([starting], NAP_S)
            try:
                self._use(*starting.result())
                return
            except TrainerDiedError as died:
                if tries == FIRST_TRIES and self._gives_up:
                    raise DeviceError(
                        f"The trainer cannot start: {died}.",
                        "Its output is above. Try another --device; if it goes on, please report it.",
                    ) from died
                nap(self._note_death(died))
                if self._closing.is_set():
                    raise TrainerAwayError from died

    def close(self) -> None:
        """End the trainer and whatever starts another one."""
        self._closing.set()
        if (starting := self._starting) is not None:
            starting.kill()
        if self._another is not None:
            wait([self._another])
        replacement, self._replacement = self._replacement, None
        for each in (self.current, None if replacement is None else replacement[0]):
            if each is not None:
                each.close()
        self.current = None
        self._starter.shutdown()

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    @property
    def is_ready(self) -> bool:
        """Whether there is a trainer. Raises the UserError with which the last one ended."""
        if self._fault is not None:
            raise self._fault
        replacement, self._replacement = self._replacement, None
        if replacement is not None:
            try:
                self._use(*replacement)
            except TrainerDiedError as died:
                self.replace(died)
            else:
                self._notebook.note("trainer returned", seconds=time.monotonic() - self._died_at)
        return self.current is not None

    def replace(self, died: TrainerDiedError) -> None:
        """Start another trainer after a pause, and leave it to ``is_ready``."""
        self.current, self._died_at = None, time.monotonic()
        pause_s = self._note_death(died)
        self._another = self._starter.submit(self._start_another, pause_s)

    def fail(self, error: UserError) -> None:
        """Take the error with which the trainer has ended; ``is_ready`` raises it from now on."""
        self.current, self._fault = None, error

    def wait(self, seconds: float) -> None:
        """Wait for the next trainer, at most so long."""
        if self._another is not None:
            wait([self._another], seconds)

    def _use(self, trainer: TrainerHandle, first: dict[str, Any]) -> None:
        self._adopt(trainer, first)
        self._began_at, self.current = time.monotonic(), trainer

    def _started(self) -> tuple[TrainerHandle, dict[str, Any]]:
        """Return a trainer and its first answer. Raises TrainerDiedError and UserError."""
        try:
            trainer = self._starting = self._new()
        except OSError as error:  # no memory for a process, or too many
            raise TrainerDiedError(f"its process cannot begin: {files.cause(error)}") from error
        try:
            if self._closing.is_set():
                raise TrainerDiedError("the node ends")
            return trainer, self._attach(trainer)
        except BaseException:
            trainer.kill()
            raise
        finally:
            self._starting = None

    def _start_another(self, pause_s: float) -> None:
        while not self._closing.wait(pause_s):
            try:
                self._replacement = self._started()
            except TrainerDiedError as died:
                if self._closing.is_set():
                    return
                pause_s = self._note_death(died)
            except BaseException as error:  # raised in the asking thread by ``is_ready``
                self._fault = error
                break
            else:
                break
        self.on_return()

    def _note_death(self, died: TrainerDiedError) -> float:
        """Note a trainer's death; return the pause before the next one."""
        if time.monotonic() - self._began_at >= LASTING_S:
            self._pauses_s = backoff(*PAUSE_S)
        self._began_at = math.inf
        pause_s, kills = next(self._pauses_s), oom_kills()
        is_memory = died.kind == "memory" or (died.was_killed and kills > self._oom_kills)
        self._oom_kills = kills
        smaller = self._shrink() if is_memory else None
        self._notebook.note("trainer died", why=str(died), seconds=pause_s, micro_batch=smaller)
        return pause_s


def oom_kills(path: Path = Path("/proc/vmstat")) -> int:
    """Return how often this system has killed a process for memory; 0 where it does not say."""
    try:
        fields = dict(line.split() for line in path.read_text(encoding="ascii").splitlines())
        return int(fields.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0
