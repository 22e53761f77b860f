"""The written-out Llama: the real module's losses and gradients, whatever its shape and the number of peers."""

import pytest
import torch

from p2ptrain.errors import ManifestError
from p2ptrain.manifest import preset, with_changes
from p2ptrain.sim.stacked import StackedLlama
from p2ptrain.train import flat_model
from p2ptrain.train.model import summed_loss

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


def stacked(model, **changes):
    dotted = {f"model.config.{name}": value for name, value in changes.items()}
    return StackedLlama.of(with_changes(preset("demo", "ab" * 32), SMALL | dotted).model, model.layout)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 1, "tie_word_embeddings": False},
        {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1},
        {"intermediate_size": 50, "vocab_size": 300, "rope_theta": 500.0, "norm_epsilon": 1e-3},
    ],
)
@pytest.mark.parametrize("peers", [1, 3])
def test_gradients_are_the_real_modules(changes, peers):
    model = small(**changes)
    theta = torch.stack([model.theta.detach() * (1 + 0.1 * peer) for peer in range(peers)]).double()
    batch = torch.randint(0, 256, (peers, 5, 18), generator=torch.Generator().manual_seed(2))
    gradient = torch.zeros_like(theta)
    losses = stacked(model, **changes).accumulate(theta, batch, gradient)
    # transformers computes norms and rotations in fp32 even here: hence 3e-6, and not 1e-12.
    module = model.module.double()
    for peer in range(peers):
        views = model.layout.views(theta[peer])
        module.zero_grad()
        module.load_state_dict(views, strict=False)
        loss = summed_loss(module, batch[peer], None)
        loss.backward()
        assert losses[peer].item() == pytest.approx(loss.item(), rel=1e-7)
        slopes = model.layout.views(gradient[peer])
        for name, parameter in module.named_parameters():
            error = torch.linalg.vector_norm(slopes[name] - parameter.grad) / torch.linalg.vector_norm(parameter.grad)
            assert error < 3e-6, name


def test_fp32_on_the_cpu_is_fp64_to_rounding():
    model = small()
    batch = torch.randint(0, 256, (1, 5, 18), generator=torch.Generator().manual_seed(2))
    theta = model.theta.detach()[None]
    single, double = torch.zeros_like(theta), torch.zeros_like(theta).double()
    shape = stacked(model)
    loss = shape.accumulate(theta, batch, single)
    assert loss.item() == pytest.approx(shape.accumulate(theta.double(), batch, double).item(), rel=1e-6)
    assert torch.linalg.vector_norm(single - double) < 1e-5 * torch.linalg.vector_norm(double)


def test_losses_alone_are_those_of_the_backward_pass():
    model = small(num_key_value_heads=2)
    batch = torch.randint(0, 256, (2, 5, 18), generator=torch.Generator().manual_seed(2))
    theta = model.theta.detach().repeat(2, 1)
    shape = stacked(model, num_key_value_heads=2)
    both = shape.accumulate(theta, batch, torch.zeros_like(theta))
    assert shape.losses(theta, batch).tolist() == pytest.approx(both.tolist(), rel=1e-6)


def test_gradients_are_added_with_their_weight():
    model = small()
    batch = torch.randint(0, 256, (1, 6, 18), generator=torch.Generator().manual_seed(2))
    theta = model.theta.detach()[None].double()
    shape = stacked(model)
    whole, parts = torch.zeros_like(theta), torch.zeros_like(theta)
    loss = shape.accumulate(theta, batch, whole)
    pieces = [shape.accumulate(theta, piece, parts, weight=0.5) for piece in batch.split(4, dim=1)]
    assert sum(pieces).item() == pytest.approx(loss.item(), rel=1e-12)
    assert torch.allclose(parts, 0.5 * whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {"model.architecture": "Qwen2ForCausalLM"},
        {"model.config.hidden_act": "relu"},
        {"model.config.hidden_size": 24, "model.config.num_attention_heads": 2, "model.config.num_key_value_heads": 2},
    ],
)
def test_other_models_are_refused(changes):
    description = with_changes(preset("demo", "ab" * 32), changes).model
    with pytest.raises(ManifestError, match="learner lm does not compute"):
        StackedLlama.of(description, small().layout)
