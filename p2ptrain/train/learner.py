"""One learner: the inner task, the slow and the fast weights, and what exchanges bring to both.

Two threads meet here and share no lock. The trainer thread calls ``advance`` and ``settle``, and is the only one that
writes. Any thread uses ``payloads``, which reads the snapshot that was published last, and calls ``deliver``,
``proceed`` and ``adopt``: what the network has for the trainer goes through a queue and is applied between two inner
steps. So the trainer waits for the network only where its recipe says so.

Legend: P parameters (padded), F elements of one fragment.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from p2ptrain.codec import Codec, Matrices, is_decodable, needs_feedback
from p2ptrain.ids import LinkId
from p2ptrain.outer import (
    OuterState,
    displaced,
    displacement,
    initial_state,
    l2_norm,
    late_momentum,
    late_pseudo_gradient,
    pseudo_gradient,
    share,
)
from p2ptrain.ports import Clock, InnerTask, Notebook
from p2ptrain.swarm import PeerState, Terms
from p2ptrain.swarm.events import Adopted, Applied, Event, ExchangeDue, OuterStepDone, PhaseDone, TrainingEnded
from p2ptrain.train.guard import PhaseGuard
from p2ptrain.train.outer_phase import OuterPhase
from p2ptrain.train.payloads import Difference, Encoded, Payloads, Snapshot
from p2ptrain.train.rules import LearnerRules

REWARM_STEPS = 20
"""Inner steps over which the inner optimizer warms up again after its weights were replaced. A guess: AdamW's second
moment (beta2 .95 to .999) needs tens to hundreds of steps; the step size is bounded from the first by its bias
correction."""


SHOWINGS = 4
"""So many times in a phase, its end included, partners get newer weights where the recipe mixes the fast ones, and once
more wherever an exchange falls due. Each is a copy of the model to the CPU; docs/LOG.md has what their age costs."""


@dataclass(frozen=True, slots=True)
class _Displacement:
    link: LinkId
    difference: Difference
    share: float
    follow: float
    clip_radius: float
    progress: float


@dataclass(frozen=True, slots=True)
class _Proceed:
    step: int


@dataclass(frozen=True, slots=True)
class _Adoption:
    link: LinkId
    step: int
    progress: float
    weights: tuple[Tensor, ...]  # [F] fp32 each


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
        self._rules = rules
        self._slices = tuple(fragments)
        mixes_gradients = rules.recipe.mix("pseudo_gradient") is not None
        lengths = [piece.stop - piece.start for piece in self._slices]
        self._shows_fast = rules.recipe.mix("fast") is not None
        self.payloads = Payloads(
            lengths,
            codec,
            (gradient_codec or codec) if mixes_gradients else None,
            matrices,
            "fast" if self._shows_fast else "slow",
        )
        self._notebook = notebook
        self._clock = clock
        self._inner = 0
        self._losses = 0.0
        self._phase_tokens = 0
        self._due = rules.due
        self._guard = PhaseGuard()
        self._states = tuple(initial_state(task.theta[piece].cpu()) for piece in self._slices)
        self._left_out: list[Tensor] = []
        """[F] each: what messages of pseudo-gradients left out so far, where the codec needs that fed back."""
        if mixes_gradients and needs_feedback(gradient_codec or codec):
            self._left_out = [torch.zeros_like(state.slow) for state in self._states]
        self._phase: OuterPhase | None = None
        """The outer step under way, while the recipe waits for partners."""
        self.payloads.publish(self._snapshot())
        self._inbox: SimpleQueue[_Displacement | _Proceed | _Adoption | None] = SimpleQueue()  # None only wakes

    # --- the trainer thread -----------------------------------------------------------------------------------------

    def advance(self) -> list[Event]:
        """Apply what is ready, then one inner step; after H of them the outer step. What the core must hear of it.

        While the recipe waits for partners no step is made: call ``settle`` until ``is_waiting`` is over.
        """
        events = self.settle()
        if self.ended or self.is_waiting:
            return events
        result = self.task.inner_step(self.progress)
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
            ready = self._inbox.get(timeout=wait_s) if wait_s > 0 else self._inbox.get_nowait()
            started = started if self.is_waiting else self._clock()
            while True:
                match ready:
                    case _Displacement():
                        events.append(self._apply(ready))
                    case _Proceed():
                        events.extend(self._proceed(ready))
                    case _Adoption():
                        events.extend(self._adopt(ready))
                self.blocked_s += self._clock() - started
                started = self._clock()
                ready = self._inbox.get_nowait()
        except Empty:
            return events

    def wake(self) -> None:
        """End a waiting ``settle``. From any thread, and from a signal handler."""
        self._inbox.put(None)

    @property
    def slow(self) -> Tensor:
        """[P] the slow weights, a copy."""
        return torch.cat([state.slow for state in self._states])

    @property
    def is_waiting(self) -> bool:
        """The inner phase is over, and the recipe wants its partners' shares before the next one begins."""
        return self._phase is not None

    def _end_phase(self) -> list[Event]:
        self.loss = self._losses / self._inner
        self._inner, self._losses = 0, 0.0
        recipe, rule = self._rules.recipe, self._rules.outer
        thetas = [self.task.theta[piece].cpu() for piece in self._slices]
        faulty = recipe.outer != "hand_over" and self._is_faulty(thetas)
        phase = OuterPhase.begin(recipe, rule, self._states, thetas, faulty)
        if not recipe.blocks:
            return self._restart(phase)
        self._phase = phase
        self.payloads.publish(self._snapshot(phase))
        return [PhaseDone(self.step + 1, self.progress)]

    def _proceed(self, ready: _Proceed) -> list[Event]:
        phase = self._phase
        if phase is None or ready.step != self.step + 1:
            return []
        self._phase = None
        return self._restart(phase)

    def _restart(self, phase: OuterPhase) -> list[Event]:
        """Conclude the outer step: the next inner phase begins at the slow weights."""
        self._states = phase.conclude()
        if self.payloads.knows_nothing:
            moved = [after.slow - before.slow for before, after in zip(phase.before, self._states, strict=True)]
            self.payloads.foresee(moved)
        self.step += 1
        if self._rules.recipe.outer != "hand_over" or self._rules.recipe.exchanges:
            self._set_theta()
        self.payloads.publish(self._snapshot(phase))
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
        fast = tuple(_copy(self.task.theta[piece]) for piece in self._slices)
        if self._guard.fault_so_far(self._distance(fast)) is None:
            if self.payloads.knows_nothing:
                self.payloads.foresee([one - state.slow for one, state in zip(fast, self._states, strict=True)])
            self.payloads.publish(Snapshot(self.step, fast, self.payloads.published.slow))
        self.blocked_s += self._clock() - started

    def _distance(self, thetas: Sequence[Tensor]) -> float:
        """L2 norm of the pseudo-gradient of a phase that ended at these weights, a fragment each, on the CPU."""
        norms = [l2_norm(pseudo_gradient(state, theta)) for state, theta in zip(self._states, thetas, strict=True)]
        return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64)))

    def _is_faulty(self, thetas: Sequence[Tensor]) -> bool:
        """Judge the whole pseudo-gradient; a faulty inner phase is dropped and theta goes back to x."""
        fault = self._guard.fault(self._distance(thetas))
        if fault is not None:
            self._notebook.note("discarded", step=self.step + 1, why=fault)
        return fault is not None

    def _set_theta(self) -> None:
        for state, piece in zip(self._states, self._slices, strict=True):
            self.task.theta[piece].copy_(state.slow)
        self._guard.begin()

    def _apply(self, ready: _Displacement) -> Applied:
        for piece, part in zip(ready.difference.fragments, ready.difference.parts, strict=True):
            stream, fragment = self.payloads.place(piece)
            if stream == "pseudo_gradient":
                self._remember_left_out(fragment, ready.difference.mine, piece)
            displacement_ = displacement(part, ready.share, ready.clip_radius)
            if self._phase is not None and stream in self._rules.recipe.blocking:
                self._phase.take(stream, fragment, displacement_)
            elif stream == "slow":
                self._move(fragment, displaced(self._state(fragment), displacement_), displacement_)
            elif stream == "fast":
                self._move_fast(fragment, displacement_, ready.follow)
            elif ready.difference.mine.step != self.step:
                continue  # of a step that is over: it comes too late
            elif self._rules.recipe.weights_mix is not None:
                self._keep(fragment, late_momentum(self._state(fragment), displacement_))
            else:
                self._move(fragment, *late_pseudo_gradient(self._state(fragment), displacement_, self._rules.outer))
        self.progress += ready.progress
        return Applied(ready.link, self.progress)

    def _state(self, fragment: int) -> OuterState:
        return self._states[fragment] if self._phase is None else self._phase.states[fragment]

    def _keep(self, fragment: int, state: OuterState) -> None:
        states = list(self._states) if self._phase is None else self._phase.states
        states[fragment] = state
        if self._phase is None:
            self._states = tuple(states)

    def _move(self, fragment: int, state: OuterState, displacement_: Tensor) -> None:
        """Displace a fragment's slow and fast weights alike, and publish its new snapshot."""
        self._keep(fragment, state)
        self._displace_theta(fragment, displacement_)
        self._publish_fragment(fragment, state.slow)

    def _move_fast(self, fragment: int, displacement_: Tensor, follow: float) -> None:
        """Displace a fragment's fast weights, its slow weights by this share of it; publish its new snapshot.

        After the end there is no phase left that could bring the rest: theta is x, and moves as x does on both sides.
        """
        moved = displacement_ if follow == 1.0 else displacement_ * follow
        self._keep(fragment, displaced(self._state(fragment), moved))
        taken = moved if self.ended else displacement_
        self._displace_theta(fragment, taken)
        self._guard.added(l2_norm(taken - moved))
        self._publish_fragment(fragment, self.payloads.published.parts[fragment] + taken)

    def _displace_theta(self, fragment: int, displacement_: Tensor) -> None:
        theta = self.task.theta[self._slices[fragment]]
        theta.add_(displacement_.to(theta.device))

    def _publish_fragment(self, fragment: int, shown: Tensor) -> None:
        published = self.payloads.published
        parts = (*published.parts[:fragment], shown, *published.parts[fragment + 1 :])
        slow = (*published.slow[:fragment], self._state(fragment).slow, *published.slow[fragment + 1 :])
        self.payloads.publish(Snapshot(published.step, parts, slow))

    def _adopt(self, ready: _Adoption) -> list[Event]:
        """Replace the weights. What was computed against the old ones is dropped; its fragments become free."""
        self._states = tuple(initial_state(weights) for weights in ready.weights)
        self._phase = None
        self._left_out = [torch.zeros_like(part) for part in self._left_out]
        self._guard.forget()
        self.step, self.progress = ready.step, ready.progress
        self._inner, self._losses, self._phase_tokens = 0, 0.0, 0
        self.ended = self.progress >= self._rules.tokens_per_peer
        self._set_theta()
        self.payloads.publish(self._snapshot())
        self.task.reset(REWARM_STEPS)
        events: list[Event] = []
        while not self._inbox.empty():
            stale = self._inbox.get_nowait()
            if isinstance(stale, _Displacement):
                events.append(Applied(stale.link, self.progress))
        events.append(Adopted(ready.link, self.step, self.progress))
        return [*events, TrainingEnded(self.step, self.progress)] if self.ended else events

    def _snapshot(self, phase: OuterPhase | None = None) -> Snapshot:
        """What partners may have between phases: the weights and, if the recipe mixes them, the last pseudo-gradients.

        Where the codec of these leaves much out, what it left out before comes with them.
        """
        slow = tuple(state.slow for state in (self._states if phase is None else phase.states))
        if phase is not None:
            gradients = phase.snapshots("pseudo_gradient")
        else:
            gradients = tuple(torch.zeros_like(part) for part in slow) if self.payloads.streams == 2 else ()
        if gradients and self._left_out:
            gradients = tuple(g + left for g, left in zip(gradients, self._left_out, strict=True))
        return Snapshot(self.step, slow + gradients, slow)

    def _remember_left_out(self, fragment: int, mine: Encoded, number: int) -> None:
        """Error feedback: a partner has our message, so only what it left out is still to be sent."""
        codec, place, published = self.payloads.codec(number), mine.fragments.index(number), self.payloads.published
        if self._left_out and is_decodable(codec) and mine.step == published.step:
            said = codec.decode(mine.parts[place], mine.terms[place])
            self._left_out[fragment] = published.parts[number] - said

    # --- any thread -------------------------------------------------------------------------------------------------

    def deliver(self, link: LinkId, difference: Difference, mine: Terms, theirs: Terms, progress: float) -> None:
        """Queue a committed exchange's displacement for the trainer, with what it adds to progress."""
        clip_radius = min(mine.clip_radius, theirs.clip_radius)
        portion = share(mine.weight, theirs.weight, max(mine.partners, theirs.partners))
        # Who has finished has no pseudo-gradient to come, and both must move x by the same share.
        finished = PeerState.FINISHING in (mine.state, theirs.state)
        follow = 1.0 if finished else self._rules.recipe.follow
        self._inbox.put(_Displacement(link, difference, portion, follow, clip_radius, progress))

    def proceed(self, step: int) -> None:
        """Let a trainer that waits at this outer step go on, with what was delivered before."""
        self._inbox.put(_Proceed(step))

    def adopt(self, link: LinkId, step: int, progress: float, parts: Sequence[bytes | bytearray]) -> None:
        """Queue a donor's weights, as ``payloads.check_weights`` passed them, for the trainer to replace its own."""
        self._inbox.put(_Adoption(link, step, progress, tuple(torch.frombuffer(p, dtype=torch.float32) for p in parts)))

    # --- checkpoints (trainer thread) ---------------------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that a resumed peer goes on from: tensors, and readable numbers."""
        tensors = {
            "slow": self.slow,
            "momentum": torch.cat([state.momentum for state in self._states]),
            "theta": self.task.theta.detach().cpu().clone(),
            **({"left_out": torch.cat(self._left_out)} if self._left_out else {}),
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
        slow, momentum, theta = tensors["slow"], tensors["momentum"], tensors["theta"]
        if not slow.shape == momentum.shape == theta.shape == self.task.theta.shape:
            raise ValueError(f"{tuple(slow.shape)} weights, but the model has {tuple(self.task.theta.shape)}")
        self._states = tuple(OuterState(slow[piece].clone(), momentum[piece].clone()) for piece in self._slices)
        if self._left_out:
            self._left_out = [tensors["left_out"][piece].clone() for piece in self._slices]
        self.task.theta.copy_(theta)
        self.task.load_state_dict(
            {name.removeprefix("task."): tensor for name, tensor in tensors.items() if name.startswith("task.")}
        )
        self.step, self.progress, self.tokens = numbers["step"], numbers["progress"], numbers["tokens"]
        self._phase_tokens = numbers["phase_tokens"]
        self._inner, self._losses, self.ended = numbers["inner_step"], numbers["inner_losses"], numbers["ended"]
        self._guard.load_state_dict(numbers)
        self.payloads.publish(self._snapshot())
        if self._shows_fast:
            self._show()


def _copy(theta: Tensor) -> Tensor:
    """On the CPU; training leaves it alone."""
    copy = torch.empty_like(theta, device="cpu")
    return copy.copy_(theta.detach())
