"""One learner: where its inner phase and its run stand, and when its weights move.

Two threads meet here and share no lock. The trainer thread calls ``advance`` and ``settle``, and is the only one that
writes. Any thread uses ``payloads``, which reads the snapshot that was published last, and calls ``deliver``,
``proceed`` and ``adopt``: what the network has for the trainer goes through a queue (``train.inbox``) and is applied
between two inner steps. So the trainer waits for the network only where its recipe says so. How weights move, and what
partners get of them, is ``train.weights``.

Legend: P parameters (padded).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from queue import Empty
from typing import Any

from torch import Tensor

from p2ptrain.base.ids import LinkId
from p2ptrain.codec import Codec, Matrices, needs_feedback
from p2ptrain.outer import displaced, displacement, l2_distance, late_momentum, late_pseudo_gradient
from p2ptrain.ports import Clock, HeldOut, InnerTask, Notebook
from p2ptrain.swarm import Terms
from p2ptrain.swarm.events import Adopted, Applied, Event, ExchangeDue, OuterStepDone, PhaseDone, TrainingEnded, Unfit
from p2ptrain.train.guard import PhaseGuard
from p2ptrain.train.inbox import Adoption, Displacement, Inbox, RoundFinished
from p2ptrain.train.outer_phase import OuterPhase
from p2ptrain.train.payloads import Difference, Payloads
from p2ptrain.train.rules import LearnerRules
from p2ptrain.train.weights import Weights

REWARM_STEPS = 20
"""Inner steps over which the inner optimizer warms up again after its weights were replaced. A guess: AdamW's second
moment (beta2 .95 to .999) needs tens to hundreds of steps; the step size is bounded from the first by its bias
correction."""

SHOWINGS = 4
"""So many times in a phase, its end included, partners get newer weights where the recipe mixes the fast ones, and once
more wherever an exchange falls due. Each is a copy of the model to the CPU; docs/LOG.md has what their age costs."""


class Learner:
    """Trains by the outer algorithm and takes in what exchanges yield.

    Args:
        task: the inner optimization; its ``theta`` [P] becomes the initial slow weights.
        rules: H, the end, the outer rule.
        fragments: slices of [0, P), one a fragment.
        codec: for the weights in exchanges.
        gradient_codec: for pseudo-gradients; None: the same.
        matrices: that lie in each fragment (``rules.matrices_of``); none at all: nothing is known of them.
        notebook: told of discarded inner phases.
        clock: measures what the network costs the trainer.
        held_out: donors' weights are tried on it before they replace ours; None: they are taken unseen.
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
    ) -> None:
        self.task = task
        self.step = 0
        self.progress = 0.0
        self.tokens = 0
        """Tokens this peer itself trained on."""
        self.loss = float("nan")
        """Mean training loss of the last complete inner phase."""
        self.ended = False
        self.blocked_s = 0.0
        """Seconds the trainer spent on exchanges: on what they brought, and on showing fast weights."""
        self.longest_blocked_s = 0.0
        """The most of them between two inner steps. What comes before the first and after the last holds nobody up."""
        self.inner_step_s = 0.0
        """Seconds that the last inner step took; 0 before the first."""
        self.changes = 0
        """Inner steps made and deliveries taken in: while it stays, so does what a checkpoint holds."""
        self._rules = rules
        self._shows_fast = rules.recipe.mix("fast") is not None
        of_gradients = (gradient_codec or codec) if rules.recipe.mix("pseudo_gradient") is not None else None
        lengths = [piece.stop - piece.start for piece in fragments]
        self.payloads = Payloads(lengths, codec, of_gradients, matrices, "fast" if self._shows_fast else "slow")
        self._notebook = notebook
        self._clock = clock
        self._held_out = held_out
        self._inner = 0
        self._blocked_before_s: float | None = None  # ``blocked_s`` at the last inner step's beginning
        self._losses = 0.0
        self._phase_tokens = 0
        self._due = rules.due
        self._guard = PhaseGuard()
        feeds_back = of_gradients is not None and needs_feedback(of_gradients)
        self._weights = Weights(task, fragments, self.payloads, feeds_back)
        self._weights.publish(self.step)
        self._inbox = Inbox(rules.recipe.follow)

    # --- the trainer thread -----------------------------------------------------------------------------------------

    def advance(self) -> list[Event]:
        """Apply what is ready, then one inner step; after H of them the outer step. What the core must hear of it.

        While the recipe waits for partners no step is made: call ``settle`` until ``is_waiting`` is over.
        """
        events = self.settle()
        if self.ended or self.is_waiting:
            return events
        started = self._clock()
        if self._blocked_before_s is not None:
            self.longest_blocked_s = max(self.longest_blocked_s, self.blocked_s - self._blocked_before_s)
        self._blocked_before_s = self.blocked_s
        self.changes += 1
        result = self.task.inner_step(self.progress)
        self.inner_step_s = self._clock() - started
        self.tokens += result.tokens
        self._phase_tokens += result.tokens
        self.progress += result.tokens
        self._losses += result.loss
        self._inner += 1
        due = [ExchangeDue()] * self._due.count(self._inner)
        if self._inner == self._rules.inner_steps:
            return [*events, *self._end_phase(), *due]
        if self._shows_fast and (due or self._is_time_to_show):
            self._show()
        return [*events, *due]

    def settle(self, wait_s: float = 0.0) -> list[Event]:
        """Apply what is ready; with ``wait_s``, wait that long for the first of it, or for ``wake``."""
        events: list[Event] = []
        started = self._clock()
        try:
            ready = self._inbox.take(wait_s)
            started = started if self.is_waiting else self._clock()
            while True:
                self.changes += ready is not None  # which is a ``wake``
                match ready:
                    case Displacement():
                        events.append(self._apply(ready))
                    case RoundFinished():
                        events.extend(self._proceed(ready))
                    case Adoption():
                        events.extend(self._adopt(ready))
                self.blocked_s += self._clock() - started
                started = self._clock()
                ready = self._inbox.take()
        except Empty:
            return events

    def wake(self) -> None:
        """End a waiting ``settle``. From any thread, and from a signal handler."""
        self._inbox.wake()

    @property
    def slow(self) -> Tensor:
        """[P] the slow weights, a copy."""
        return self._weights.slow

    @property
    def is_waiting(self) -> bool:
        """The inner phase is over, and the recipe wants its partners' shares before the next one begins."""
        return self._weights.phase is not None

    def _end_phase(self) -> list[Event]:
        self.loss = self._losses / self._inner
        self._inner, self._losses = 0, 0.0
        recipe, thetas = self._rules.recipe, self._weights.fast
        faulty = recipe.outer != "hand_over" and self._is_faulty(thetas)
        phase = OuterPhase.begin(recipe, self._rules.outer, self._weights.states, thetas, faulty)
        if not recipe.blocks:
            return self._restart(phase)
        self._weights.phase = phase
        self._weights.publish(self.step, phase)
        return [PhaseDone(self.step + 1, self.progress)]

    def _proceed(self, ready: RoundFinished) -> list[Event]:
        phase = self._weights.phase
        return [] if phase is None or ready.step != self.step + 1 else self._restart(phase)

    def _restart(self, phase: OuterPhase) -> list[Event]:
        """Conclude the outer step: the next inner phase begins at the slow weights."""
        self._weights.conclude(phase)
        self.step += 1
        if self._rules.recipe.outer != "hand_over" or self._rules.recipe.exchanges:
            self._weights.reset_fast()
            self._guard.begin()
        self._weights.publish(self.step, phase)
        events: list[Event] = [OuterStepDone(self.step, self.progress, self._phase_tokens)]
        self._phase_tokens = 0
        if self.progress >= self._rules.tokens_per_peer:
            self.ended = True
            events.append(TrainingEnded(self.step, self.progress))
        return events

    @property
    def _is_time_to_show(self) -> bool:
        inner, steps = self._inner, self._rules.inner_steps
        return inner * SHOWINGS // steps > (inner - 1) * SHOWINGS // steps

    def _show(self) -> None:
        """Let partners have the fast weights as they are now, unless this inner phase has gone wrong."""
        started = self._clock()
        fast = self._weights.copy_fast()
        if self._guard.fault_so_far(self._weights.distance(fast)) is None:
            self._weights.publish_fast(self.step, fast)
        self.blocked_s += self._clock() - started

    def _is_faulty(self, thetas: Sequence[Tensor]) -> bool:
        """Judge the whole pseudo-gradient; a faulty inner phase is dropped and theta goes back to x."""
        fault = self._guard.fault(self._weights.distance(thetas))
        if fault is not None:
            self._notebook.note("discarded", step=self.step + 1, why=fault)
        return fault is not None

    def _apply(self, ready: Displacement) -> Applied:
        weights, recipe = self._weights, self._rules.recipe
        for piece, part in zip(ready.difference.fragments, ready.difference.parts, strict=True):
            stream, fragment = self.payloads.place(piece)
            if stream == "pseudo_gradient":
                weights.remember_left_out(fragment, ready.difference.mine, piece)
            displacement_ = displacement(part, ready.share, ready.clip_radius)
            if weights.phase is not None and stream in recipe.blocking:
                weights.phase.take(stream, fragment, displacement_)
            elif stream == "slow":
                weights.move(fragment, displaced(weights.state(fragment), displacement_), displacement_)
            elif stream == "fast":
                self._move_fast(fragment, displacement_, ready.follow)
            elif ready.difference.mine.step != self.step:
                continue  # of a step that is over: it comes too late
            elif recipe.weights_mix is not None:
                weights.keep(fragment, late_momentum(weights.state(fragment), displacement_))
            else:
                late = late_pseudo_gradient(weights.state(fragment), displacement_, self._rules.outer)
                weights.move(fragment, *late)
        self.progress += ready.progress
        return Applied(ready.link, self.progress)

    def _move_fast(self, fragment: int, displacement_: Tensor, follow: float) -> None:
        """Displace a fragment's fast weights, and its slow weights by this share of it.

        After the end there is no phase left that could bring the rest: theta is x, and moves as x does on both sides.
        """
        moved = displacement_ if follow == 1.0 else displacement_ * follow
        taken = moved if self.ended else displacement_
        self._weights.move_fast(fragment, taken, moved)
        self._guard.added(l2_distance(taken, moved))

    def _adopt(self, ready: Adoption) -> list[Event]:
        """Replace the weights. What was computed against the old ones is dropped; its fragments become free.

        Not after the end: whoever trained on while it pulled, and came to the end, has said so, and is averaged.
        """
        if self.ended:
            return [Unfit(ready.link, "the run's end came first")]
        if (loss := self._loss_if_worthless(ready.weights)) is not None:
            return [Unfit(ready.link, f"its weights do worse than guessing: held-out loss {loss:.3f}")]
        self._weights.replace(ready.weights)
        self.payloads.begin_anew()
        self._guard.forget()
        self.step, self.progress = ready.step, ready.progress
        self._inner, self._losses, self._phase_tokens = 0, 0.0, 0
        self.ended = self.progress >= self._rules.tokens_per_peer
        self._weights.publish(self.step)
        self.task.reset(REWARM_STEPS)
        events: list[Event] = [Applied(link, self.progress) for link in self._inbox.drop()]
        events.append(Adopted(ready.link, self.step, self.progress))
        return [*events, TrainingEnded(self.step, self.progress)] if self.ended else events

    def _loss_if_worthless(self, weights: Sequence[Tensor]) -> float | None:
        """The held-out loss of a donor's weights where they do worse than guessing, and than ours.

        Only what is worth nothing is refused: where we stood before may be better than where the swarm is now, by a
        little, and it is the swarm all the same.
        """
        if self._held_out is None:
            return None
        theirs = self._weights.try_on(weights, self._held_out.loss)
        if theirs <= self._held_out.guessing or theirs <= self._held_out.loss():  # NaN is neither
            return None
        return theirs

    # --- any thread -------------------------------------------------------------------------------------------------

    def deliver(self, link: LinkId, difference: Difference, mine: Terms, theirs: Terms, progress: float) -> None:
        """Queue a committed exchange's displacement for the trainer, with what it adds to progress."""
        self._inbox.deliver(link, difference, mine, theirs, progress)

    def proceed(self, step: int) -> None:
        """Let a trainer that waits at this outer step go on, with what was delivered before."""
        self._inbox.proceed(step)

    def adopt(self, link: LinkId, step: int, progress: float, parts: Sequence[bytes | bytearray]) -> None:
        """Queue a donor's weights, as ``payloads.check_weights`` passed them, for the trainer to replace its own."""
        self._inbox.adopt(link, step, progress, parts)

    # --- checkpoints (trainer thread) ---------------------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that a resumed peer goes on from: tensors, and readable numbers."""
        tensors = {
            **self._weights.state_dict(),
            **{f"task.{name}": tensor for name, tensor in self.task.state_dict().items()},
        }
        numbers = {
            "step": self.step,
            "inner_step": self._inner,
            "inner_losses": self._losses if math.isfinite(self._losses) else 0.0,  # JSON has no NaN; it is only shown
            "progress": self.progress,
            "tokens": self.tokens,
            "phase_tokens": self._phase_tokens,
            **self._guard.state_dict(),
            "ended": self.ended,
        }
        return tensors, numbers

    def load_state_dict(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Inverse of ``state_dict``. Raises KeyError or ValueError where it does not fit."""
        self._weights.load_state_dict(tensors)
        self.task.load_state_dict(
            {name.removeprefix("task."): tensor for name, tensor in tensors.items() if name.startswith("task.")}
        )
        self.step, self.progress, self.tokens = numbers["step"], numbers["progress"], numbers["tokens"]
        self._phase_tokens = numbers["phase_tokens"]
        self._inner, self._losses, self.ended = numbers["inner_step"], numbers["inner_losses"], numbers["ended"]
        self._guard.load_state_dict(numbers)
        self._weights.publish(self.step)
        if self._shows_fast:
            self._show()
            self.payloads.foresee(())  # how far others are now, this phase's part that was saved does not tell
