"""Cross entropy in chunks of tokens equals the plain one, and never holds all logits."""

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from p2ptrain.train import cross_entropy
from p2ptrain.train.cross_entropy import summed_cross_entropy

N, D, V = 50, 12, 37


def drawn(dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, D, dtype=dtype, generator=generator, requires_grad=True)
    weight = torch.randn(V, D, dtype=dtype, generator=generator, requires_grad=True)
    return hidden, weight, torch.randint(V, (N,), generator=generator)


def plain(hidden, weight, targets):
    return functional.cross_entropy(hidden @ weight.T, targets, reduction="sum")


@pytest.mark.parametrize("tokens", [1, 7, 25, N, 1000])
def test_chunks_equal_the_whole(monkeypatch, tokens):
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", tokens * V)
    ours, plains = [], []
    for loss, results in ((summed_cross_entropy, ours), (plain, plains)):
        hidden, weight, targets = drawn()
        value = loss(hidden, weight, targets) / 7
        value.backward()
        results += [value, hidden.grad, weight.grad]
    for one, other in zip(ours, plains, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("compute", [None, torch.bfloat16])
def test_aligned_rows_change_no_result(monkeypatch, compute):
    """Check V = 37 computed as 40 words, as on a card."""
    results = []
    for multiple in (1, 8):
        monkeypatch.setattr(cross_entropy, "_padded", lambda weight, _, multiple=multiple: padded(weight, multiple))
        hidden, weight, targets = drawn(torch.float64 if compute is None else torch.float32)
        value = summed_cross_entropy(hidden, weight, targets, compute)
        value.backward()
        results.append((value, hidden.grad, weight.grad))
    for one, other in zip(*results, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12 if compute is None else 1e-2)


padded = cross_entropy._padded


def test_rows_are_added_where_they_are_missing_only():
    weight = torch.ones(V, D)
    assert padded(weight, 1) is weight
    assert padded(weight[:36], 4).shape == (36, D)
    assert padded(weight, 64)[V:].tolist() == [[0.0] * D] * (64 - V)


def test_gradients_are_right():
    hidden, weight, targets = drawn()
    assert torch.autograd.gradcheck(lambda h, w: summed_cross_entropy(h, w, targets), (hidden, weight))


def test_without_gradients_none_are_computed(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "scatter_add_", None)
    hidden, weight, targets = drawn()
    with torch.no_grad():
        assert torch.allclose(summed_cross_entropy(hidden, weight, targets), plain(hidden, weight, targets))


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
def test_products_in_16_bits_differ_by_their_rounding_only(compute):
    hidden, weight, targets = drawn(torch.float32)
    value = summed_cross_entropy(hidden, weight, targets, compute)
    expected = plain(hidden, weight, targets)
    assert value.dtype == torch.float32
    assert value != expected
    assert torch.allclose(value, expected, rtol=1e-2)
    gradients = torch.autograd.grad(value, (hidden, weight))
    for ours, exact in zip(gradients, torch.autograd.grad(expected, (hidden, weight)), strict=True):
        assert (ours - exact).norm() < 0.02 * exact.norm()


def test_scaled_gradients_survive_rounding_to_fp16():
    """Check gradients far below fp16's smallest number, of predictions that are nearly sure."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, D, generator=generator) * 0.01
    weight = torch.randn(V, D, generator=generator) * 0.1
    targets = torch.randint(V, (N,), generator=generator)
    hidden[:, 0], weight[:, 0] = 1.0, 0.0
    weight[0, 0], targets[:] = 20.0, 0  # every other word has a probability of about 2e-9

    def gradients(loss, *options, factor=1.0):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        (loss(*leaves, targets, *options) * factor).backward()
        return [leaf.grad / factor for leaf in leaves]

    exact = gradients(summed_cross_entropy)
    late = gradients(summed_cross_entropy, torch.float16, factor=2.0**24)
    assert not late[1][1:].any()
    early = gradients(summed_cross_entropy, torch.float16, 2.0**24, factor=2.0**24)
    for ours, true in zip(early, exact, strict=True):
        assert (ours - true).norm() < 0.01 * true.norm()  # logits near 20 are rounded by up to 2^-7
        assert ((ours - true)[1:]).norm() < 0.01 * true[1:].norm()


def test_a_small_factor_keeps_large_sums_within_fp16():
    """Check a gradient of one weight that sums to 160,000, which fp16 cannot hold, but its mean over the tokens can."""
    tokens = 20_000
    hidden = torch.full((tokens, 1), 16.0, requires_grad=True)
    weight = torch.zeros(2, 1, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.int64)
    (summed_cross_entropy(hidden, weight, targets, torch.float16, 1 / tokens) / tokens).backward()
    assert weight.grad.flatten().tolist() == pytest.approx([-8.0, 8.0], rel=1e-2)


@pytest.mark.parametrize("scale", [1e-3, 256.0])
def test_the_scale_of_rounding_changes_no_result(scale):
    results = []
    for given in (1.0, scale):
        hidden, weight, targets = drawn()
        value = summed_cross_entropy(hidden, weight, targets, None, given) / 7
        value.backward()
        results.append((value, hidden.grad, weight.grad))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def test_a_sure_prediction_has_no_gradient():
    hidden = torch.tensor([[200.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    summed_cross_entropy(hidden, weight, torch.tensor([0])).backward()
    assert hidden.grad.item() == 0.0


class Largest(TorchDispatchMode):
    """Remembers the most elements of a tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_no_tensor_is_as_large_as_all_logits(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", 10 * V)
    hidden, weight, targets = drawn()
    with Largest() as largest:
        summed_cross_entropy(hidden, weight, targets).backward()
    assert largest.elements <= max(10 * V, N * D, V * D)
