"""Displacements: what an exchange between two peers does to their weights.

Peers i and j hold the same two byte strings, so both know ``difference = decoded(theirs) - decoded(mine)``, one of
them with the opposite sign, to the bit. Each moves by its share of it::

    dx_i = a_i clip(difference_i) ,  a_i = w_j / (w_i + w_j)       hence      w_i dx_i + w_j dx_j = 0

The weighted mean of the pair stays where it is, whatever the codec lost and however far the radius clipped. For equal
weights ``dx_i == -dx_j`` bitwise; for others the sum vanishes to rounding.

Where slow weights are mixed, dx is added to x AND to theta, at any moment of the inner phase: ``g = x - theta`` does
not change, so the inner phase goes on as if it had begun at the displaced weights. Where fast weights are mixed, theta
takes dx and x the recipe's share of it. The momentum buffer is never mixed.

Legend: F elements of one fragment.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from p2ptrain.outer.step import OuterRule, OuterState

NORM_CHUNK = 1 << 16
"""Elements summed in fp32 before the sums are joined in double precision; 256 KiB, fits any second-level cache."""


def share(weight_mine: float, weight_theirs: float, partners: int = 1) -> float:
    """How much of the difference I move by: ``2 / (1 + k) * w_theirs / (w_mine + w_theirs)``. The heavier moves less.

    Args:
        partners: k, with how many a snapshot is mixed at once, the larger of the two sides' numbers. For equal weights
            1 / (1 + k): the Metropolis weights of a graph (Xiao and Boyd, 2004), stable for any k. All of n - 1 others
            at once, and the share is that of the mean.
    """
    if not (math.isfinite(weight_mine + weight_theirs) and weight_mine > 0 and weight_theirs > 0):
        raise ValueError(f"weights must be positive and finite, not {weight_mine} and {weight_theirs}")
    if partners < 1:
        raise ValueError(f"a snapshot is mixed with at least one partner, not {partners}")
    return 2.0 / (1 + partners) * (weight_theirs / (weight_mine + weight_theirs))


def l2_norm(
    vector: Tensor,  # [F] fp32
) -> float:
    """The L2 norm: the same for a vector and its negative, NaN or infinite when an element is."""
    return math.hypot(*(float(torch.linalg.vector_norm(chunk)) for chunk in torch.split(vector, NORM_CHUNK)))


def l2_distance(
    one: Tensor,  # [F] fp32
    other: Tensor,  # [F] fp32
) -> float:
    """``l2_norm(one - other)`` to the last bit, without a vector that holds the difference."""
    pairs = zip(torch.split(one, NORM_CHUNK), torch.split(other, NORM_CHUNK), strict=True)
    return math.hypot(*(float(torch.linalg.vector_norm(a - b)) for a, b in pairs))


def displacement(
    difference: Tensor,  # [F] fp32: theirs - mine
    share: float,  # a_i
    clip_radius: float = math.inf,  # both sides use the smaller of their two wishes
) -> Tensor:
    """[F] dx: my share of the difference, after the difference as a whole was shortened to ``clip_radius``.

    The radius bounds the difference, not the share of it: else two unequal shares would be clipped unequally and the
    pair's weighted mean would move. Clip and share enter as one factor, so each element is rounded once, alike on
    both sides.
    """
    if not (0 <= share <= 1 and clip_radius >= 0):
        raise ValueError(f"share {share} must be within 0 and 1, and clip radius {clip_radius} at least 0")
    norm = l2_norm(difference) if math.isfinite(clip_radius) else 0.0
    clip = clip_radius / norm if norm > clip_radius else 1.0
    return difference * (share * clip)


def displaced(
    state: OuterState,
    dx: Tensor,  # [F] fp32
) -> OuterState:
    """The state after x += dx. The trainer displaces its theta."""
    return OuterState(state.slow + dx, state.momentum)


def late_pseudo_gradient(
    state: OuterState,  # after the outer step that the correction belongs to
    correction: Tensor,  # [F] fp32: dg = mixed g - own g
    rule: OuterRule,
) -> tuple[OuterState, Tensor]:
    """Mix pseudo-gradients after the fact: the new state, and the displacement [F] that theta must follow.

    ``b += dg ; x -= eta (1 + mu) dg`` (heavy ball: ``eta dg``) yields what the outer step would have yielded had it
    been given ``g + dg``. It holds until the next outer step only, and once per outer step; a later correction is
    dropped.
    """
    follow = correction * (-rule.learning_rate * rule.gain)
    return OuterState(state.slow + follow, state.momentum + correction), follow


def late_momentum(
    state: OuterState,  # after the outer step that the correction belongs to
    correction: Tensor,  # [F] fp32: dg = mixed g - own g
) -> OuterState:
    """Mix pseudo-gradients where the slow weights after the step are mixed, too: ``b += dg``, and x stays.

    The difference of two peers' x after the step holds that of their g already; what it cannot tell is where their
    momentum goes from here. With one partner and one share for both streams it is what mixing x before the step and g
    for it would yield, and b mixed along::

        x_i - eta (g_i + mu b_i') + a (x_j+ - x_i+)  =  X - eta (G + mu (mu B + G)) ,   X = x_i + a (x_j - x_i), ...
    """
    return OuterState(state.slow, state.momentum + correction)
