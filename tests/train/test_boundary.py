"""Activations and gradients between stages: how far each form is from the numbers."""

import pytest
import torch
from team_rank import CPU, Case, corpus, stages

from p2ptrain.train.boundary import Boundary
from p2ptrain.train.cross_entropy import summed_cross_entropy
from p2ptrain.train.stages import StagePass, stage_model

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


class Through(torch.autograd.Function):
    """Passes activations forward and gradients backward through a form."""

    @staticmethod
    def forward(ctx, values, form):
        ctx.form = form
        return form(values)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.form(gradient), None


def loss_after(form, steps=60):
    """Return the mean loss of the last ten steps of a model of three stages."""
    case = Case(ranks=3)
    manifest = case.manifest
    models = [stage_model(manifest.model, 1, CPU, stage) for stage in stages(case)]
    passes = [StagePass(model, None) for model in models]
    optimizer = torch.optim.AdamW([each for model in models for each in model.flat.module.parameters()], 3e-3)
    text, losses = corpus(manifest), []
    for step in range(steps):
        batch = text.batch([(step * 4 + each) % text.train_sequences for each in range(4)])
        hidden = passes[0](batch[:, :-1])
        for each in passes[1:]:
            hidden = each(Through.apply(hidden, form))
        loss = summed_cross_entropy(hidden.flatten(0, 1), models[-1].output, batch[:, 1:].flatten())
        loss = loss / batch[:, 1:].numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


def test_int8_costs_no_loss_and_four_bits_without_scale_do():
    def through(name):
        boundary = Boundary(name)
        return lambda values: boundary.unpack(boundary.pack(values))

    exact, tolerance = loss_after(through("fp32")), 0.005
    assert exact < 2.5, "it learns"
    assert loss_after(through("int8")) == pytest.approx(exact, rel=tolerance)
    assert loss_after(lambda values: (values * 7).round().clamp(-8, 7) / 7) != pytest.approx(exact, rel=tolerance)
