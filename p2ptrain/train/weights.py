"""Slow and fast weights of one peer, in fragments, and their publication for partners.

Only the trainer thread calls this module. Slow weights are immutable tensors that are replaced; fast ones are the inner
task's vector theta, written in place (``fast_weights``). ``Payloads`` holds the last published snapshot for any thread
to read.

Legend: P parameters (padded), F elements of one fragment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from p2ptrain.codec import is_decodable, weighted_ranks
from p2ptrain.outer.mixing import displaced
from p2ptrain.outer.step import OuterState, initial_state
from p2ptrain.ports import InnerTask
from p2ptrain.train.fast_weights import FastCopy, FastWeights
from p2ptrain.train.outer_phase import OuterPhase
from p2ptrain.train.payloads import Encoded, Payloads, Snapshot

if TYPE_CHECKING:
    from p2ptrain.outer.step import OuterRule
    from p2ptrain.ports import Saved
    from p2ptrain.recipes import Recipe

T = TypeVar("T")


class Weights:
    """Slow weights x with their momentum, and fast weights theta.

    Args:
        task: its ``theta`` [P] becomes the initial slow weights.
        fragments: slices of [0, P), one per fragment.
        payloads: publishes snapshots for partners.
        feeds_back: later pseudo-gradient messages include what earlier ones left out (``Decodable.needs_feedback``).
        keeps_late: pseudo-gradients are used one phase late (``Recipe.uses_late_gradients``).
        fast: the task's weights; None: this process's own.
    """

    def __init__(
        self,
        task: InnerTask,
        fragments: Sequence[slice],
        payloads: Payloads,
        feeds_back: bool,
        keeps_late: bool = False,
        fast: FastWeights | None = None,
    ) -> None:
        self.phase: OuterPhase | None = None
        """Outer step in progress while the recipe waits for partners; displacements of x are then applied to it."""
        self._task = task
        self._slices = tuple(fragments)
        self._payloads = payloads
        self.states = tuple(initial_state(task.theta[piece].cpu()) for piece in self._slices)
        """State of each fragment after the last outer step and the exchanges since."""
        self.late = [torch.zeros_like(state.slow) for state in self.states] if keeps_late else []
        """[F] each: pseudo-gradients of the last phase, mixed since, by which the next outer step moves; or empty."""
        self._fast = fast or FastWeights(task, self._slices)
        self._left_out = [torch.zeros_like(state.slow) for state in self.states] if feeds_back else []
        """[F] each: what pseudo-gradient messages have left out so far, if the codec needs that fed back."""
        self._applied = [0] * len(self._slices)
        """Serial number of the last displacement that each fragment's weights contain."""

    @property
    def slow(self) -> Tensor:
        return torch.cat([state.slow for state in self.states])

    @property
    def fast(self) -> Iterator[Tensor]:
        """Fast weights, [F] each on the host: views of theta if that is there too, else one copy after the other."""
        return self._fast.parts

    def state(self, fragment: int) -> OuterState:
        """Return one fragment's state, including the outer step in progress."""
        return self.states[fragment] if self.phase is None else self.phase.states[fragment]

    def distance(self) -> float:
        """Return the L2 norm of the inner phase's pseudo-gradient."""
        return _norm(self._fast.distances([state.slow for state in self.states]))

    # --- outer steps --------------------------------------------------------------------------------------------------

    def step(self, recipe: Recipe, rule: OuterRule, faulty: bool) -> None:
        """Make an outer step that waits for nobody, one fragment after the other, so that little memory is needed.

        The fast weights stay unchanged.
        """
        for fragment, theta in enumerate(self.fast):
            (state,) = OuterPhase.begin(recipe, rule, (self.states[fragment],), (theta,), faulty).conclude()
            self.states = (*self.states[:fragment], state, *self.states[fragment + 1 :])
        if self._payloads.lacks_widths:
            before = self._payloads.published.slow
            self._payloads.predict_widths(state.slow - old for state, old in zip(self.states, before, strict=True))

    def conclude(self, phase: OuterPhase) -> None:
        """Take the slow weights from an outer step; leave the fast ones unchanged."""
        self.phase = None
        self.states = phase.conclude()
        if self.late:
            self.late = list(phase.gradients)
        if self._payloads.lacks_widths:
            pairs = zip(phase.before, self.states, strict=True)
            self._payloads.predict_widths(after.slow - before.slow for before, after in pairs)

    def reset_fast(self) -> None:
        """Set the fast weights to the slow ones, where the next inner phase begins."""
        self._fast.begin_at([state.slow for state in self.states])

    def try_on(self, weights: Sequence[Tensor], tell: Callable[[], T]) -> T:
        """Return the result of ``tell`` with these weights, [F] each, as the fast ones; restore the fast weights."""
        ours = self._fast.copy().parts
        try:
            self._fast.load(weights)
            return tell()
        finally:
            self._fast.load(ours)

    def replace(self, slow: Sequence[Tensor]) -> None:
        """Restart from a donor's weights, [F] each, and drop everything that belongs to the old ones."""
        self.states = tuple(initial_state(weights) for weights in slow)
        self.phase = None
        self._left_out = [torch.zeros_like(part) for part in self._left_out]
        self.late = [torch.zeros_like(part) for part in self.late]
        self.reset_fast()

    # --- displacements ------------------------------------------------------------------------------------------------

    def buffer(self, like: Tensor) -> Tensor | None:
        """Return host memory of this shape from which a displacement reaches theta fast; None if any memory is."""
        return self._fast.buffer(like)

    def keep(self, fragment: int, state: OuterState) -> None:
        """Replace a fragment's state where no published tensor changes."""
        states = list(self.states) if self.phase is None else self.phase.states
        states[fragment] = state
        if self.phase is None:
            self.states = tuple(states)

    def move(
        self,
        fragment: int,
        state: OuterState,
        moved: Tensor,  # [F]: displacement of that state's slow weights
        serial: int,
    ) -> None:
        """Displace a fragment's slow and fast weights alike, and publish its new snapshot.

        ``serial``: number of the displacement (``Payloads.expect``).
        """
        self._applied[fragment] = serial
        self.keep(fragment, state)
        self._fast.displace(fragment, moved, moved)
        self._publish_fragment(fragment, state.slow)

    def late_rank(self) -> float:
        """Return the effective rank of the late pseudo-gradients; 0 if all are zero."""
        terms = [self._payloads.terms(len(self.states) + fragment) for fragment in range(len(self.states))]
        sums = [weighted_ranks(g, each) for g, each in zip(self.late, terms, strict=True)]
        weighted, counted = zip(*sums, strict=True)
        return math.fsum(weighted) / max(1.0, math.fsum(counted))

    def mix_late(
        self,
        fragment: int,
        displacement: Tensor,  # [F]
    ) -> None:
        """Displace a fragment's late pseudo-gradient; partners from now on get the result."""
        self.late[fragment] = self.late[fragment] + displacement
        published, number = self._payloads.published, len(self.states) + fragment
        parts = (*published.parts[:number], self.late[fragment], *published.parts[number + 1 :])
        self._payloads.publish(Snapshot(published.step, parts, published.slow, published.applied))

    def move_fast(
        self,
        fragment: int,
        taken: Tensor,  # [F]: displacement of theta
        moved: Tensor,  # [F]: displacement of x
        serial: int,
    ) -> None:
        """Displace a fragment's fast weights, and its slow weights by another vector; publish its new snapshot.

        ``serial``: number of the displacement (``Payloads.expect``).
        """
        self._applied[fragment] = serial
        self.keep(fragment, displaced(self.state(fragment), moved))
        self._fast.displace(fragment, taken, moved)
        self._publish_fragment(fragment, self._payloads.published.parts[fragment] + taken)

    # --- what partners may have ---------------------------------------------------------------------------------------

    def publish(self, step: int, phase: OuterPhase | None = None) -> None:
        """Publish, between phases, the slow weights and, if the recipe mixes them, the last pseudo-gradients.

        If their codec needs error feedback, the pseudo-gradients include what it left out before.

        Args:
            step: outer steps made so far.
            phase: the outer step that these weights and pseudo-gradients belong to; None: no outer step yet.
        """
        slow = tuple(state.slow for state in (self.states if phase is None else phase.states))
        if phase is not None:
            gradients = phase.snapshots("pseudo_gradient")
        elif self.late:
            gradients = tuple(self.late)
        else:
            gradients = tuple(torch.zeros_like(part) for part in slow) if self._payloads.streams == 2 else ()
        if gradients and self._left_out:
            gradients = tuple(g + left for g, left in zip(gradients, self._left_out, strict=True))
        self._payloads.publish(Snapshot(step, slow + gradients, slow, tuple(self._applied)))

    def copy_fast(self) -> FastCopy:
        """Start to copy the current fast weights; later training does not change the copy."""
        return self._fast.copy()

    def distance_of(self, copy: FastCopy) -> float:
        """Return the L2 norm of the pseudo-gradient so far; the slow weights must be as at the copy."""
        return _norm(copy.distances_from([state.slow for state in self.states]))

    def publish_fast(self, step: int, fast: tuple[Tensor, ...]) -> None:
        """Publish, in the middle of a phase, these copies of the fast weights beside the previous slow ones."""
        if self._payloads.lacks_widths:
            self._payloads.predict_widths(one - state.slow for one, state in zip(fast, self.states, strict=True))
        self._payloads.publish(Snapshot(step, fast, self._payloads.published.slow, tuple(self._applied)))

    def remember_left_out(self, fragment: int, mine: Encoded, number: int) -> None:
        """Store the part of a fragment that a message to a partner omitted; later messages add it (error feedback)."""
        codec, place, published = self._payloads.codec(number), mine.fragments.index(number), self._payloads.published
        if self._left_out and is_decodable(codec) and mine.step == published.step:
            said = codec.decode(mine.parts[place], mine.terms[place])
            self._left_out[fragment] = published.parts[number] - said

    def _publish_fragment(self, fragment: int, shown: Tensor) -> None:
        published = self._payloads.published
        parts = (*published.parts[:fragment], shown, *published.parts[fragment + 1 :])
        slow = (*published.slow[:fragment], self.state(fragment).slow, *published.slow[fragment + 1 :])
        self._payloads.publish(Snapshot(published.step, parts, slow, tuple(self._applied)))

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Saved]:
        """Return everything that a resumed peer needs, [P] each; views of live memory, as the task's."""
        return {
            "slow": [state.slow for state in self.states],
            "momentum": [state.momentum for state in self.states],
            "theta": self._task.theta.detach(),
            **({"left_out": list(self._left_out)} if self._left_out else {}),
            **({"late": list(self.late)} if self.late else {}),
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of ``state_dict``. Raises KeyError or ValueError if it does not fit."""
        slow, momentum, theta = tensors["slow"], tensors["momentum"], tensors["theta"]
        if not slow.shape == momentum.shape == theta.shape == self._task.theta.shape:
            raise ValueError(f"{tuple(slow.shape)} weights, but the model has {tuple(self._task.theta.shape)}")
        self.states = tuple(OuterState(slow[piece].clone(), momentum[piece].clone()) for piece in self._slices)
        if self._left_out:
            self._left_out = [tensors["left_out"][piece].clone() for piece in self._slices]
        if self.late:
            self.late = [tensors["late"][piece].clone() for piece in self._slices]
        self._fast.resume(theta, slow)


def _norm(distances: Tensor) -> float:
    return float(torch.linalg.vector_norm(distances))
