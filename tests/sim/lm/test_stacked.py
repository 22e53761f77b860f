"""The explicit Llama has the real module's losses and gradients, for every shape and number of peers."""

import pytest
import torch

from p2ptrain.manifest import preset, with_changes
from p2ptrain.train.model import flat_model, summed_loss
from sim.lm import kernels
from sim.lm.stacked import StackedLlama

CPU = torch.device("cpu")
SMALL = {
    "model.config.hidden_size": 32,
    "model.config.intermediate_size": 48,
    "model.config.num_hidden_layers": 2,
    "model.config.num_attention_heads": 4,
    "model.config.num_key_value_heads": 4,
}


def small(**changes):
    dotted = {f"model.config.{name}": value for name, value in changes.items()}
    model = flat_model(with_changes(preset("demo", "ab" * 32), SMALL | dotted).model, 3, CPU)
    generator = torch.Generator().manual_seed(1)
    # Away from the initial point, where norms are ones and scores nearly zero.
    model.theta.data.add_(0.2 * torch.randn(model.theta.shape, generator=generator))
    return model


def tokens(*shape):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(2))


def slope(shape, theta, batch):
    """Return the gradient in the form of theta, and the losses."""
    gradient = torch.zeros_like(theta)
    losses = shape.accumulate(shape.parameters(theta), shape.parameters(gradient), batch)
    return gradient, losses


def stacked(model, **changes):
    dotted = {f"model.config.{name}": value for name, value in changes.items()}
    return StackedLlama.of(with_changes(preset("demo", "ab" * 32), SMALL | dotted).model, model.layout)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1},
        {"intermediate_size": 50, "vocab_size": 300, "rope_theta": 500.0, "norm_epsilon": 1e-3},
    ],
)
@pytest.mark.parametrize("peers", [(), (1,), (3,)])
def test_gradients_are_the_real_modules(changes, peers):
    model = small(**changes)
    factors = 1 + 0.1 * torch.arange(*(peers or (1,)))
    theta = (model.theta.detach() * factors[:, None]).view(*peers, -1).double()
    batch = tokens(*peers, 5, 18)
    gradient, losses = slope(stacked(model, **changes), theta, batch)
    # transformers computes norms and rotations in fp32 even here: hence 3e-6, and not 1e-12.
    module = model.module.double()
    for row, sequences, by_row, found in zip(
        theta.view(-1, model.layout.total), batch.view(-1, 5, 18), gradient.view(-1, model.layout.total),
        losses.view(-1), strict=True,
    ):  # fmt: skip
        module.zero_grad()
        module.load_state_dict(model.layout.views(row), strict=False)
        loss = summed_loss(module, sequences, None)
        loss.backward()
        assert found.item() == pytest.approx(loss.item(), rel=1e-7)
        slopes = model.layout.views(by_row)
        for name, parameter in module.named_parameters():
            error = torch.linalg.vector_norm(slopes[name] - parameter.grad) / torch.linalg.vector_norm(parameter.grad)
            assert error < 3e-6, name


@pytest.mark.parametrize("onednn", [False, True])
def test_fp32_is_fp64_to_rounding(onednn, monkeypatch):
    monkeypatch.setattr(kernels, "ONEDNN", onednn and kernels.ONEDNN)
    model = small()
    shape, theta, batch = stacked(model), model.theta.detach(), tokens(5, 18)
    single, loss = slope(shape, theta, batch)
    double, exact = slope(shape, theta.double(), batch)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
    assert torch.linalg.vector_norm(single - double) < 1e-5 * torch.linalg.vector_norm(double)


@pytest.mark.parametrize("peers", [(), (2,)])
def test_losses_alone_are_those_of_the_backward_pass(peers):
    model = small()
    shape, batch = stacked(model), tokens(*peers, 5, 18)
    theta = model.theta.detach().expand(*peers, -1).clone()
    alone = shape.losses(shape.parameters(theta), batch)
    assert alone.tolist() == pytest.approx(slope(shape, theta, batch)[1].tolist(), rel=1e-6)


def test_gradients_are_added_with_their_weight():
    model = small()
    shape, theta, batch = stacked(model), model.theta.detach().double(), tokens(6, 18)
    whole, loss = slope(shape, theta, batch)
    parts = torch.zeros_like(theta)
    weights, slopes = shape.parameters(theta), shape.parameters(parts)
    pieces = [shape.accumulate(weights, slopes, piece, weight=0.5) for piece in batch.split(4)]
    assert sum(pieces).item() == pytest.approx(loss.item(), rel=1e-12)
    assert torch.allclose(parts, 0.5 * whole, rtol=1e-9, atol=1e-12)


def test_a_hopeless_token_costs_what_it_costs():
    """Check a probability that underflows to zero: its logarithm does not, and the loss equals the real module's."""
    model = small()
    model.theta.data.mul_(30)
    shape, batch = stacked(model), tokens(2, 18)
    _, loss = slope(shape, model.theta.detach(), batch)
    assert loss.item() > 36 * 103  # -log of the smallest fp32 above zero
    assert loss.item() == pytest.approx(summed_loss(model.module, batch, None).item(), rel=1e-3)
