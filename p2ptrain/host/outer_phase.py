"""What a recipe does with an inner phase, in two halves around the exchanges that it waits for, and displacements.

::

    recipe mixes, blocking       first half                wait for       second half
    --------------------------   -----------------------   ------------   ----------------------------
    nothing                      fold g into x, b           -              -
    g   (DiLoCo, Mix2)           publish g                  dg             fold g + dg
    x and g  (NoLoCo)            publish x, g               dg, pull       fold g + dg and the pull
    x   (GASLoC, D-PSGD)         fold ; publish x           dx             x += dx ; accelerate
    nothing, but g is late       fold the g before ;        -              -
    (DiLoCoX)                    publish x, g

All operations are element-wise: the learner holds one peer's fragments [F], the lockstep simulator all peers' [N, F].

Legend: F elements of one fragment, N peers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, assert_never

import torch
from torch import Tensor

from p2ptrain.outer.forms import accelerated, consensus_step
from p2ptrain.outer.mixing import displaced
from p2ptrain.outer.step import (
    NORM_HISTORY,
    OuterRule,
    OuterState,
    hand_over,
    outer_step,
    pseudo_gradient,
    pseudo_gradient_fault,
)
from p2ptrain.recipes import Recipe, Stream


@dataclass(slots=True)
class OuterPhase:
    """Outer step in progress: ``begin`` it, ``take`` the round's results, ``conclude`` it."""

    recipe: Recipe
    rule: OuterRule
    before: tuple[OuterState, ...]
    states: list[OuterState]
    """Current states, including the results so far."""
    gradients: list[Tensor]
    """Pseudo-gradients, one per fragment; empty if the recipe does not mix them."""
    pulls: list[Tensor]
    """Displacements of x that enter through the momentum, one per fragment (NoLoCo); else empty."""
    stepped: tuple[Tensor, ...] = ()
    """Slow weights x after the step and before mixing, if the recipe accelerates."""

    @classmethod
    def begin(
        cls,
        recipe: Recipe,
        rule: OuterRule,
        states: Sequence[OuterState],
        thetas: Sequence[Tensor],  # [F] each: fast weights after the inner phase, on the states' device
        faulty: bool = False,
        late: Sequence[Tensor] = (),  # [F] each: mixed pseudo-gradients of the phase before
    ) -> OuterPhase:
        """Run the first half. A faulty inner phase has a zero pseudo-gradient or takes no step.

        If the recipe uses late pseudo-gradients, the states step by ``late``, and ``gradients`` are this phase's.
        """
        phase = cls(recipe, rule, tuple(states), list(states), [], [])
        if recipe.mix("pseudo_gradient") is not None and recipe.outer != "hand_over":
            phase.gradients = [
                torch.zeros_like(theta) if faulty else pseudo_gradient(state, theta)
                for state, theta in zip(states, thetas, strict=True)
            ]
        if recipe.uses_late_gradients:
            phase.states = [outer_step(state, g, rule) for state, g in zip(states, late, strict=True)]
            return phase
        if recipe.mixes_before_step and "slow" in recipe.blocking:
            phase.pulls = [torch.zeros_like(theta) for theta in thetas]
        if not recipe.mixes_before_step and not faulty:
            phase.states = [
                phase._folded(fragment, state, theta)
                for fragment, (state, theta) in enumerate(zip(states, thetas, strict=True))
            ]
            phase.stepped = tuple(state.slow for state in phase.states)
        elif not recipe.mixes_before_step:
            phase.stepped = tuple(state.slow for state in states)
        return phase

    def snapshots(self, stream: Stream) -> tuple[Tensor, ...]:
        """Return what a round exchanges of this stream, [F] each."""
        return tuple(self.gradients) if stream == "pseudo_gradient" else tuple(state.slow for state in self.states)

    def take(
        self,
        stream: Stream,
        fragment: int,
        displacement: Tensor,  # [F]
    ) -> None:
        """Add the result of one exchange of the round."""
        if stream == "pseudo_gradient":
            self.gradients[fragment] = self.gradients[fragment] + displacement
        elif self.pulls:
            self.pulls[fragment] = self.pulls[fragment] + displacement
        else:
            self.states[fragment] = displaced(self.states[fragment], displacement)

    def conclude(self) -> tuple[OuterState, ...]:
        """Run the second half; return the states with which the next inner phase begins."""
        match self.recipe.outer:
            case _ if self.recipe.mixes_before_step:
                self.states = [self._mixed(fragment, state) for fragment, state in enumerate(self.states)]
            case "y_form" | "z_form" as form:
                self.states = [
                    accelerated(before, stepped, mixed.slow, self.rule, form)
                    for before, stepped, mixed in zip(self.before, self.stepped, self.states, strict=True)
                ]
            case "hand_over" | "momentum" | "consensus":
                pass  # the first half did it all
            case other:
                assert_never(other)
        return tuple(self.states)

    def _folded(self, fragment: int, state: OuterState, theta: Tensor) -> OuterState:
        """Return one fragment after a step by its own pseudo-gradient."""
        form = self.recipe.outer
        if form == "hand_over":
            return hand_over(state, theta)
        g = self.gradients[fragment] if self.gradients else pseudo_gradient(state, theta)
        match form:
            case "momentum":
                return outer_step(state, g, self.rule)
            case "y_form" | "z_form" | "consensus":
                return OuterState(state.slow.add(g, alpha=-self.rule.learning_rate), state.momentum)
            case other:
                assert_never(other)

    def _mixed(self, fragment: int, state: OuterState) -> OuterState:
        """Return one fragment after a step by the mixed pseudo-gradient."""
        if self.pulls:
            return consensus_step(state, self.gradients[fragment], self.pulls[fragment], self.rule)
        return outer_step(state, self.gradients[fragment], self.rule)


class PhaseGuard:
    """Guard of one peer's inner phases: a failed phase reaches neither its slow weights nor its partners.

    It compares norms with this peer's own earlier phases (``outer.step.pseudo_gradient_fault``). What displacements
    have added in the present phase is excluded, however large: otherwise two halves of a swarm that meet again would
    each drop the other's weights.
    """

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=NORM_HISTORY)
        self._added = 0.0

    def begin(self) -> None:
        self._added = 0.0

    def added(self, norm: float) -> None:
        """Count a displacement that moved theta further than x by a vector of this L2 norm."""
        self._added += norm

    def fault_so_far(self, norm: float) -> str | None:
        """Return why a phase whose pseudo-gradient has this L2 norm must not be published; None if it may be."""
        own = max(norm - self._added, 0.0) if math.isfinite(norm) else norm
        return pseudo_gradient_fault(own, self._norms)

    def fault(self, norm: float) -> str | None:
        """Return why a finished phase must not enter the slow weights, and record its norm.

        The history takes the whole norm, including what displacements added: without it, the history would be a lower
        bound that is often near zero, and the first phase without an exchange would look like a fault.
        """
        found = self.fault_so_far(norm)
        if math.isfinite(norm):
            self._norms.append(norm)
        return found

    def forget(self) -> None:
        """Clear the history after the weights were replaced by a donor's."""
        self._norms.clear()
        self._added = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"norms": list(self._norms), "added": self._added}

    def load_state_dict(self, numbers: Mapping[str, Any]) -> None:
        """Restore the result of ``state_dict``. Raises KeyError if it does not fit."""
        self._norms, self._added = deque(numbers["norms"], maxlen=NORM_HISTORY), numbers["added"]


class Entry(Enum):
    """How the displacement of a committed exchange enters this peer's weights; the value says it in words."""

    ROUND = "the outer step in progress takes it"
    ALIKE = "x and theta move by all of it"
    FAST = "theta moves by all of it, x by the recipe's share"
    NEXT = "the pseudo-gradient of the next outer step moves"
    MOMENTUM = "the momentum moves; x moves with its own stream"
    AFTERWARDS = "x, theta and the momentum move as if the outer step had contained it"


@dataclass(frozen=True, slots=True)
class EntryRow:
    """One row of ``ENTRIES``."""

    stream: Stream
    applies: Callable[[Recipe], bool]
    entry: Entry
    in_round: bool = False
    """Whether the row holds only while the trainer waits for partners."""


ENTRIES = (
    EntryRow("slow", lambda recipe: "slow" in recipe.blocking, Entry.ROUND, in_round=True),
    EntryRow("pseudo_gradient", lambda recipe: recipe.mixes_before_step, Entry.ROUND, in_round=True),
    EntryRow("slow", lambda recipe: True, Entry.ALIKE),
    EntryRow("fast", lambda recipe: True, Entry.FAST),
    EntryRow("pseudo_gradient", lambda recipe: recipe.uses_late_gradients, Entry.NEXT),
    EntryRow("pseudo_gradient", lambda recipe: recipe.weights_mix is not None, Entry.MOMENTUM),
    EntryRow("pseudo_gradient", lambda recipe: True, Entry.AFTERWARDS),
)
"""The first row that applies says how a displacement enters. Pseudo-gradients count only in the phase after their outer
step, or in its round."""


def entry_of(recipe: Recipe, stream: Stream, in_round: bool) -> Entry:
    """Return how a displacement of this stream enters, in a round that the trainer waits for or outside of one."""
    rows = (row for row in ENTRIES if row.stream == stream and row.in_round <= in_round and row.applies(recipe))
    return next(rows).entry
