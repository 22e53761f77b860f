"""Learner: state of the inner phase and of the run, and the moments at which its weights move.

Two threads meet here without a lock. The trainer thread calls ``advance`` and ``settle`` and is the only writer. Any
thread may use ``payloads``, which reads the last published snapshot, and fill ``inbox``, which the trainer empties
between two inner steps. So the trainer waits for the network only where its recipe requires it. ``train.weights``
defines how weights move and what partners get of them.

Legend: P parameters (padded).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from p2ptrain.base.errors import TrainerAwayError
from p2ptrain.codec import Codec, Matrices, is_adaptive, is_decodable
from p2ptrain.outer.adaptive import AdaptiveRank
from p2ptrain.outer.mixing import displaced, displacement, l2_distance, late_momentum, late_pseudo_gradient
from p2ptrain.ports import AllGather, Clock, HeldOut, InnerTask, Notebook, RunsAhead, StepResult
from p2ptrain.recipes import Stream
from p2ptrain.swarm.events import Adopted, Applied, Event, ExchangeDue, OuterStepDone, PhaseDone, TrainingEnded, Unfit
from p2ptrain.train.fast_weights import FastCopy, FastWeights
from p2ptrain.train.guard import PhaseGuard
from p2ptrain.train.inbox import Adoption, Delivery, Displacement, Inbox, RoundFinished
from p2ptrain.train.outer_phase import OuterPhase
from p2ptrain.train.payloads import Payloads
from p2ptrain.train.rules import LearnerRules
from p2ptrain.train.weights import Weights, single_rank

if TYPE_CHECKING:
    from p2ptrain.ports import Saved

T = TypeVar("T")

AHEAD_S = 0.5
"""Longest inner step, in seconds, after which a trainer begins another one at once. It saves a millisecond, and delays
a displacement or an owner's stop by a step."""
REWARM_STEPS = 20
"""Inner steps over which the inner optimizer warms up again after its weights were replaced. AdamW's second moment
(beta2 .95 to .999) needs tens to hundreds of steps; its bias correction bounds the step size from the start. Guess:
loss after a join for several values would settle it."""

SHOWINGS = 4
"""Times per phase, its end included, that partners get newer weights if the recipe mixes the fast ones; each due
exchange adds one. Each is a copy of the model to the CPU. Guess: the loss with other numbers of copies per phase would
settle it."""


class Learner:
    """Trainer by the outer algorithm that applies the results of exchanges.

    Args:
        task: the inner optimization; its ``theta`` [P] becomes the initial slow weights.
        rules: H, the end, the outer rule.
        fragments: slices of [0, P), one per fragment.
        codec: for the weights in exchanges.
        gradient_codec: for pseudo-gradients; None: ``codec``.
        matrices: the matrices in each fragment (``rules.matrices_of``); empty: unknown.
        notebook: receives a note for each discarded inner phase.
        clock: measures the time that the network costs the trainer.
        held_out: evaluates donors' weights before they replace this peer's; None: no evaluation.
        all_gather: joins numbers about this learner's fragments with those of the peer's other ranks.
        fast: the task's weights; None: this process's own.
        ahead: the task, if it is in another process.
    """

    def __init__(
        self,
        task: InnerTask,
        rules: LearnerRules,
        fragments: Sequence[slice],
        codec: Codec,
        notebook: Notebook,
        clock: Clock = time.perf_counter,
        gradient_codec: Codec | None = None,
        matrices: Sequence[Matrices] = (),
        held_out: HeldOut | None = None,
        all_gather: AllGather = single_rank,
        fast: FastWeights | None = None,
        ahead: RunsAhead | None = None,
    ) -> None:
        self.task = task
        self._ahead = ahead
        self.step = 0
        self.progress = 0.0
        """Estimate of the tokens that all peers have trained on."""
        self.peers = 1.0
        """Number of peers that train, by which own tokens count. Written by the network thread."""
        self.progress_displacement = 0.0
        """Tokens by which exchanges have moved the progress since the start, on balance."""
        self.tokens = 0
        """Tokens that this peer itself has trained on."""
        self.loss = float("nan")
        """Mean training loss of the last complete inner phase."""
        self.ended = False
        self.is_away = False
        """Whether the last inner step found no trainer; it may have returned since the last ``settle``."""
        self.blocked_s = 0.0
        """Seconds the trainer spent on exchanges: applying their results, waiting for them and copying fast weights."""
        self.longest_blocked_s = 0.0
        """Longest of these pauses between two inner steps; time before the first and after the last does not count."""
        self.inner_step_s = 0.0
        """Duration of the last inner step in seconds; 0 before the first."""
        self.changes = 0
        """Count of inner steps and applied deliveries: while it is constant, so is the content of a checkpoint."""
        self._rules = rules
        self._shows_fast = rules.recipe.mix("fast") is not None
        of_gradients = (gradient_codec or codec) if rules.recipe.mix("pseudo_gradient") is not None else None
        lengths = [piece.stop - piece.start for piece in fragments]
        shown: Stream = "fast" if self._shows_fast else "slow"
        self.payloads = Payloads(lengths, codec, of_gradients, matrices, shown, rules.recipe.mixes_at_any_time(shown))
        self._notebook = notebook
        self._clock = clock
        self._held_out = held_out
        self._all_gather = all_gather
        self._inner = 0
        self._blocked_before_s: float | None = None  # ``blocked_s`` at the start of the last inner step
        self._losses = 0.0  # sum of this phase's losses, without those of ``_unread``
        self._unread: list[StepResult] = []  # a card's last losses may be on their way
        self._phase_tokens = 0
        self._due = rules.due
        self._showing: tuple[FastCopy, Sequence[Event]] | None = None
        """Copy of the fast weights that is on its way to partners, and the events that wait for it."""
        self._guard = PhaseGuard()
        self._inner_steps = rules.inner_steps
        """H of the current phase."""
        self._adaptive: AdaptiveRank | None = None
        if of_gradients is not None and is_adaptive(of_gradients):
            self._adaptive = AdaptiveRank(of_gradients.rank, rules.inner_steps)
        feeds_back = of_gradients is not None and is_decodable(of_gradients) and of_gradients.needs_feedback
        late = rules.recipe.uses_late_gradients
        self._weights = Weights(task, fragments, self.payloads, feeds_back, all_gather, late, fast)
        self._weights.publish(self.step)
        self.inbox = Inbox(rules.recipe.follow, self.payloads)

    # --- the trainer thread -----------------------------------------------------------------------------------------

    @property
    def is_ahead(self) -> bool:
        """Whether the trainer already makes the next inner step, so that nobody else may touch the fast weights."""
        return self._ahead is not None and self._ahead.is_ahead

    def advance(self, runs_ahead: bool = False) -> list[Event]:
        """Apply what is ready, make one inner step, and the outer step after H of them; return events for the core.

        With ``runs_ahead``, a trainer in another process begins the step after it, too, unless something else comes
        first: so it need not wait for this one. What is ready then waits for one step more.

        While the recipe waits for partners, or the trainer is replaced, no step is made: call ``settle`` until neither
        ``is_waiting`` nor ``is_away`` is true.
        """
        events = [] if self.is_ahead else self.settle()
        if self.ended or self.is_waiting:
            return events
        if runs_ahead and 0 < self.inner_step_s < AHEAD_S and self._ahead is not None:
            self._ahead.follow_with(self._progress_after(self._ahead))
        started = self._clock()
        if self._blocked_before_s is not None:
            self.longest_blocked_s = max(self.longest_blocked_s, self.blocked_s - self._blocked_before_s)
        self._blocked_before_s = self.blocked_s
        self.changes += 1
        try:
            result = self.task.inner_step(self.progress)
        except TrainerAwayError as away:
            self.is_away = True
            if away.is_torn:
                self._drop_phase("the trainer died while it moved the weights")
            return events
        self.inner_step_s = self._clock() - started
        self.tokens += result.tokens
        self._phase_tokens += result.tokens
        self.progress += result.tokens * self.peers
        self._unread.append(result)
        self._inner += 1
        due = [ExchangeDue()] * self._due.count(self._inner)
        if self._inner >= self._inner_steps:
            return [*events, *self._finish_showing(), *self._end_phase(), *due]
        if not self._shows_fast or not (due or self._is_time_to_show):
            return [*events, *due]
        return [*events, *self._show(due)]

    def _progress_after(self, task: RunsAhead) -> float | None:
        """Return the progress after the next inner step, or None if anything but another inner step follows it."""
        after = self._inner + 1
        shows = self._shows_fast and (self._due.count(after) > 0 or self._shows_after(after))
        if after >= self._inner_steps or shows or self._showing is not None or self.inbox.has_entries:
            return None
        return self.progress + task.tokens_per_step * self.peers

    def settle(self, wait_s: float = 0.0) -> list[Event]:
        """Apply what is ready; wait up to ``wait_s`` seconds for the first entry or for ``inbox.wake``."""
        started, self.is_away = self._clock(), False
        is_due = self._showing is not None and (wait_s > 0 or self._has_arrived(self._showing[0]))
        events = self._finish_showing() if is_due else []  # an idle trainer may wait
        self.blocked_s += self._clock() - started
        started = self._clock()
        deliveries = deque(self.inbox.drain(wait_s))
        started = started if self.is_waiting else self._clock()
        while deliveries:
            ready = deliveries.popleft()
            is_idle = ready is None or (isinstance(ready, RoundFinished) and not self.is_waiting)
            self.changes += not is_idle  # it only wakes the trainer, or ends a wait that has ended
            if not is_idle:
                events += self._finish_showing()  # what is shown next must contain it
            match ready:
                case Displacement():
                    events.append(self._apply(ready))
                case RoundFinished():
                    events.extend(self._proceed(ready))
                case Adoption():
                    events.extend(self._adopt(ready, deliveries))
            self.blocked_s += self._clock() - started
            started = self._clock()
        return events

    @property
    def slow(self) -> Tensor:
        """Slow weights, [P], a copy."""
        return self._weights.slow

    def at_slow(self, tell: Callable[[], T]) -> T:
        """Return the result of ``tell`` with the slow weights, which exports hold, as the fast ones."""
        if not self._inner and not self.is_waiting:  # the fast weights are the slow ones
            return tell()
        return self._weights.try_on([state.slow for state in self._weights.states], tell)

    @property
    def is_waiting(self) -> bool:
        """Whether the inner phase is over and the recipe needs its partners' shares before the next one."""
        return self._weights.phase is not None

    def _end_phase(self) -> list[Event]:
        self._read_losses()
        self.loss = self._losses / self._inner
        self._inner, self._losses = 0, 0.0
        recipe, rule, weights = self._rules.recipe, self._rules.outer, self._weights
        faulty = recipe.outer != "hand_over" and self._is_faulty()
        if not recipe.blocks and self.payloads.streams == 1:
            weights.step(recipe, rule, faulty)
            return self._restart()
        if self._adaptive is not None and (rank := weights.late_rank()):
            self._adapt(self._adaptive, rank)
        phase = OuterPhase.begin(recipe, rule, weights.states, list(weights.fast), faulty, weights.late)
        if not recipe.blocks:
            return self._restart(phase)
        self._weights.phase = phase
        self._weights.publish(self.step, phase)
        return [PhaseDone(self.step + 1, self.progress)]

    def _adapt(self, adaptive: AdaptiveRank, effective_rank: float) -> None:
        """Choose rank and H of the next phase by the average that this outer step uses."""
        adaptive.follow(effective_rank)
        self.payloads.rank, self._inner_steps = adaptive.rank, adaptive.inner_steps

    def _read_losses(self) -> None:
        for result in self._unread:
            self._losses += result.loss
        self._unread.clear()

    def _proceed(self, ready: RoundFinished) -> list[Event]:
        phase = self._weights.phase
        return [] if phase is None or ready.step != self.step + 1 else self._restart(phase)

    def _restart(self, phase: OuterPhase | None = None) -> list[Event]:
        """Conclude the outer step, unless that has been done: the next inner phase begins at the slow weights."""
        if phase is not None:
            self._weights.conclude(phase)
        self.step += 1
        if self._rules.recipe.outer != "hand_over" or self._rules.recipe.exchanges:
            self._weights.reset_fast()
            self._guard.begin()
        self._weights.publish(self.step, phase)
        events: list[Event] = [OuterStepDone(self.step, self.progress, self._phase_tokens)]
        self._phase_tokens = 0
        if self.progress >= self._rules.run_tokens:
            self.ended = True
            events.append(TrainingEnded(self.step, self.progress))
        return events

    @property
    def _is_time_to_show(self) -> bool:
        return self._shows_after(self._inner)

    def _shows_after(self, inner: int) -> bool:
        steps = self._rules.inner_steps
        return inner * SHOWINGS // steps > (inner - 1) * SHOWINGS // steps

    def _show(self, due: Sequence[Event] = ()) -> list[Event]:
        """Copy the current fast weights for partners; publish them, from a card once the copy has arrived.

        Exchanges that are ``due`` get these weights: whatever publishes them returns the events.
        """
        started = self._clock()
        events = self._finish_showing()
        self._showing = self._weights.copy_fast(), due
        if self._has_arrived(self._showing[0]):
            events += self._finish_showing()
        self.blocked_s += self._clock() - started
        return events

    def _has_arrived(self, copy: FastCopy) -> bool:
        """Return whether the copies of all ranks have arrived, so that all ranks publish them at one step."""
        here = torch.tensor([copy.is_complete], dtype=torch.int64)
        return bool(self._all_gather("the arrival of copied weights", here).all())

    def _finish_showing(self) -> list[Event]:
        """Wait for the copy that is on its way, if there is one, and publish it unless the inner phase has failed.

        Return the events that wait for it.
        """
        if self._showing is None:
            return []
        (copy, due), self._showing = self._showing, None
        if self._guard.fault_so_far(self._weights.distance_of(copy)) is None:
            self._weights.publish_fast(self.step, copy.parts)
        return list(due)

    def _drop_phase(self, why: str) -> None:
        """Begin this inner phase again at the slow weights, with a new optimizer; its tokens count all the same."""
        self._notebook.note("discarded", step=self.step + 1, why=why)
        self._inner, self._losses = 0, 0.0
        self._unread.clear()
        self._weights.reset_fast()
        self._guard.begin()
        self.task.reset(REWARM_STEPS)

    def _is_faulty(self) -> bool:
        """Check the whole pseudo-gradient; a faulty inner phase is dropped and theta returns to x."""
        fault = self._guard.fault(self._weights.distance())
        if fault is not None:
            self._notebook.note("discarded", step=self.step + 1, why=fault)
        return fault is not None

    def _apply(self, ready: Displacement) -> Applied:
        commit = ready.commit
        weights, recipe = self._weights, self._rules.recipe
        ahead = torch.zeros(len(weights.states), dtype=torch.float64)
        for piece, part in zip(ready.difference.fragments, ready.difference.parts, strict=True):
            stream, fragment = self.payloads.place(piece)
            if stream == "pseudo_gradient":
                weights.remember_left_out(fragment, ready.difference.mine, piece)
            displacement_ = displacement(part, commit.share, commit.clip_radius, self._weights.buffer(part))
            if weights.phase is not None and stream in recipe.blocking:
                weights.phase.take(stream, fragment, displacement_)
            elif stream == "slow":
                weights.move(fragment, displaced(weights.state(fragment), displacement_), displacement_, ready.serial)
            elif stream == "fast":
                ahead[fragment] = self._move_fast(fragment, displacement_, ready)
            elif ready.difference.mine.step != self.step:
                continue  # belongs to an earlier step: too late
            elif recipe.uses_late_gradients:
                weights.mix_late(fragment, displacement_)
            elif recipe.weights_mix is not None:
                weights.keep(fragment, late_momentum(weights.state(fragment), displacement_))
            else:
                late = late_pseudo_gradient(weights.state(fragment), displacement_, self._rules.outer)
                weights.move(fragment, *late, ready.serial)
        if self._shows_fast:
            for norm in self._all_gather("the length of a displacement", ahead).tolist():
                self._guard.added(norm)
        self.payloads.settle(ready.serial)
        self.progress += commit.progress_displacement
        self.progress_displacement += commit.progress_displacement
        return Applied(commit.link, self.progress)

    def _move_fast(self, fragment: int, displacement_: Tensor, ready: Displacement) -> float:
        """Displace a fragment's fast weights, and its slow weights by the share ``ready.follow`` of it.

        After the run's end no later phase can deliver the rest: theta is x, and moves as x does on both sides. Return
        the L2 norm by which theta moved further than x.
        """
        moved = displacement_
        if ready.follow != 1.0:
            moved = torch.mul(displacement_, ready.follow, out=self._weights.buffer(displacement_))
        taken = moved if self.ended else displacement_
        self._weights.move_fast(fragment, taken, moved, ready.serial)
        return l2_distance(taken, moved)

    def _adopt(self, ready: Adoption, later: deque[Delivery]) -> list[Event]:
        """Replace the weights by a donor's. Work based on the old ones is dropped, with the ``later`` deliveries; its
        fragments become free.

        After the run's end nothing is adopted: a peer that reached the end while it downloaded has announced it, and
        its weights are averaged.
        """
        if self.ended:
            return [Unfit(ready.link, "the run's end came first")]
        if why := self._why_unfit(ready):
            return [Unfit(ready.link, why)]
        stale = self.inbox.drop(tuple(later))
        later.clear()
        self._weights.replace(ready.weights)
        self.payloads.forget_fits()
        self._guard.forget()
        self.step = ready.step
        self.progress = ready.progress
        self._inner, self._losses, self._phase_tokens = 0, 0.0, 0
        self._unread.clear()
        self.ended = self.progress >= self._rules.run_tokens
        self._weights.publish(self.step)
        self.task.reset(REWARM_STEPS)
        events: list[Event] = [Applied(link, self.progress) for link in stale]
        events.append(Adopted(ready.link, self.step, self.progress))
        return [*events, TrainingEnded(self.step, self.progress)] if self.ended else events

    def _why_unfit(self, ready: Adoption) -> str:
        """Say why a donor's weights are rejected, by this peer's held-out text; return an empty string if they are not.

        Most peers have to join the swarm even if they are slightly better, so only weights that do worse than guessing
        and than ours are rejected, unless this peer was left behind and trains (``events.Adopt``).
        """
        if self._held_out is None:
            return ""
        try:
            theirs = self._weights.try_on(ready.weights, self._held_out.loss)
        except TrainerAwayError:
            return "no trainer is there to try them"
        guessing = self._held_out.guessing
        if theirs <= guessing and not ready.left_behind:  # NaN is worse
            return ""
        try:
            ours = self._held_out.loss()
        except TrainerAwayError:
            return "no trainer is there to try ours"
        if theirs < ours or (theirs == ours and not ready.left_behind):
            return ""
        if theirs <= guessing:
            return f"its weights do worse than ours: held-out loss {theirs:.3f}, ours {ours:.3f}"
        return f"its weights do worse than guessing: held-out loss {theirs:.3f}"

    # --- checkpoints (trainer thread) ---------------------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Saved], dict[str, Any]]:
        """Return everything that a resumed peer needs: tensors, views of live memory, and JSON values."""
        self._read_losses()
        tensors: dict[str, Saved] = {
            **self._weights.state_dict(),
            **{f"task.{name}": tensor for name, tensor in self.task.state_dict().items()},
        }
        numbers = {
            "step": self.step,
            "inner_step": self._inner,
            "inner_losses": self._losses if math.isfinite(self._losses) else 0.0,  # JSON has no NaN; only displayed
            "progress": self.progress,
            "tokens": self.tokens,
            "phase_tokens": self._phase_tokens,
            **self._guard.state_dict(),
            "ended": self.ended,
            **({"effective_ranks": list(self._adaptive.effective_ranks)} if self._adaptive is not None else {}),
        }
        return tensors, numbers

    def load_state_dict(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Restore the result of ``state_dict``. Raises KeyError or ValueError if it does not fit."""
        self.restore(tensors, numbers)
        self.show_restored()

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Do the part of ``load_state_dict`` that needs no other rank. Raises KeyError or ValueError."""
        self._showing = None
        self._weights.load_state_dict(tensors)
        self.task.load_state_dict(
            {name.removeprefix("task."): tensor for name, tensor in tensors.items() if name.startswith("task.")}
        )
        self.step, self.progress, self.tokens = numbers["step"], numbers["progress"], numbers["tokens"]
        self._phase_tokens = numbers["phase_tokens"]
        self._unread.clear()
        self._inner, self._losses, self.ended = numbers["inner_step"], numbers["inner_losses"], numbers["ended"]
        self._guard.load_state_dict(numbers)
        if self._adaptive is not None:
            self._adaptive.resume(numbers["effective_ranks"])
            self.payloads.rank, self._inner_steps = self._adaptive.rank, self._adaptive.inner_steps
        self._weights.publish(self.step)

    def show_restored(self) -> None:
        """Show partners the restored fast weights, a collective of a team's ranks."""
        if self._shows_fast:
            self._show()
            self._finish_showing()
            self.payloads.predict_widths(())  # the saved part of this phase does not show how far others are now
