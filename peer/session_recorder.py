"""Records of one session: progress notes, held-out losses, the weights at the end of training, and summary.json."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from p2ptrain import checkpoint
from p2ptrain.base.clock import wall
from p2ptrain.base.errors import HomeError
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.checkpoint import Checkpoints
from p2ptrain.host.tasks import PeerLearner, PeerTask
from p2ptrain.ports import Notebook
from p2ptrain.swarm import Counters, keeping
from peer.held_out_reader import HeldOutReader
from peer.home import Home
from peer.saving import CheckpointSaver
from peer.speed import ExchangeDrift, Throughput, TimeLeft, time_left

PROGRESS_PERIOD_S = 2.0
OF_SESSION = ("tokens_per_s", "blocked_fraction", "longest_stall_inner_steps")
"""Fields of summary.json that are of one session."""

STEPS_REMEMBERED = 1000
"""Inner steps whose durations are kept; the longest stall is reported in units of their median. Guess: how fast the
median drifts in long sessions."""


@dataclass(slots=True)
class SessionRecorder:
    """Writes notes and the summary of one session, and has checkpoints saved: the ``Hooks`` of the training loop."""

    home: Home
    checkpoints: Checkpoints
    me: PeerId
    run: RunId
    nickname: str
    learner: PeerLearner
    task: PeerTask
    losses: HeldOutReader
    run_tokens: int
    notebook: Notebook
    live_peers: Callable[[], int] = lambda: 0
    counters: Callable[[], Counters] = Counters
    """Returns the counters of this session."""
    earlier: Counters = field(default_factory=Counters)
    """Counters of earlier sessions until the checkpoint that was loaded."""
    earlier_s: float = 0.0
    """Seconds of training in earlier sessions until that checkpoint."""
    is_watched: Callable[[], bool] = lambda: False
    on_outer_step: Callable[[], None] = lambda: None
    """Called after each outer step."""
    on_turn: Callable[[], None] = lambda: None
    """Called after each turn of the training loop."""
    last_exchanges_s: float = 0.0
    """Maximum seconds of a session that starts after the run's end; 0 if the recipe exchanges nothing."""
    keeps: frozenset[int] | None = None
    """Fragments of a node without a trainer, a keeper."""
    why: str = ""
    ended_at: float | None = None
    """Time of the run's end, in seconds since 1970; None: it has not come, or is unknown."""
    saver: CheckpointSaver = field(init=False)
    throughput: Throughput = field(default_factory=Throughput)
    drift: ExchangeDrift = field(default_factory=ExchangeDrift)
    has_stepped: bool = False
    is_held: bool = False
    _started_at: float = 0.0
    _tokens_at_start: int = 0
    _ended_at: float | None = None
    _next_progress: float = 0.0
    _concluded: int | None = None
    """``learner.changes`` at the end of ``conclude``."""
    _held_at: float = 0.0
    _held_s: float = 0.0
    """Seconds of this session in which the trainer was held."""
    _blocked_at_start_s: float = 0.0
    _before: dict[str, Any] = field(default_factory=dict)
    """Summary of the last session, if it ended with the weights that were loaded."""
    _blocked_s: float = 0.0
    _inner_steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_REMEMBERED))
    """Durations in seconds of the last inner steps, without the first, which warms up the device."""

    def __post_init__(self) -> None:
        self.saver = CheckpointSaver(self.checkpoints, self.learner, self._state, self.notebook)

    def begin(self) -> None:
        """Start the session, before its first inner step: read the held-out loss and note the start."""
        if self.keeps is not None:
            self._begin_to_keep(self.keeps)
            return
        self._before = self._last_summary()
        if self.learner.ended:
            self.ended_at = self._before.get("ended_at")
        self.losses.begin(self._before)
        self.saver.begin(is_saved=self.checkpoints.digest is not None)
        self._started_at = time.monotonic()
        self._tokens_at_start = self.learner.tokens
        task = self.task.figures
        self.notebook.note(
            "started",
            device=task.device_name,
            parameters=task.parameter_count,
            micro_batch=task.micro_batch,
            computes_in=task.computes_in,
            **self.losses.fields,
            progress=self.learner.progress,
            **({"ended": True, "seconds": self.last_exchanges_s} if self.learner.ended else {}),
        )

    def _begin_to_keep(self, keeps: frozenset[int]) -> None:
        sizes = self.learner.payloads.weight_sizes()
        self.saver.begin(is_saved=True)
        self.notebook.note(
            "keeping",
            fragments=keeping.words(keeps),
            of=len(sizes),
            size_bytes=sum(sizes[each] for each in keeps),
            progress=self.learner.progress,
        )

    def turned(self) -> None:
        self.on_turn()
        if self.keeps is not None and not self.saver.is_saved:
            self.saver.save_if_due()

    @property
    def is_due(self) -> bool:
        return self.saver.is_due

    def inner_step_done(self) -> None:
        now = time.monotonic()
        self.throughput.inner_step_done(self.learner.tokens)
        self.drift.record(self.learner.progress_displacement)
        if not self.has_stepped:
            self.has_stepped = True
            self.notebook.note("first inner step", seconds=now - self._started_at, cpu_s=self._cpu_s)
            # The clock starts here: the search for the swarm is not training.
            self._started_at, self._tokens_at_start, self._held_s = now, self.learner.tokens, 0.0
            self._blocked_at_start_s = self.learner.blocked_s
        else:
            self._inner_steps_s.append(self.learner.inner_step_s)
        self.saver.save_if_due()
        if now < self._next_progress:
            return
        self._next_progress = now + PROGRESS_PERIOD_S
        self.notebook.note(
            "progress",
            step=self.learner.step,
            progress=self.learner.progress,
            fraction=min(self.learner.progress / self.run_tokens, 1.0),
            run_tokens=self.run_tokens,
            tokens=self.learner.tokens,
            **({"loss": self.learner.loss} if math.isfinite(self.learner.loss) else {}),  # JSON has no NaN
            learning_rate=self.task.figures.learning_rate,
            tokens_per_s=self.throughput.tokens_per_s,
            **self._time_fields(),
            peers=self.live_peers(),
            exchanges_ok=self.counted().exchanges_ok,
            **({} if (unsaved_s := self.saver.unsaved_s) is None else {"unsaved_s": unsaved_s}),
        )

    def held(self, is_held: bool) -> None:
        """Record that the trainer is held in the middle of the run, and save its progress, or that it continues."""
        self.is_held = is_held
        if is_held:
            self._held_at = time.monotonic()
            self.throughput.rest()
            self.drift.rest()
            self.notebook.note("held", step=self.learner.step, tokens=self.learner.tokens)
            self.saver.save_soon()
        else:
            self._held_s += time.monotonic() - self._held_at
            self.throughput.go_on(self.learner.tokens)
            self.notebook.note("goes on", step=self.learner.step, tokens=self.learner.tokens)

    def leaving(self) -> None:
        """Save before the goodbye, during which the owner may kill the process."""
        if not self.saver.is_saved:
            self.saver.save_soon()

    def outer_step_done(self) -> None:
        self.saver.save_if_due()
        self.on_outer_step()
        if self.is_watched():
            self.losses.look()

    def training_ended(self) -> None:
        """Note the run's end and save the weights, before the final gossip."""
        self._stop_the_clock()
        self.ended_at = wall()
        self.notebook.note("trained", progress=self.learner.progress, cpu_s=self._cpu_s)
        slow = {"slow": self.learner.state_dict()[0]["slow"]}
        try:
            checkpoint.save(self.home.trained, slow, self._state())
        except HomeError as error:
            self.notebook.note(
                "not saved", what="the weights at the end of training", why=error.problem.removesuffix(".")
            )

    def conclude(self) -> None:
        """Save the last checkpoint, unless nothing changed since the previous one, and read its held-out loss.

        At the run's end the loss is read without a time limit, unless the owner stops the peer. Call it
        after the last displacement is applied. The checkpoint comes first, because the owner may kill the process
        before the loss is read. Raises HomeError.
        """
        if self._concluded == self.learner.changes:
            return
        if self._ended_at is None:
            self._stop_the_clock()  # retries on a full disk are not training
        if not self.saver.is_saved:
            self.saver.insist("the last checkpoint", self.saver.save)
        self.losses.conclude()
        if self.losses.corpus is not None and (
            self.learner.ended or self.learner.step
        ):  # else there is nothing to export
            self.notebook.note("final loss", **self.losses.fields, progress=self.learner.progress)
        if (tokens := max(self.learner.tokens - self.home.foreign_tokens(), 0)) and self.learner.progress >= tokens:
            exchanges = self.counted().exchanges_ok
            self.notebook.note("share", tokens=tokens, progress=self.learner.progress, exchanges_ok=exchanges)
        self._concluded = self.learner.changes

    def end(self) -> None:
        """End the session: conclude it, unless that has been done, and save the summary. Raises HomeError."""
        self.conclude()
        self.saver.insist("summary.json", lambda: self.home.save_summary(self.summary()))

    def _stop_the_clock(self) -> None:
        """Stop the training clock; waiting in the final gossip does not count as blocked."""
        self._ended_at = self._held_at if self.is_held else time.monotonic()
        self._blocked_s = self.learner.blocked_s - self._blocked_at_start_s
        self.throughput.rest()
        self.drift.rest()

    @property
    def _cpu_s(self) -> float:
        """CPU seconds of this process and of those that train for it."""
        return time.process_time() + self.task.figures.cpu_s

    @property
    def _elapsed_s(self) -> float:
        """Seconds in which the trainer trained or was blocked."""
        now = self._ended_at or (self._held_at if self.is_held else time.monotonic())
        return now - self._started_at - self._held_s

    @property
    def trained_s(self) -> float:
        """Seconds of training in the whole run. Safe from any thread."""
        return self.earlier_s + (self._elapsed_s if self.has_stepped else 0.0)

    def time_left(self) -> TimeLeft | None:
        """Return the swarm's throughput and the time to the run's end; None while unknown. Safe from any thread."""
        tokens = max(self.run_tokens - self.learner.progress, 0.0)
        return time_left(tokens, self.throughput.tokens_per_s, self.learner.peers, self.drift.tokens_per_s)

    def remaining_s(self) -> float | None:
        """Return the seconds to the run's end; None while unknown. Safe from any thread."""
        return None if (left := self.time_left()) is None else left.remaining_s

    def figures(self) -> dict[str, Any]:
        """Return the current training figures. Safe from any thread."""
        learner, task, counters = self.learner, self.task.figures, self.counted()
        return {
            "device": task.device_name,
            "step": learner.step,
            "progress": learner.progress,
            "fraction": min(learner.progress / self.run_tokens, 1.0),
            "run_tokens": self.run_tokens,
            "loss": learner.loss if math.isfinite(learner.loss) else None,  # JSON has no NaN
            "val_loss": self.losses.last.value if math.isfinite(self.losses.last.value) else None,
            "val_loss_tokens": self.losses.last.tokens,
            "tokens": learner.tokens,
            "trained_s": self.trained_s,
            "tokens_per_s": self.throughput.tokens_per_s,
            **self._time_fields(),
            "skipped_steps": task.skipped_steps,
            "compiler": "" if learner.ended else task.compiler,
            "exchanges_ok": counters.exchanges_ok,
            "exchanges_failed": counters.exchanges_failed,
            "unsaved_s": self.saver.unsaved_s,
            "blocked_share": (learner.blocked_s - self._blocked_at_start_s) / max(self._elapsed_s, 1e-9),
            **({} if self.keeps is None else {"keeps": keeping.words(self.keeps)}),
        }

    def counted(self) -> Counters:
        """Return the counters of the whole run, which a start sets back to its checkpoint, like steps and tokens."""
        return self.earlier + self.counters()

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json.

        Those of ``OF_SESSION`` are of the last session that trained, all else of the run. ``outer_steps`` is where the
        peer is in the run, with the steps of those whose weights it took over; ``solo_steps`` is a part of
        ``outer_steps_in_swarm``, which it made itself while it took part.
        """
        counters = self.counted()
        earlier = {} if self.has_stepped else {name: self._before[name] for name in OF_SESSION if name in self._before}
        return {
            "id": self.me,
            "nickname": self.nickname,
            "run": self.run,
            **self._first_loss_fields(),
            "val_loss_last": self.losses.last.value,
            "val_loss_last_tokens": self.losses.last.tokens,
            "val_loss_of_tokens": self.losses.last.of,
            "checkpoint": self.checkpoints.digest,
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
            "outer_steps_in_swarm": counters.outer_steps,
            "coverage": self.task.figures.coverage,
            "finished": self.learner.ended,
            "ended_at": self.ended_at,
            "why": self.why,
            **earlier,
            **self._keeper_fields(),
        }

    def _keeper_fields(self) -> dict[str, Any]:
        if self.keeps is None:
            return {}
        counters = self.counted()
        return {
            "keeps": keeping.words(self.keeps),
            "progress": self.learner.progress,
            "pulls": counters.pulls,
            "donations": counters.donations,
            "val_loss_last": None,  # JSON has no NaN
        }

    def _longest_stall(self) -> float | None:
        """Return the longest time that exchanges blocked the trainer, in median inner steps; None before the second."""
        typical_s = median(self._inner_steps_s) if self._inner_steps_s else 0.0
        return self.learner.longest_blocked_s / typical_s if typical_s > 0 else None

    def _state(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "peer": self.me,
            "step": self.learner.step,
            **self._first_loss_fields(),
            "coverage": self.task.figures.coverage,
            "counters": asdict(self.counted()),
            "trained_s": self.trained_s,
        }

    def _first_loss_fields(self) -> dict[str, Any]:
        first = self.losses.first
        return {
            "val_loss_first": None if first is None else first.value,
            "val_loss_first_tokens": None if first is None else first.tokens,
        }

    def _time_fields(self) -> dict[str, float | None]:
        return {} if (left := self.time_left()) is None else asdict(left)

    def _last_summary(self) -> dict[str, Any]:
        """Return the summary of the last session, if it ended with the weights that were loaded; else nothing."""
        try:
            last: dict[str, Any] = json.loads(self.home.summary.read_bytes())
            return last if last["checkpoint"] == self.checkpoints.digest is not None else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
