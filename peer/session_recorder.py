"""What one session writes down: progress notes, checkpoints, the weights when training ended, and summary.json."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from p2ptrain import checkpoint
from p2ptrain.base.errors import HomeError, UserError
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.checkpoint import Checkpoints
from p2ptrain.data import Corpus
from p2ptrain.ports import Clock, Notebook
from p2ptrain.swarm import Counters
from p2ptrain.train import LanguageModelTask, Placement, validation_loss
from p2ptrain.train.learner import Learner
from peer.home import Home
from peer.throughput import Throughput

PROGRESS_PERIOD_S = 2.0
SAVE_PERIOD_S = 120.0
"""Between two checkpoints, in an inner phase too, and so the work lost to a power cut; more where the model is large
(SAVE_RATE) or the disk slow (SAVE_SHARE). A guess; saving the demo model takes 20 ms."""
SAVE_SHARE = 50
"""Saving may cost so much less than what is trained meanwhile: 2 %. A guess."""
SAVE_RATE = 100e9 / 86_400
"""Bytes a second that checkpoints may write: 100 GB a day, and a solid-state disk of 250 GB is warranted for 150 TB
(Samsung, 970 EVO Plus): four years, day and night. llama-15m is saved every 4.5 minutes, llama-135m every 39."""

LOOK_PERIOD_S, LOOK_MOST_S = 20.0, 120.0
"""Between two looks at the held-out loss while somebody watches: at least, and at most. Guesses."""
LOOK_SHARE = 50
"""A look may cost so much less than what is trained meanwhile: 2 %; more where it takes longer than 2.4 s."""
LOOK_TOKENS = 16_384
"""Read for it: its standard error is then .02 nats for bytes, twice that of the losses that are reported."""

HELD_OUT_TOKENS = 65_536
"""Read for one held-out loss: its standard error is then about .01 nats for bytes. A guess; 1 s for the demo model."""
LOSS_PATIENCE_S = 30.0
"""Reading may take so long, by and large; a slower machine reads fewer tokens. A guess."""
BEGINNING_S = 5.0
"""The same before the first step, while nobody is asked for weights yet: the loss of weights that are hardly trained,
or were read before, need not be exact. Our measurement: a newcomer to four peers of 15 million parameters on two cores
began to ask for weights after 40 s, some 30 of which it had read held-out text for."""
HASTE_S = 3.0
"""The same once the owner has stopped the peer: docker kills what has not ended after 10 s. A guess."""

RETRY_S = 10.0
"""Between two tries to save what a session ends with, on a disk that takes nothing. A guess."""
LAST_PATIENCE_S = 300.0
"""So long it is tried: an owner who sees it has time to free some space. A guess."""

STEPS_REMEMBERED = 1000
"""Inner steps whose seconds are remembered: the longest stall is told in their median. A guess."""


@dataclass(slots=True)
class SessionRecorder:
    """Lives in the trainer thread."""

    home: Home
    checkpoints: Checkpoints
    """The home's."""
    me: PeerId
    run: RunId
    nickname: str
    learner: Learner
    task: LanguageModelTask
    corpus: Corpus
    placement: Placement
    tokens_per_peer: int
    notebook: Notebook
    live_peers: Callable[[], int] = lambda: 0
    """How many others are here."""
    counters: Callable[[], Counters] = Counters
    """What the protocol core counted."""
    sampler: Callable[[], str] | None = None
    """What the model writes just now; empty: nothing at this look."""
    is_watched: Callable[[], bool] = lambda: False
    """Somebody may look at how the held-out loss falls."""
    clock: Clock = time.monotonic
    """Of the last save's patience."""
    sleep: Callable[[float], None] = time.sleep
    """Between its tries; a signal's handler may raise out of it."""
    first_loss: float | None = None
    last_loss: float = float("nan")
    why: str = ""
    pace: Throughput = field(default_factory=Throughput)
    has_stepped: bool = False
    is_held: bool = False
    """The owner lets the trainer rest."""
    _started_at: float = 0.0
    _tokens_at_start: int = 0
    _ended_at: float | None = None
    _next_progress: float = 0.0
    _next_save: float = 0.0
    _saved: int | None = None
    """``learner.changes`` when this session saved last."""
    _next_look: float = 0.0
    _held_at: float = 0.0
    _held_s: float = 0.0
    """Seconds of this session in which the trainer rested."""
    _blocked_at_start_s: float = 0.0
    _blocked_s: float = 0.0
    _inner_steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_REMEMBERED))
    """Seconds of the last inner steps but the first, which warms the device up."""

    def begin(self) -> None:
        """Before the first inner step of this session."""
        self.last_loss = self._held_out_loss(patience_s=BEGINNING_S)
        if self.first_loss is None and math.isfinite(self.last_loss):  # checkpoints hold it, and JSON has no NaN
            self.first_loss = self.last_loss
        self._started_at = time.monotonic()
        self._tokens_at_start = self.learner.tokens
        self._next_save, self._next_look = self._started_at + SAVE_PERIOD_S, self._started_at + LOOK_PERIOD_S
        self.notebook.note(
            "started",
            device=str(self.task.theta.device),
            parameters=self.task.model.layout.parameter_count,
            micro_batch=self.task.micro_batch,
            computes_in=self.placement.computes_in,
            loss=self.last_loss,
            progress=self.learner.progress,
        )

    def inner_step_done(self) -> None:
        now = time.monotonic()
        self.pace.inner_step_done(self.learner.tokens)
        if not self.has_stepped:
            self.has_stepped = True
            self.notebook.note("first inner step", seconds=now - self._started_at)
            # The clock starts here: searching for the swarm is no training.
            self._started_at, self._tokens_at_start, self._held_s = now, self.learner.tokens, 0.0
            self._blocked_at_start_s = self.learner.blocked_s
        else:
            self._inner_steps_s.append(self.learner.inner_step_s)
        if not self.learner.is_waiting:  # a checkpoint does not hold an outer step under way
            self._save_if_due()
        if now < self._next_progress:
            return
        self._next_progress = now + PROGRESS_PERIOD_S
        self.notebook.note(
            "progress",
            step=self.learner.step,
            progress=self.learner.progress,
            fraction=min(self.learner.progress / self.tokens_per_peer, 1.0),
            tokens=self.learner.tokens,
            **({"loss": self.learner.loss} if math.isfinite(self.learner.loss) else {}),  # JSON has no NaN
            learning_rate=self.task.learning_rate,
            tokens_per_s=self.pace.tokens_per_s,
            peers=self.live_peers(),
            exchanges_ok=self.counters().exchanges_ok,
        )

    def held(self, is_held: bool) -> None:
        """The trainer stopped in the middle of the run, or goes on.

        What it has done so far is saved meanwhile: at once, or once the outer step is over for whose partners it waits,
        which a checkpoint does not hold.
        """
        self.is_held = is_held
        if is_held:
            self._held_at = time.monotonic()
            self.pace.rest()
            self.notebook.note("held", step=self.learner.step, tokens=self.learner.tokens)
            self._next_save = 0.0
            if not self.learner.is_waiting:
                self.try_to_save()
        else:
            self._held_s += time.monotonic() - self._held_at
            self.pace.go_on(self.learner.tokens)
            self.notebook.note("goes on", step=self.learner.step, tokens=self.learner.tokens)

    def leaving(self) -> None:
        """Before the goodbye, amid which an owner out of patience may end the process: as where the trainer is held."""
        if not self.learner.is_waiting and not self._is_saved:
            self.try_to_save()

    def outer_step_done(self) -> None:
        self._save_if_due()
        if time.monotonic() >= self._next_look and self.is_watched():
            self._look()

    def _look(self) -> None:
        """What a watcher wants to know and training does not: the held-out loss, and a text. No fault of it counts."""
        began, learner = time.monotonic(), self.learner
        try:
            self.last_loss = self._held_out_loss(LOOK_TOKENS)
            self.notebook.note("held out", loss=self.last_loss, step=learner.step, progress=learner.progress)
            if self.sampler is not None and (text := self.sampler()):
                self.notebook.note("sample", step=learner.step, text=text)
        except Exception as error:  # whatever it was, training goes on without it
            self.notebook.note("not looked", why=_why(error))
        now = time.monotonic()
        self._next_look = now + max(LOOK_PERIOD_S, min(LOOK_SHARE * (now - began), LOOK_MOST_S))

    def training_ended(self) -> None:
        """At the run's end, before the final gossip: what the inner and outer optimizers made."""
        self._stop_the_clock()
        self.last_loss = self._held_out_loss()
        self.notebook.note("trained", loss=self.last_loss, progress=self.learner.progress)
        try:
            checkpoint.save(self.home.trained, {"slow": self.learner.state_dict()[0]["slow"]}, self._state())
        except HomeError as error:
            self.notebook.note("not saved", what="the weights at the end of training", why=error.problem)

    def try_to_save(self) -> None:
        """A checkpoint; a full disk costs the checkpoint, not the training."""
        began, written = time.monotonic(), 0
        try:
            written = self.save()
        except HomeError as error:
            self.notebook.note("not saved", what="a checkpoint", why=error.problem)
        now = time.monotonic()
        self._next_save = now + max(SAVE_PERIOD_S, SAVE_SHARE * (now - began), written / SAVE_RATE)

    def _save_if_due(self) -> None:
        if time.monotonic() >= self._next_save:
            self.try_to_save()

    @property
    def _is_saved(self) -> bool:
        return self._saved == self.learner.changes

    def rescue(self) -> None:
        """Training has failed: a checkpoint, if one can still be had. What failed is not hidden by what fails here."""
        try:
            self.save()
        except Exception as error:  # an error of CUDA, say, sticks: nothing comes off the card after it
            self.notebook.note("not saved", what="a checkpoint", why=_why(error))

    def save(self) -> int:
        """A checkpoint; how many bytes its tensors have. Raises HomeError."""
        tensors, numbers = self.learner.state_dict()
        path = self.checkpoints.save(tensors, {**self._state(), **numbers})
        self._saved = self.learner.changes
        self.notebook.note("saved", path=str(path))
        return sum(tensor.nbytes for tensor in tensors.values())

    def end(self, in_haste: bool = False) -> None:
        """After the last displacement is applied: the last checkpoint, unless the goodbye changed nothing since the one
        before it, and the summary. Raises HomeError.

        The checkpoint comes first: an owner who is out of patience may end the process before the loss is read.
        """
        is_timed = self._ended_at is not None
        if not is_timed:
            self._stop_the_clock()  # what a full disk takes is no training
        if not self._is_saved:
            self._insist("the last checkpoint", self.save)
        if not is_timed:
            self.last_loss = self._held_out_loss(patience_s=HASTE_S if in_haste else LOSS_PATIENCE_S)
        self._insist("summary.json", lambda: self.home.save_summary(self.summary()))

    def _insist(self, what: str, write: Callable[[], object]) -> None:
        """Try for a while: nobody will save it after us. Raises HomeError when that is over."""
        deadline, is_told = self.clock() + LAST_PATIENCE_S, False
        while True:
            try:
                write()
                return
            except HomeError as error:
                left_s, why = deadline - self.clock(), error.problem
                if left_s <= 0:
                    self.notebook.note("not saved", what=what, why=f"{why}; given up")
                    raise
            if not is_told:
                is_told = True
                self.notebook.note("save waits", what=what, why=why, every_s=RETRY_S, seconds=LAST_PATIENCE_S)
            self.sleep(min(RETRY_S, left_s))

    def _stop_the_clock(self) -> None:
        """Training is over; what the final gossip blocks, blocks nothing."""
        self._ended_at = self._held_at if self.is_held else time.monotonic()
        self._blocked_s = self.learner.blocked_s - self._blocked_at_start_s
        self.pace.rest()

    @property
    def _elapsed_s(self) -> float:
        """In which the trainer trained, or would have if it had not been blocked."""
        now = self._ended_at or (self._held_at if self.is_held else time.monotonic())
        return now - self._started_at - self._held_s

    def figures(self) -> dict[str, Any]:
        """Where training stands; from any thread."""
        learner, counters = self.learner, self.counters()
        return {
            "step": learner.step,
            "progress": learner.progress,
            "fraction": min(learner.progress / self.tokens_per_peer, 1.0),
            "loss": learner.loss if math.isfinite(learner.loss) else None,  # JSON has no NaN
            "val_loss": self.last_loss if math.isfinite(self.last_loss) else None,
            "tokens": learner.tokens,
            "tokens_per_s": self.pace.tokens_per_s,
            "exchanges_ok": counters.exchanges_ok,
            "exchanges_failed": counters.exchanges_failed,
            "blocked_share": (learner.blocked_s - self._blocked_at_start_s) / max(self._elapsed_s, 1e-9),
        }

    def summary(self) -> dict[str, Any]:
        """The session's figures."""
        counters = self.counters()
        return {
            "id": self.me,
            "nickname": self.nickname,
            "run": self.run,
            "val_loss_first": self.first_loss,
            "val_loss_last": self.last_loss,
            "tokens": self.learner.tokens,
            "tokens_per_s": (self.learner.tokens - self._tokens_at_start) / max(self._elapsed_s, 1e-9),
            "exchanges_ok": counters.exchanges_ok,
            "exchanges_failed": counters.exchanges_failed,
            "half_commits": counters.half_commits,
            "solo_steps": counters.solo_steps,
            "sent_bytes": counters.sent_bytes,
            "received_bytes": counters.received_bytes,
            "blocked_fraction": self._blocked_s / max(self._elapsed_s, 1e-9),
            "longest_stall_inner_steps": self._longest_stall(),
            "outer_steps": self.learner.step,
            "coverage": self.task.coverage,
            "finished": self.learner.ended,
            "why": self.why,
        }

    def _longest_stall(self) -> float | None:
        """The longest time between two inner steps in which exchanges held the trainer up, in inner steps; None where
        no second one was made."""
        typical_s = median(self._inner_steps_s) if self._inner_steps_s else 0.0
        return self.learner.longest_blocked_s / typical_s if typical_s > 0 else None

    def _state(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "peer": self.me,
            "step": self.learner.step,
            "val_loss_first": self.first_loss,
            "coverage": self.task.coverage,
        }

    def _held_out_loss(self, tokens: int = HELD_OUT_TOKENS, patience_s: float = LOSS_PATIENCE_S) -> float:
        return validation_loss(self.task.model.module, self.corpus, tokens, self.placement.autocast, patience_s)


def _why(error: Exception) -> str:
    return error.problem if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
