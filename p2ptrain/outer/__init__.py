"""The outer optimizer, one half of the numeric core: tensors in, tensors out.

No peers, no clock, no I/O, no thread, no random number. A model is one flat vector [P] (``flat``), cut into fixed
fragments (``fragments``), the unit of exchange. Each fragment has one immutable ``OuterState``: the slow weights x and
the momentum b. A round in the trainer::

    theta  = flatten_module(model)                    the model's own memory: inner steps write here
    states = [initial_state(theta[f]) for f in slices(P, F)]

    H inner steps move theta                          meanwhile, when an exchange is complete:
                                                          dx = displacement(difference, share, radius)
                                                          theta[f] += dx
                                                          state = displaced(state, dx), or by a share of it
    g = pseudo_gradient(state, theta[f])
    state = outer_step(state, g, rule)                or hand_over(state, theta[f]) in recipe ``local``
    theta[f] = state.slow

Algorithm: DiLoCo's Nesterov step (arXiv 2311.08105), taken locally, and pairwise mixing of the weights, in the spirit
of AD-PSGD (arXiv 1710.06952) and NoLoCo (arXiv 2506.10911).

Invariants, tested by ``tests/outer``: one peer alone equals ``torch.optim.SGD`` bitwise; displacing x and theta alike
leaves the pseudo-gradient unchanged; the two displacements of one exchange cancel, so only outer steps move the swarm's
weighted mean.
"""

from p2ptrain.outer.flat import FlatLayout, flatten_module
from p2ptrain.outer.forms import accelerated, consensus_step, merged, own_fresh
from p2ptrain.outer.fragments import slices
from p2ptrain.outer.mixing import (
    displaced,
    displacement,
    l2_distance,
    l2_norm,
    late_momentum,
    late_pseudo_gradient,
)
from p2ptrain.outer.step import (
    NORM_HISTORY,
    OuterRule,
    OuterState,
    hand_over,
    initial_state,
    outer_step,
    pseudo_gradient,
    pseudo_gradient_fault,
)

__all__ = [
    "NORM_HISTORY",
    "FlatLayout",
    "OuterRule",
    "OuterState",
    "accelerated",
    "consensus_step",
    "displaced",
    "displacement",
    "flatten_module",
    "hand_over",
    "initial_state",
    "l2_distance",
    "l2_norm",
    "late_momentum",
    "late_pseudo_gradient",
    "merged",
    "outer_step",
    "own_fresh",
    "pseudo_gradient",
    "pseudo_gradient_fault",
    "slices",
]
