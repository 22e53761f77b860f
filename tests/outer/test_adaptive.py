"""DiLoCoX's adaptive compression: rank and H follow the mean of the last effective ranks, within their bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.outer.adaptive import RANK_WINDOW, rank_and_inner_steps

ranks = st.floats(0.0, 1e4)
windows = st.lists(ranks, min_size=RANK_WINDOW, max_size=RANK_WINDOW)


FIRST = [40.0] * RANK_WINDOW


@pytest.mark.parametrize(
    ("effective_rank", "expected"),
    [
        (90.0, (16, 30)),  # never more than at the start
        (40.0, (16, 30)),
        (39.0, (16, 30)),  # 15.6, rounded up
        (20.0, (8, 15)),
        (18.0, (8, 15)),  # 7.2
        (10.0, (4, 8)),  # H 7.5
        (1.0, (1, 2)),  # H 1.875
        (0.0, (1, 2)),  # nothing left to send
    ],
)
def test_both_shrink_together_and_in_proportion_to_the_first_window(
    effective_rank: float, expected: tuple[int, int]
) -> None:
    assert rank_and_inner_steps([*FIRST, *[effective_rank] * RANK_WINDOW], 16, 30) == expected


def test_the_first_ones_hold_while_there_is_one_window_only() -> None:
    for known in range(RANK_WINDOW + 1):
        assert rank_and_inner_steps([2.0] * known, 16, 30) == (16, 30)


def test_only_the_first_and_the_last_window_count() -> None:
    assert rank_and_inner_steps([*FIRST, *[1.0] * 50, *[20.0] * RANK_WINDOW], 16, 30) == (8, 15)
    assert rank_and_inner_steps([*FIRST, 5.0, *[20.0] * (RANK_WINDOW - 1)], 16, 30) == (7, 13)  # the mean is 17


def test_a_rank_that_only_follows_itself_does_not_sink() -> None:
    """Check peers whose effective rank is always a little below the rank that they send, as of equal peers."""
    found = [0.9 * 48] * RANK_WINDOW
    for _ in range(100):
        rank, _ = rank_and_inner_steps(found, 48, 10)
        found.append(0.9 * rank)
    assert rank == 48


def test_at_least_one_inner_step() -> None:
    assert rank_and_inner_steps([*FIRST, *[0.1] * RANK_WINDOW], 64, 10) == (1, 1)


@given(first=windows, last=windows, rank=st.integers(1, 4096), inner_steps=st.integers(1, 100_000))
def test_within_bounds_and_bytes_an_inner_step_as_before(
    first: list[float], last: list[float], rank: int, inner_steps: int
) -> None:
    found, steps = rank_and_inner_steps([*first, *last], rank, inner_steps)
    assert 1 <= found <= rank
    assert 1 <= steps <= inner_steps
    assert abs(steps - inner_steps * found / rank) <= 0.5 or steps == 1


@given(first=windows, last=windows, more=windows)
def test_more_components_never_mean_a_lower_rank_or_a_smaller_h(
    first: list[float], last: list[float], more: list[float]
) -> None:
    larger = [one + other for one, other in zip(last, more, strict=True)]
    rank, steps = rank_and_inner_steps([*first, *last], 100, 30)
    higher, longer = rank_and_inner_steps([*first, *larger], 100, 30)
    assert higher >= rank
    assert longer >= steps


@pytest.mark.parametrize(
    "wrong", [([math.nan], 16, 30), ([math.inf], 16, 30), ([-1.0], 16, 30), ([], 0, 30), ([], 16, 0)]
)
def test_numbers_out_of_range_are_refused(wrong: tuple[list[float], int, int]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        rank_and_inner_steps(*wrong)
