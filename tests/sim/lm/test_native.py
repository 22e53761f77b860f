"""The compiled Llama has the losses and gradients of the one in torch."""

import os

import pytest
import torch

from p2ptrain.manifest import preset, with_changes
from p2ptrain.train.compiling import compiler_program
from p2ptrain.train.model import flat_model
from sim.lm import native
from sim.lm.native import NativeLlama
from sim.lm.stacked import StackedLlama

pytestmark = pytest.mark.skipif(compiler_program(os.environ) is None, reason="there is no C++ compiler")

TOKENS = 32
SMALL = {
    "model.config.hidden_size": 64,
    "model.config.intermediate_size": 96,
    "model.config.num_hidden_layers": 2,
    "model.config.num_attention_heads": 4,
    "model.config.num_key_value_heads": 4,
}


def small(**changes):
    """Return shape and weights of a model, away from its initial point, where norms are ones and scores nearly zero."""
    dotted = {f"model.config.{name}": value for name, value in changes.items()}
    description = with_changes(preset("demo", "ab" * 32), SMALL | dotted).model
    model = flat_model(description, 3, torch.device("cpu"))
    theta = model.theta.detach()
    theta.add_(0.2 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(1)))
    return StackedLlama.of(description, model.layout), theta


def tokens(count, most=256):
    return torch.randint(0, most, (count, TOKENS + 1), generator=torch.Generator().manual_seed(2))


def compiled(shape):
    made = NativeLlama.of(shape, TOKENS)
    assert made is not None
    return made


def slope(shape, theta, batch, weight=1.0):
    """Return gradient and loss by the compiled code."""
    gradient = torch.zeros_like(theta)
    return gradient, compiled(shape).accumulate(theta, gradient, batch, weight)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1},
        {"intermediate_size": 640, "vocab_size": 1024, "rope_theta": 500.0, "norm_epsilon": 1e-3},
    ],
)
def test_gradients_are_those_of_torch_in_fp64(changes):
    """Check every parameter; the third shape has sums of more terms than one panel holds."""
    shape, theta = small(**changes)
    batch, exact = tokens(3, changes.get("vocab_size", 256)), torch.zeros_like(theta, dtype=torch.float64)
    loss = shape.accumulate(shape.parameters(theta.double()), shape.parameters(exact), batch)
    gradient, found = slope(shape, theta, batch)
    assert found == pytest.approx(loss.item(), rel=1e-6)
    expected = shape.layout.views(exact)
    for name, part in shape.layout.views(gradient).items():
        assert torch.linalg.vector_norm(part - expected[name]) < 1e-5 * torch.linalg.vector_norm(expected[name]), name


def test_losses_alone_are_those_of_the_backward_pass():
    shape, theta = small()
    assert compiled(shape).loss(theta, tokens(5)) == slope(shape, theta, tokens(5))[1]


def test_gradients_of_many_sequences_are_added_with_their_weight():
    """Check more sequences than are computed at once."""
    shape, theta = small()
    batch = tokens(2 * native.PASS_TOKENS // TOKENS + 1)
    whole, loss = slope(shape, theta, batch)
    parts = torch.zeros_like(theta)
    losses = [compiled(shape).accumulate(theta, parts, piece, 0.5) for piece in batch.split(4)]
    assert sum(losses) == pytest.approx(loss, rel=1e-12)
    assert torch.linalg.vector_norm(parts - 0.5 * whole) < 1e-6 * torch.linalg.vector_norm(parts)


def test_a_hopeless_token_costs_what_it_costs():
    """Check a probability that underflows to zero: the loss is still that of torch."""
    shape, theta = small()
    theta.mul_(30)
    batch = tokens(2)
    _, loss = slope(shape, theta, batch)
    assert loss > 2 * TOKENS * 103  # -log of the smallest fp32 above zero
    assert loss == pytest.approx(shape.losses(shape.parameters(theta), batch).item(), rel=1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_show_in_loss_and_gradient(value):
    shape, theta = small()
    theta.fill_(value)
    gradient, loss = slope(shape, theta, tokens(2))
    assert loss != loss
    assert not gradient.isfinite().all()


@pytest.mark.parametrize(
    ("tokens_each", "changes"),
    [
        (24, {}),
        (32, {"hidden_size": 48}),
        (32, {"intermediate_size": 80}),
        (32, {"vocab_size": 300}),
        (32, {"num_attention_heads": 16, "num_key_value_heads": 16}),
    ],
)
def test_other_shapes_are_left_to_torch(tokens_each, changes):
    shape, _ = small(**changes)
    assert NativeLlama.of(shape, tokens_each) is None


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_working_compiler_torch_computes(compiler, monkeypatch):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(native, "library", native.library.__wrapped__)
    assert NativeLlama.of(small()[0], TOKENS) is None
