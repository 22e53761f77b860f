"""Alternatives to the local Nesterov step from other methods: each one a small pure function of the same state.

In these forms too, g = x - theta is positive in the direction of descent; NoLoCo and GASLoC print the opposite sign.

Legend: F elements of one fragment; eta, mu the rule's learning rate and momentum.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from p2ptrain.outer.step import OuterRule, OuterState


def consensus_step(
    state: OuterState,
    g: Tensor,  # [F] fp32: the pair's mean pseudo-gradient
    pull: Tensor,  # [F] fp32: the pair's mean of x, minus the own x
    rule: OuterRule,
) -> OuterState:
    """NoLoCo (arXiv 2506.10911): the pull towards the partner enters through the momentum.

    ``b <- mu b + g - pull ; x <- x - eta b``. With v = -eta b this is ``v <- mu v - eta g + eta pull ; x <- x + v``.
    """
    momentum = state.momentum.mul(rule.momentum).add_(g).sub_(pull)
    return OuterState(state.slow.add(momentum, alpha=-rule.learning_rate), momentum)


def accelerated(
    state: OuterState,  # before the outer step; ``momentum`` holds the iterate kept last time, minus the slow weights
    stepped: Tensor,  # [F] fp32: y = x - eta g
    mixed: Tensor,  # [F] fp32: z = y after mixing
    rule: OuterRule,
    form: Literal["y_form", "z_form"],
) -> OuterState:
    """GASLoC (arXiv 2606.11081), accelerated: ``x' = z + mu (k - k_before)``, where k is y or z; both readings.

    With z = the mean over all peers, the z-form is DiLoCo in its look-ahead form; the y-form is not. The kept iterate
    is stored relative to x: zero means none, and it stays valid when a donor's weights replace x.
    """
    kept = stepped if form == "y_form" else mixed
    before = state.slow + state.momentum
    slow = mixed.add(kept - before, alpha=rule.momentum)
    return OuterState(slow, kept - slow)
