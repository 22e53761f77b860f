"""Step widths suit normally distributed differences, and fills measure their norms."""

import math

import pytest
import torch

from p2ptrain.codec.steps import FILL_UNIT, FULL, REACH, WRAPPED, mean_code, next_shape

BITS = sorted(REACH)
POINTS = torch.linspace(-8, 8, 4001, dtype=torch.float64)
DENSITY = torch.exp(-POINTS.square() / 2) / torch.exp(-POINTS.square() / 2).sum()


def codes(bits: int, norm: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the two possible codes of each point, for a standard deviation of ``norm`` steps, and their chances."""
    half = 2 ** (bits - 1)
    places = POINTS * norm
    low, share = places.floor(), places - places.floor()
    return [((c + half).remainder(2 * half) - half, DENSITY * p) for c, p in ((low, 1 - share), (low + 1, share))]


def remainder(bits: int, reach: float) -> float:
    """Return the share of the squared difference that an exchange leaves if the norm is as predicted."""
    norm, half = 2 ** (-reach / 4), 2 ** (bits - 1)
    return sum(
        float((chance * (torch.where(code == -half, 0.0, code) / norm - POINTS).square()).sum())
        for code, chance in codes(bits, norm)
    )


def predicted(bits: int, reach: float) -> float:
    """Return the mean remainder for norms predicted within a quarter octave (standard deviation)."""
    errors = [each / 2 for each in range(-5, 6)]
    chances = [math.exp(-each * each / 2) for each in errors]
    return sum(p * remainder(bits, reach + each) for each, p in zip(errors, chances, strict=True)) / sum(chances)


@pytest.mark.parametrize("bits", BITS)
def test_widths_are_a_quarter_octave_wider_than_the_least_error(bits: int) -> None:
    errors = {change: predicted(bits, REACH[bits] + change) for change in (-3, -2, -1, 0, 1)}
    assert errors[-1] <= 1.01 * min(errors.values())
    assert errors[-1] == pytest.approx({2: 0.60, 3: 0.20, 4: 0.06, 8: 0.0005}[bits], rel=0.1)


@pytest.mark.parametrize("bits", BITS)
def test_the_share_that_arrives(bits: int) -> None:
    norm, half = 2 ** (-REACH[bits] / 4), 2 ** (bits - 1)
    arriving = sum(
        float((chance * torch.where(code == -half, 0.0, code) / norm * POINTS).sum())
        for code, chance in codes(bits, norm)
    )
    assert arriving == pytest.approx({2: 0.82}.get(bits, 1.0), abs=0.006)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("norm", [0.1, 1.0, 3.0])
def test_the_mean_code_is_that_of_a_normal_difference(bits: int, norm: float) -> None:
    expected = sum(float((chance * code.abs()).sum()) for code, chance in codes(bits, norm))
    assert mean_code(bits, norm) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("quarters", [-6, -1, 0, 2])
def test_a_fill_tells_the_norm(bits: int, quarters: int) -> None:
    """Check blocks whose norm is some quarter octaves from the one that was agreed on."""
    norm = 2 ** ((quarters - REACH[bits]) / 4)
    fill = round(mean_code(bits, norm) / 2 ** (bits - 2) * FILL_UNIT)
    assert fill <= FULL
    after = next_shape(bytes([100]), bytes([100]), torch.tensor([fill], dtype=torch.uint8), bits, pace=50)
    assert list(after) == [100 + quarters]


@pytest.mark.parametrize("bits", BITS)
def test_no_exchange_moves_a_norm_by_more_than_its_pace(bits: int) -> None:
    fills = torch.tensor([0, FULL, WRAPPED], dtype=torch.uint8)
    after = next_shape(bytes([100, 100, 100]), bytes([90, 110, 110]), fills, bits, pace=2)
    assert list(after) == [98, 102, 102]
