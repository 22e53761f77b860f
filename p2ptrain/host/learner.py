"""Learner: one peer's place in its run, inner steps one after another, and when its weights move.

``advance`` and ``settle`` belong to the thread that asks the trainer for inner steps, the only writer. Any thread may
use ``payloads``, which reads the last published snapshot, and fill ``inbox``, which is emptied between two inner steps.
So training waits for the network only where its recipe requires it. ``HostState`` defines how weights move.

Legend: P parameters (padded).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from p2ptrain.base.errors import TrainerAwayError
from p2ptrain.codec import Codec, Matrices
from p2ptrain.host.inbox import Adoption, Delivery, Displacement, Inbox, RoundFinished
from p2ptrain.host.payloads import Payloads
from p2ptrain.host.rules import LearnerRules
from p2ptrain.host.state import HostState
from p2ptrain.ports import Clock, HeldOut, InnerTask, Notebook, RemoteInnerTask
from p2ptrain.recipes import Stream
from p2ptrain.swarm.events import Adopted, Applied, Event, ExchangeDue, OuterStepDone, PhaseDone, TrainingEnded, Unfit

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
exchange adds one. Each is a copy of the model. Guess: the loss with other numbers of copies per phase would settle
it."""


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
        remote: the task, if it is in another process.
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
        remote: RemoteInnerTask | None = None,
    ) -> None:
        self.task = task
        self._remote = remote
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
        self._due = rules.due
        self._shows_fast = rules.recipe.mix("fast") is not None
        of_gradients = (gradient_codec or codec) if rules.recipe.mix("pseudo_gradient") is not None else None
        lengths = [piece.stop - piece.start for piece in fragments]
        shown: Stream = "fast" if self._shows_fast else "slow"
        self.payloads = Payloads(lengths, codec, of_gradients, matrices, shown, rules.recipe.mixes_at_any_time(shown))
        self._clock = clock
        self._held_out = held_out
        self._inner = 0
        self._blocked_before_s: float | None = None  # ``blocked_s`` at the start of the last inner step
        self._losses = 0.0  # sum of this phase's losses
        self._phase_tokens = 0
        self.state = HostState(task, rules, fragments, self.payloads, of_gradients, notebook, remote)
        self.inbox = Inbox(rules.recipe.follow, self.payloads)

    # --- inner steps --------------------------------------------------------------------------------------------------

    @property
    def is_ahead(self) -> bool:
        """Whether the trainer already makes the next inner step, so that nobody else may touch the fast weights."""
        return self._remote is not None and self._remote.is_ahead

    @property
    def is_waiting(self) -> bool:
        """Whether the inner phase is over and the recipe needs its partners' shares before the next one."""
        return self.state.phase is not None

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
        if runs_ahead and 0 < self.inner_step_s < AHEAD_S and self._remote is not None:
            self._remote.follow_with(self._progress_after(self._remote))
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
                self._restart_phase("the trainer died while it moved the weights")
            return events
        self.inner_step_s = self._clock() - started
        self.tokens += result.tokens
        self._phase_tokens += result.tokens
        self.progress += result.tokens * self.peers
        self._losses += result.loss
        self._inner += 1
        due = [ExchangeDue()] * self._due.count(self._inner)
        if self._inner >= self.state.inner_steps:
            events += self._end_phase()
        elif self._shows_after(self._inner):
            started = self._clock()
            self.state.show(self.step)
            self.blocked_s += self._clock() - started
        return [*events, *due]

    def _progress_after(self, task: RemoteInnerTask) -> float | None:
        """Return the progress after the next inner step, or None if anything but another inner step follows it."""
        after = self._inner + 1
        if after >= self.state.inner_steps or self._shows_after(after) or self.inbox.has_entries:
            return None
        return self.progress + task.tokens_per_step * self.peers

    def _shows_after(self, inner: int) -> bool:
        """Return whether partners get the fast weights of this inner step."""
        steps = self._rules.inner_steps
        is_quarter = inner * SHOWINGS // steps > (inner - 1) * SHOWINGS // steps
        return self._shows_fast and (is_quarter or self._due.count(inner) > 0)

    def _end_phase(self) -> list[Event]:
        self.loss = self._losses / self._inner
        self._inner, self._losses = 0, 0.0
        self.state.end_phase(self.step)
        return [PhaseDone(self.step + 1, self.progress)] if self.is_waiting else self._end_outer_step()

    def _restart_phase(self, why: str) -> None:
        """Begin this inner phase again at the slow weights, with a new optimizer; its tokens count all the same."""
        self.state.restart_phase(self.step, why)
        self._inner, self._losses = 0, 0.0
        self.task.reset(REWARM_STEPS)

    def _end_outer_step(self) -> list[Event]:
        self.step += 1
        events: list[Event] = [OuterStepDone(self.step, self.progress, self._phase_tokens)]
        self._phase_tokens = 0
        if self.progress >= self._rules.run_tokens:
            self.ended = True
            events.append(TrainingEnded(self.step, self.progress))
        return events

    # --- deliveries ---------------------------------------------------------------------------------------------------

    def settle(self, wait_s: float = 0.0) -> list[Event]:
        """Apply what is ready; wait up to ``wait_s`` seconds for the first entry or for ``inbox.wake``."""
        events: list[Event] = []
        self.is_away = False
        started = self._clock()
        deliveries = deque(self.inbox.drain(wait_s))
        started = started if self.is_waiting else self._clock()
        while deliveries:
            ready = deliveries.popleft()
            is_idle = ready is None or (isinstance(ready, RoundFinished) and not self.is_waiting)
            self.changes += not is_idle  # it only wakes the trainer, or ends a wait that has ended
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

    def _apply(self, ready: Displacement) -> Applied:
        self.state.apply(ready, self.step, self.ended)
        self.payloads.settle(ready.serial)
        self.progress += ready.commit.progress_displacement
        self.progress_displacement += ready.commit.progress_displacement
        return Applied(ready.commit.link, self.progress)

    def _proceed(self, ready: RoundFinished) -> list[Event]:
        if not self.is_waiting or ready.step != self.step + 1:
            return []
        self.state.proceed(self.step)
        return self._end_outer_step()

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
        self.state.adopt(ready.weights, ready.step)
        self.step = ready.step
        self.progress = ready.progress
        self._inner, self._losses, self._phase_tokens = 0, 0.0, 0
        self.ended = self.progress >= self._rules.run_tokens
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
            theirs = self.state.try_on(ready.weights, self._held_out.loss)
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

    # --- exports and checkpoints --------------------------------------------------------------------------------------

    @property
    def slow(self) -> Tensor:
        """Slow weights, [P], a copy."""
        return self.state.slow

    def at_slow(self, tell: Callable[[], T]) -> T:
        """Return the result of ``tell`` with the slow weights, which exports hold, as the fast ones."""
        is_between = not self._inner and not self.is_waiting  # the fast weights are the slow ones
        return tell() if is_between else self.state.at_slow(tell)

    def state_dict(self) -> tuple[dict[str, Saved], dict[str, Any]]:
        """Return everything that a resumed peer needs: tensors, views of live memory, and JSON values."""
        tensors, numbers = self.state.state_dict()
        tensors |= {f"task.{name}": tensor for name, tensor in self.task.state_dict().items()}
        return tensors, {
            "step": self.step,
            "inner_step": self._inner,
            "inner_losses": self._losses if math.isfinite(self._losses) else 0.0,  # JSON has no NaN; only displayed
            "progress": self.progress,
            "tokens": self.tokens,
            "phase_tokens": self._phase_tokens,
            "ended": self.ended,
            **numbers,
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Restore the result of ``state_dict``. Raises KeyError or ValueError if it does not fit."""
        self.state.load_state_dict(tensors, numbers, numbers["step"])
        self.task.load_state_dict(
            {name.removeprefix("task."): tensor for name, tensor in tensors.items() if name.startswith("task.")}
        )
        self.step, self.progress, self.tokens = numbers["step"], numbers["progress"], numbers["tokens"]
        self._phase_tokens = numbers["phase_tokens"]
        self._inner, self._losses, self.ended = numbers["inner_step"], numbers["inner_losses"], numbers["ended"]
        if self._shows_fast:
            self.state.show(self.step)
            self.payloads.predict_widths(())  # the saved part of this phase does not show how far others are now
