"""A flattened module is equivalent to the original: equal numbers, tied parameters, shared memory."""

import copy

import pytest
import torch
from torch import Tensor, nn

from p2ptrain.outer.flat import FlatLayout, flatten_module


class TiedModel(nn.Module):
    """Module with odd sizes, so that every parameter but the first needs padding before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.hidden = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.hidden(self.embedding(tokens))))
        return logits


@pytest.fixture
def model() -> TiedModel:
    torch.manual_seed(0)
    return TiedModel()


def test_layout_is_aligned_and_counts_tied_parameters_once(model: TiedModel) -> None:
    layout = FlatLayout.of(model)
    assert layout.names == ("embedding.weight", "hidden.weight", "hidden.bias")
    assert layout.shapes == ((7, 5), (5, 5), (5,))
    assert layout.offsets == (0, 48, 80)
    assert layout.total == 96
    assert layout.parameter_count == 35 + 25 + 5


def test_flattening_keeps_values_and_ties_and_shares_memory(model: TiedModel) -> None:
    before = copy.deepcopy(model.state_dict())
    flat = flatten_module(model)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert model.head.weight is model.embedding.weight
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())

    flat.add_(1.0)
    assert torch.equal(model.hidden.bias, before["hidden.bias"] + 1)
    with torch.no_grad():
        model.hidden.bias.zero_()
    assert torch.equal(FlatLayout.of(model).views(flat)["hidden.bias"], torch.zeros(5))


def test_padding_is_zero(model: TiedModel) -> None:
    flat = flatten_module(model)
    for view in FlatLayout.of(model).views(flat).values():
        view.fill_(1.0)
    assert int(flat.count_nonzero()) == FlatLayout.of(model).parameter_count


def test_layout_survives_flattening(model: TiedModel) -> None:
    layout = FlatLayout.of(model)
    flatten_module(model)
    assert FlatLayout.of(model) == layout


def test_training_a_flattened_module_is_bitwise_the_same(model: TiedModel) -> None:
    flattened = copy.deepcopy(model)
    flat = flatten_module(flattened)
    tokens = torch.arange(7)
    for module in (model, flattened):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(tokens), tokens.flip(0)).backward()
            optimizer.step()
    views = FlatLayout.of(flattened).views(flat)
    assert all(torch.equal(views[name], parameter) for name, parameter in model.named_parameters())


def test_views_rebuild_the_module_elsewhere(model: TiedModel) -> None:
    flat = flatten_module(model)
    other = TiedModel()
    other.load_state_dict(FlatLayout.of(model).views(flat.clone()), strict=False)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_what_cannot_be_flattened_is_refused(model: TiedModel) -> None:
    with pytest.raises(ValueError, match="fp32 on one device"):
        flatten_module(model.double())
    with pytest.raises(ValueError, match="no parameters"):
        flatten_module(nn.Tanh())
    with pytest.raises(ValueError, match=r"\[96\], not \[95\]"):
        FlatLayout.of(model).views(torch.zeros(95))
