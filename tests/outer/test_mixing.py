"""Displacements cancel, do not change the pseudo-gradient, and commute with the outer step as the design says."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.outer.mixing import (
    NORM_CHUNK,
    displaced,
    displacement,
    l2_distance,
    l2_norm,
    late_momentum,
    late_pseudo_gradient,
)
from p2ptrain.outer.step import OuterRule, OuterState, initial_state, outer_step, pseudo_gradient

weights = st.floats(0.05, 20.0)
radii = st.one_of(st.just(math.inf), st.floats(0.0, 100.0))


def random(elements: int, seed: int) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def share(weight_mine: float, weight_theirs: float) -> float:
    """Return the share of the difference by which the first side moves, as ``swarm.messages.Terms.share`` does."""
    return weight_theirs / (weight_mine + weight_theirs)


@settings(max_examples=50)
@given(st.integers(0, 2**31), st.floats(1e-3, 1e3), radii)
def test_equal_weights_cancel_bitwise(seed: int, weight: float, radius: float) -> None:
    difference = random(999, seed)
    a = share(weight, weight)
    assert torch.equal(displacement(difference, a, radius), -displacement(-difference, a, radius))


@settings(max_examples=50)
@given(st.integers(0, 2**31), weights, weights, radii)
def test_unequal_weights_cancel_to_rounding(seed: int, w_i: float, w_j: float, radius: float) -> None:
    """Check to rounding: each side rounds the factor and the product to fp32, four times 2**-24 together."""
    difference = random(999, seed)
    dx_i = displacement(difference, share(w_i, w_j), radius)
    dx_j = displacement(-difference, share(w_j, w_i), radius)
    residue = w_i * dx_i.double() + w_j * dx_j.double()
    assert bool((residue.abs() <= 2.4e-7 * (w_i * dx_i.double()).abs() + 1e-30).all())


def test_clip_shortens_without_turning() -> None:
    difference = torch.tensor([3.0, 4.0])
    torch.testing.assert_close(displacement(difference, 0.5, 1.0), torch.tensor([0.3, 0.4]))
    assert torch.equal(displacement(difference, 0.5, 5.0), torch.tensor([1.5, 2.0]))
    assert torch.equal(displacement(difference, 0.5, 0.0), torch.zeros(2))
    assert torch.equal(displacement(torch.zeros(2), 0.5, 0.0), torch.zeros(2))


@pytest.mark.parametrize("arguments", [(-0.1, 1.0), (1.1, 1.0), (math.nan, 1.0), (0.5, -1.0), (0.5, math.nan)])
def test_displacement_out_of_range_is_refused(arguments: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="must be within"):
        displacement(torch.ones(2), *arguments)


def test_norm_of_many_chunks() -> None:
    vector = random(200_001, 3)
    assert l2_norm(vector) == pytest.approx(float(torch.linalg.vector_norm(vector.double())), rel=1e-6)
    assert l2_norm(-vector) == l2_norm(vector)
    vector[150_000] = math.nan
    assert math.isnan(l2_norm(vector))


@pytest.mark.parametrize("elements", [0, 1, NORM_CHUNK, 3 * NORM_CHUNK + 7])
def test_a_distance_is_the_norm_of_the_difference_to_the_last_bit(elements):
    one, other = (torch.randn(elements, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    assert l2_distance(one, other) == l2_norm(one - other)


@settings(max_examples=30)
@given(st.integers(0, 2**31))
def test_t4_a_displacement_in_mid_phase_leaves_the_pseudo_gradient_alone(seed: int) -> None:
    state = initial_state(random(500, seed))
    theta = state.slow + 0.01 * random(500, seed + 1)
    before = pseudo_gradient(state, theta)
    dx = displacement(random(500, seed + 2), 0.5)
    after = pseudo_gradient(displaced(state, dx), theta + dx)
    rounding = 2**-23 * float(torch.stack([state.slow, theta, dx]).abs().max()) * 4
    torch.testing.assert_close(after, before, rtol=0, atol=rounding)


def test_displaced_is_a_new_state_and_keeps_the_momentum() -> None:
    state = OuterState(torch.ones(3), torch.full((3,), 7.0))
    after = displaced(state, torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(after.slow, torch.tensor([2.0, 3.0, 4.0]))
    assert after.momentum is state.momentum
    assert torch.equal(state.slow, torch.ones(3))


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.floats(0.0, 0.95), st.booleans(), st.floats(0.0, 1.0))
def test_t11_both_streams_with_one_partner_mix_all_that_a_peer_has(
    seed: int, momentum: float, nesterov: bool, a: float
) -> None:
    """Check that mixing x and g by the share a equals a step from the mixed x and b by the mixed g.

    Only b's own history differs, which is never sent.
    """
    rule = OuterRule(0.7, momentum, nesterov)
    mine, theirs = (OuterState(random(50, seed + n).double(), random(50, seed + n + 5).double()) for n in (0, 1))
    g, their_g = (random(50, seed + n).double() for n in (2, 3))
    after, their_after = outer_step(mine, g, rule), outer_step(theirs, their_g, rule)
    dx, dg = a * (their_after.slow - after.slow), a * (their_g - g)
    late = late_momentum(displaced(after, dx), dg)

    mixed = OuterState(*(x + a * (y - x) for x, y in zip(mine, theirs, strict=True)))
    whole = outer_step(mixed, g + dg, rule)
    torch.testing.assert_close(late.slow, whole.slow, rtol=0, atol=1e-12)
    own_past = momentum * (mixed.momentum - mine.momentum)
    torch.testing.assert_close(late.momentum, whole.momentum - own_past, rtol=0, atol=1e-12)


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.floats(0.0, 0.95), st.booleans())
def test_t11_a_late_pseudo_gradient_equals_the_blocking_mix(seed: int, momentum: float, nesterov: bool) -> None:
    """Check two further steps, to compare the momentum buffer and not the weights alone."""
    rule = OuterRule(0.7, momentum, nesterov)
    state = OuterState(random(200, seed).double(), random(200, seed + 1).double())
    g, correction, next_g = (random(200, seed + place).double() for place in (2, 3, 4))

    blocking = outer_step(state, g + correction, rule)
    own = outer_step(state, g, rule)
    late, follow = late_pseudo_gradient(own, correction, rule)
    torch.testing.assert_close(late.slow, blocking.slow, rtol=0, atol=1e-13)
    torch.testing.assert_close(own.slow + follow, late.slow, rtol=0, atol=0)
    torch.testing.assert_close(
        outer_step(late, next_g, rule).slow, outer_step(blocking, next_g, rule).slow, rtol=0, atol=1e-13
    )
