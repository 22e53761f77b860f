"""Activations and gradients between stages: how far each form is from the numbers."""

import pytest
import torch

from p2ptrain.train.boundary import Boundary

LARGEST_ERROR = {"fp32": 0.0, "bf16": 2**-8, "int8": 0.5 / 127 + 1e-6}
ALL = pytest.mark.parametrize("name", LARGEST_ERROR)


def error(found, wanted):
    """Return the largest error of each token over its largest number."""
    return float(((found - wanted).detach().abs().amax(-1) / wanted.detach().abs().amax(-1)).max())


@ALL
@pytest.mark.parametrize("width", [8, 33])
def test_numbers_arrive(name, width):
    boundary = Boundary(name)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 3, width, generator=generator) * torch.logspace(-30, 30, 3)[:, None]
    sent = boundary.pack(hidden.requires_grad_())
    assert (sent.dtype, sent.shape) == (boundary.dtype, (2, 3, boundary.elements(width)))
    assert sent.is_contiguous()
    assert not sent.requires_grad
    assert sent.nbytes == 6 * boundary.bytes_per_token(width)
    found = boundary.unpack(sent)
    assert found.dtype == torch.float32
    assert error(found, hidden) <= LARGEST_ERROR[name]


@ALL
def test_zeros_stay_zeros(name):
    boundary = Boundary(name)
    assert not boundary.unpack(boundary.pack(torch.zeros(2, 8))).any()


@ALL
def test_numbers_that_are_not_finite_do_not_become_finite(name):
    """Check that a broken gradient is seen by the norm on the other side, so that the step is skipped."""
    boundary = Boundary(name)
    for broken in (torch.nan, torch.inf):
        values = torch.ones(2, 8)
        values[0, 3] = broken
        found = boundary.unpack(boundary.pack(values))
        assert not found[0].isfinite().all()
        assert torch.equal(found[1], values[1])


def test_int8_takes_a_byte_a_number():
    assert Boundary("int8").bytes_per_token(2048) == 2048 + 4
