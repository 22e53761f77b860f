"""DiLoCoX's adaptive compression: rank and H follow the mean of the last effective ranks, within their bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.outer.adaptive import RANK_WINDOW, rank_and_inner_steps

ranks = st.floats(0.0, 1e4)
windows = st.lists(ranks, min_size=RANK_WINDOW, max_size=RANK_WINDOW)


@pytest.mark.parametrize(
    ("effective_rank", "expected"),
    [
        (40.0, (16, 30)),  # never more than at first
        (16.0, (16, 30)),
        (15.5, (16, 30)),  # rounded up: 16 components that are nearly alike
        (8.0, (8, 15)),
        (7.2, (8, 15)),
        (4.0, (4, 8)),  # 7.5
        (0.5, (1, 2)),  # 1.875
        (0.0, (1, 2)),  # nothing to be done any more
    ],
)
def test_both_shrink_together(effective_rank: float, expected: tuple[int, int]) -> None:
    assert rank_and_inner_steps([effective_rank] * RANK_WINDOW, 16, 30) == expected


def test_the_first_ones_hold_until_the_window_is_full() -> None:
    for known in range(RANK_WINDOW):
        assert rank_and_inner_steps([2.0] * known, 16, 30) == (16, 30)
    assert rank_and_inner_steps([2.0] * RANK_WINDOW, 16, 30) == (2, 4)


def test_only_the_last_of_the_window_count() -> None:
    assert rank_and_inner_steps([1.0] * 50 + [8.0] * RANK_WINDOW, 16, 30) == (8, 15)
    assert rank_and_inner_steps([1.0] + [8.0] * (RANK_WINDOW - 1), 16, 30) == (7, 13)  # the mean is 6.6


def test_at_least_one_inner_step() -> None:
    assert rank_and_inner_steps([1.0] * RANK_WINDOW, 64, 10) == (1, 1)


@given(window=windows, rank=st.integers(1, 4096), inner_steps=st.integers(1, 100_000))
def test_within_bounds_and_bytes_an_inner_step_as_before(window: list[float], rank: int, inner_steps: int) -> None:
    found, steps = rank_and_inner_steps(window, rank, inner_steps)
    assert 1 <= found <= rank
    assert 1 <= steps <= inner_steps
    assert found == rank or found >= math.fsum(window) / RANK_WINDOW
    assert abs(steps - inner_steps * found / rank) <= 0.5 or steps == 1


@given(window=windows, more=st.lists(ranks, min_size=RANK_WINDOW, max_size=RANK_WINDOW))
def test_more_components_never_mean_a_lower_rank_or_a_smaller_h(window: list[float], more: list[float]) -> None:
    larger = [one + other for one, other in zip(window, more, strict=True)]
    rank, steps = rank_and_inner_steps(window, 100, 30)
    higher, longer = rank_and_inner_steps(larger, 100, 30)
    assert higher >= rank
    assert longer >= steps


@pytest.mark.parametrize(
    "wrong", [([math.nan], 16, 30), ([math.inf], 16, 30), ([-1.0], 16, 30), ([], 0, 30), ([], 16, 0)]
)
def test_numbers_out_of_range_are_refused(wrong: tuple[list[float], int, int]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        rank_and_inner_steps(*wrong)
