"""Displacements: how an exchange between two peers changes their weights.

Peers i and j hold the same two byte strings, so both know ``difference = decoded(theirs) - decoded(mine)`` exactly,
with opposite signs. Each moves by its share of it::

    dx_i = a_i clip(difference_i) ,  a_i = w_j / (w_i + w_j)       hence      w_i dx_i + w_j dx_j = 0

The pair's weighted mean stays where it is, whatever the codec lost and however far the radius clipped. For equal
weights ``dx_i == -dx_j`` bitwise; for others the sum vanishes up to rounding.

If slow weights are mixed, dx is added to x and to theta, at any moment of the inner phase: ``g = x - theta`` does not
change, so the inner phase continues as if it had begun at the displaced weights. If fast weights are mixed, theta takes
dx and x takes the recipe's share of it. The momentum buffer is never mixed.

Legend: F elements of one fragment.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from p2ptrain.outer.step import OuterRule, OuterState

NORM_CHUNK = 1 << 16
"""Elements summed in fp32 before the sums are joined in double precision; 256 KiB, which fits any second-level
cache."""


def l2_norm(
    vector: Tensor,  # [F] fp32
) -> float:
    """Return the L2 norm: equal for a vector and its negative; NaN or infinite if an element is."""
    return math.hypot(*(float(torch.linalg.vector_norm(chunk)) for chunk in torch.split(vector, NORM_CHUNK)))


def l2_distance(
    one: Tensor,  # [F] fp32
    other: Tensor,  # [F] fp32
) -> float:
    """Return ``l2_norm(one - other)`` bitwise, without a vector that holds the difference."""
    pairs = zip(torch.split(one, NORM_CHUNK), torch.split(other, NORM_CHUNK), strict=True)
    return math.hypot(*(float(torch.linalg.vector_norm(a - b)) for a, b in pairs))


def displacement(
    difference: Tensor,  # [F] fp32: theirs - mine
    share: float,  # a_i
    clip_radius: float = math.inf,  # both sides use the smaller of their two radii
    norm: float | None = None,  # ``l2_norm`` of the difference, if it is known
) -> Tensor:
    """[F] dx: my share of the difference, after the whole difference was clipped to ``clip_radius``.

    The radius bounds the difference and not the share of it; otherwise two unequal shares would be clipped unequally
    and the pair's weighted mean would move. Clip and share form one factor, so each element is rounded once, alike on
    both sides. Raises ValueError if the share is not within 0 and 1, or the radius is negative.
    """
    if not (0 <= share <= 1 and clip_radius >= 0):
        raise ValueError(f"share {share} must be within 0 and 1, and clip radius {clip_radius} at least 0")
    if not math.isfinite(clip_radius):
        norm = 0.0
    elif norm is None:
        norm = l2_norm(difference)
    clip = clip_radius / norm if norm > clip_radius else 1.0
    return torch.mul(difference, share * clip)


def displaced(
    state: OuterState,
    dx: Tensor,  # [F] fp32
) -> OuterState:
    """Return the state after x += dx. The trainer displaces its theta."""
    return OuterState(state.slow + dx, state.momentum)


def late_pseudo_gradient(
    state: OuterState,  # after the outer step that the correction belongs to
    correction: Tensor,  # [F] fp32: dg = mixed g - own g
    rule: OuterRule,
) -> tuple[OuterState, Tensor]:
    """Mix pseudo-gradients after the outer step: return the new state, and the displacement [F] that theta must follow.

    ``b += dg ; x -= eta (1 + mu) dg`` (heavy ball: ``eta dg``) yields the result of an outer step with ``g + dg``.
    Valid only until the next outer step, and once per outer step; a later correction is dropped.
    """
    follow = correction * (-rule.learning_rate * rule.gain)
    return OuterState(state.slow + follow, state.momentum + correction), follow


def late_momentum(
    state: OuterState,  # after the outer step that the correction belongs to
    correction: Tensor,  # [F] fp32: dg = mixed g - own g
) -> OuterState:
    """Mix pseudo-gradients if the slow weights after the step are mixed, too: ``b += dg``, and x stays.

    The difference of two peers' x after the step already contains that of their g, but not where their momentum goes.
    With one partner and one share for both streams, this yields what mixing x before the step, g for it, and b would
    yield::

        x_i - eta (g_i + mu b_i') + a (x_j+ - x_i+)  =  X - eta (G + mu (mu B + G)) ,   X = x_i + a (x_j - x_i), ...
    """
    return OuterState(state.slow, state.momentum + correction)
