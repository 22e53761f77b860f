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
