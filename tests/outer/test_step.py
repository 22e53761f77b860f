"""The outer step equals torch's SGD bitwise; states are immutable; the guard uses its own history only."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2ptrain.outer.fragments import slices
from p2ptrain.outer.step import (
    NORM_FACTOR_LIMIT,
    NORM_HISTORY,
    NORM_HISTORY_MINIMUM,
    OuterRule,
    OuterState,
    hand_over,
    initial_state,
    outer_step,
    pseudo_gradient,
    pseudo_gradient_fault,
)

ELEMENTS = 3 * 1024 + 7


def inner_phase(start: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random walk away from ``start``, in place of H inner steps."""
    return start + 0.01 * torch.randn(start.shape, generator=generator, dtype=start.dtype)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**31),
    learning_rate=st.sampled_from([0.1, 0.7, 1.0]),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    nesterov=st.booleans(),
)
def test_t8_one_peer_equals_torch_sgd_bitwise(seed: int, learning_rate: float, momentum: float, nesterov: bool) -> None:
    nesterov = nesterov and momentum > 0  # torch refuses Nesterov without momentum
    rule = OuterRule(learning_rate, momentum, nesterov)
    first = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed))

    reference = torch.nn.Parameter(first.clone())
    optimizer = torch.optim.SGD([reference], lr=learning_rate, momentum=momentum, nesterov=nesterov)
    generator = torch.Generator().manual_seed(seed + 1)
    for _ in range(20):
        reference.grad = reference.detach() - inner_phase(reference.detach(), generator)
        optimizer.step()

    fragments = slices(ELEMENTS, 3)
    states = [initial_state(first[fragment]) for fragment in fragments]
    generator = torch.Generator().manual_seed(seed + 1)
    for _ in range(20):
        theta = inner_phase(torch.cat([state.slow for state in states]), generator)
        gradients = [pseudo_gradient(state, theta[f]) for state, f in zip(states, fragments, strict=True)]
        states = [outer_step(state, g, rule) for state, g in zip(states, gradients, strict=True)]

    assert torch.equal(torch.cat([state.slow for state in states]), reference.detach())


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), momentum=st.floats(0, 0.95), learning_rate=st.floats(0.1, 1.0))
def test_t2_look_ahead_equals_buffer_form(seed: int, momentum: float, learning_rate: float) -> None:
    """Check z' = x - eta g ; x' = z' + mu (z' - z) in double precision, on one sequence of pseudo-gradients."""
    generator = torch.Generator().manual_seed(seed)
    state = initial_state(torch.randn(64, generator=generator, dtype=torch.float64))
    rule = OuterRule(learning_rate, momentum)
    x = z = state.slow
    for _ in range(30):
        g = 0.1 * torch.randn(64, generator=generator, dtype=torch.float64)
        state = outer_step(state, g, rule)
        ahead = x - learning_rate * g
        x, z = ahead + momentum * (ahead - z), ahead
    torch.testing.assert_close(state.slow, x, rtol=1e-9, atol=1e-9)


def test_a_step_leaves_the_old_state_and_theta_untouched() -> None:
    state = OuterState(torch.randn(100), torch.randn(100))
    theta = torch.randn(100)
    copies = [tensor.clone() for tensor in (*state, theta)]
    for rule in (OuterRule(0.7, 0.9), OuterRule(0.7, 0.9, nesterov=False)):
        outer_step(state, pseudo_gradient(state, theta), rule)
    assert all(torch.equal(now, then) for now, then in zip((*state, theta), copies, strict=True))


def test_initial_state_is_detached_from_the_trainers_memory() -> None:
    theta = torch.ones(4)
    state = initial_state(theta)
    theta.zero_()
    assert torch.equal(state.slow, torch.ones(4))
    assert torch.equal(state.momentum, torch.zeros(4))


def test_local_rule_hands_theta_over_bitwise() -> None:
    """Check values for which x - (x - theta) is not theta in floating point."""
    state = initial_state(torch.tensor([1e8, 1.0]))
    theta = torch.tensor([0.1, 1e-9])
    assert not torch.equal(state.slow - pseudo_gradient(state, theta), theta)
    after = hand_over(state, theta)
    assert torch.equal(after.slow, theta)
    assert after.slow.data_ptr() != theta.data_ptr()


@pytest.mark.parametrize(("learning_rate", "momentum"), [(0.0, 0.9), (math.nan, 0.9), (0.7, 1.0), (0.7, -0.1)])
def test_rule_out_of_range_is_refused(learning_rate: float, momentum: float) -> None:
    with pytest.raises(ValueError, match="out of range"):
        OuterRule(learning_rate, momentum)


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_guard_refuses_what_is_not_finite_from_the_first_step_on(norm: float) -> None:
    assert "not finite" in (pseudo_gradient_fault(norm, []) or "")


def test_guard_compares_with_own_history() -> None:
    history = [1.0] * NORM_HISTORY_MINIMUM
    assert pseudo_gradient_fault(NORM_FACTOR_LIMIT, history) is None
    assert "11 times the usual" in (pseudo_gradient_fault(11.0, history) or "")
    assert pseudo_gradient_fault(11.0, history[1:]) is None, "too little history to judge by"
    assert pseudo_gradient_fault(1.0, [0.0] * NORM_HISTORY) is None, "a run may begin at rest"


def test_guard_accepts_a_lasting_change_in_the_end() -> None:
    history = [1.0] * NORM_HISTORY
    refused = 0
    while pseudo_gradient_fault(100.0, history) is not None:
        refused += 1
        history = [*history, 100.0][-NORM_HISTORY:]
    assert 1 <= refused <= NORM_HISTORY // 2 + 1
