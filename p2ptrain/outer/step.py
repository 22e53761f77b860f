"""The outer optimizer: how H inner steps become one step of the slow weights.

Sign convention: the pseudo-gradient ``g = x - theta`` points where gradients point (descent is ``-g``)::

    b <- mu b + g
    x <- x - eta (g + mu b)      Nesterov          x <- x - eta b      heavy ball (nesterov=False)

These are the operations of ``torch.optim.SGD`` with gradient g, hence bitwise equal; from DiLoCo (arXiv 2311.08105),
which uses eta .7 and mu .9. In exact arithmetic they equal the look-ahead form ``z' = x - eta g ; x' = z' + mu (z' -
z)``.

A state is never mutated: a step returns new tensors, so that holding a reference is taking a snapshot, and another
thread may encode it while training continues.

Legend: F elements of one fragment.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

NORM_HISTORY = 32
"""Outer steps that a peer remembers for ``pseudo_gradient_fault``. Guess: measure how quickly norms change."""

NORM_HISTORY_MINIMUM = 8
"""Remembered norms below which only finiteness is checked, because the norms of a run's first phases shrink quickly.
Guess: measure the norms of first phases."""

NORM_FACTOR_LIMIT = 10.0
"""Multiple of the median of its own history above which a norm is a fault. Guess: measure the noise of norms."""


@dataclass(frozen=True, slots=True)
class OuterRule:
    """The numbers of the outer step."""

    learning_rate: float
    """eta > 0."""
    momentum: float
    """0 <= mu < 1."""
    nesterov: bool = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0 and 0 <= self.momentum < 1):
            raise ValueError(f"outer rule out of range: {self}")

    @property
    def gain(self) -> float:
        """How far one unit of g moves x at once, in units of eta: ``1 + mu`` for Nesterov, 1 for heavy ball."""
        return 1.0 + self.momentum if self.nesterov else 1.0


class OuterState(NamedTuple):
    """One fragment's outer state. Both tensors are immutable by convention: replaced, never written to.

    All functions here work element by element, so that a simulation may hold N peers' fragments as [N, F], and in
    double precision.
    """

    slow: Tensor  # [F] fp32: x
    momentum: Tensor  # [F] fp32: b, or what ``forms`` keeps instead; never sent to anyone


def initial_state(
    slow: Tensor,  # [F] fp32
) -> OuterState:
    """Return the state before the first outer step, without momentum. Copies ``slow``, which the trainer may
    overwrite."""
    return OuterState(slow.clone(), torch.zeros_like(slow))


def pseudo_gradient(
    state: OuterState,
    theta: Tensor,  # [F] fp32: the fast weights after the inner phase
) -> Tensor:
    """[F] ``g = x - theta``: the direction from which the inner phase came."""
    return state.slow - theta


def outer_step(
    state: OuterState,
    g: Tensor,  # [F] fp32: the pseudo-gradient, own or mixed
    rule: OuterRule,
) -> OuterState:
    """Apply one inner phase to the slow weights. The caller then sets theta to the new ``slow``."""
    momentum = state.momentum.mul(rule.momentum).add_(g)
    update = g.add(momentum, alpha=rule.momentum) if rule.nesterov else momentum
    return OuterState(state.slow.add(update, alpha=-rule.learning_rate), momentum)


def hand_over(
    state: OuterState,
    theta: Tensor,  # [F] fp32: the fast weights after the inner phase
) -> OuterState:
    """Return theta itself as x, which is the rule of recipe ``local``.

    No subtraction: ``x - (x - theta)`` would round, and this is plain inner training bitwise.
    """
    return OuterState(theta.clone(), state.momentum)


def pseudo_gradient_fault(norm: float, history: Sequence[float]) -> str | None:
    """Say why this pseudo-gradient must not enter the outer step; return None if it may.

    A broken inner phase (diverged, bit flips) shows as a pseudo-gradient that is not finite or far longer than this
    peer's own before. Other peers' norms are not a measure, because data, H and speed differ.

    The caller appends every finite norm to the history, faulty ones too, and keeps the last ``NORM_HISTORY``. A lasting
    change of scale is then accepted after half a window instead of being refused forever.

    Args:
        norm: L2 norm of g over all fragments; NaN or infinite if any element is.
        history: norms of this peer's latest outer steps, in any order.
    """
    if not math.isfinite(norm):
        return f"pseudo-gradient is not finite (norm {norm})"
    if len(history) < NORM_HISTORY_MINIMUM:
        return None
    usual = statistics.median(history)
    if usual > 0 and norm > NORM_FACTOR_LIMIT * usual:
        return f"pseudo-gradient norm {norm:.3g} is {norm / usual:.0f} times the usual {usual:.3g}"
    return None
