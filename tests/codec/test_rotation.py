"""The rotation is H S, exact for integers, and its randomness is frozen."""

import pytest
import torch

from p2ptrain.codec.rotation import rotated, signs_and_dither

SIZES = [8, 32, 64, 512, 1024]


@pytest.mark.parametrize("size", SIZES)
def test_the_matrix_is_hadamards(size: int) -> None:
    matrix = rotated(torch.eye(size))
    both = torch.arange(size)[:, None] & torch.arange(size)
    odd = sum((both >> place) & 1 for place in range(10)) % 2
    assert torch.equal(matrix, (1 - 2 * odd).float())
    assert torch.equal(rotated(matrix), size * torch.eye(size))


@pytest.mark.parametrize("size", SIZES)
def test_integers_are_rotated_exactly(size: int) -> None:
    """Check the largest codes: no order of summation and no fused operation can change the result."""
    codes = torch.randint(-128, 128, (5, size), generator=torch.Generator().manual_seed(1))
    matrix = rotated(torch.eye(size)).long()
    assert torch.equal(rotated(codes.float()).long(), codes @ matrix)
    assert torch.equal(rotated(-codes.float()), -rotated(codes.float()))


def test_one_element_becomes_equally_large_everywhere() -> None:
    blocks = torch.zeros(1, 1024)
    blocks[0, 77] = 3.0
    assert torch.equal(rotated(blocks).abs(), torch.full((1, 1024), 3.0))


def test_signs_and_dither_are_frozen() -> None:
    """Check that they are equal on every machine and in every version of torch: they are part of the protocol."""
    signs, dither = signs_and_dither(b"seed", 1024)
    assert signs[:8].tolist() == [-1, 1, -1, 1, -1, 1, -1, -1]
    assert (dither[:3] * 65536).tolist() == [-381, 24359, -9097]
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert abs(float(signs.mean())) < 0.1
    assert -0.5 <= float(dither.min()) < -0.49
    assert 0.49 < float(dither.max()) < 0.5
    assert abs(float(dither.mean())) < 0.03
    assert not torch.equal(signs_and_dither(b"other", 1024)[0], signs)
