"""T9: the straggler rule gives the values that GASLoC reports, and never takes longer than the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.straggler import straggler_inner_steps


@pytest.mark.parametrize(
    ("bandwidth_share", "partners", "expected"),
    [(0.1, 1, 15), (0.1, 2, 1), (0.2, 1, 23), (0.2, 2, 17), (1.0, 1, 30), (1.0, 2, 30)],
)
def test_gasloc_figures(bandwidth_share: float, partners: int, expected: int) -> None:
    assert straggler_inner_steps(30, partners, 5 / 3, bandwidth_share) == expected


@given(
    st.integers(1, 1000), st.integers(0, 8), st.floats(0, 100, allow_nan=False), st.floats(0.001, 1, allow_nan=False)
)
def test_the_phase_and_the_exchange_take_as_long_as_the_others(
    inner_steps: int, partners: int, exchange_steps: float, share: float
) -> None:
    own = straggler_inner_steps(inner_steps, partners, exchange_steps, share)
    assert 1 <= own <= inner_steps
    others = inner_steps + partners * exchange_steps
    if own > 1:  # at the minimum of one step the peer is late in any case
        assert own + partners * exchange_steps / share <= others + 0.5 + 1e-6 * others


def test_a_slower_line_never_trains_more() -> None:
    steps = [straggler_inner_steps(30, 1, 5 / 3, share / 100) for share in range(1, 101)]
    assert steps == sorted(steps)


@pytest.mark.parametrize(
    "wrong", [(0, 1, 1.0, 0.5), (30, -1, 1.0, 0.5), (30, 1, -1.0, 0.5), (30, 1, 1.0, 0.0), (30, 1, 1.0, 1.5)]
)
def test_numbers_out_of_range_are_refused(wrong: tuple[int, int, float, float]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        straggler_inner_steps(*wrong)
