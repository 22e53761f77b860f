"""Attention with keys that several query heads share, on cards whose fused kernels do not share them."""

from types import SimpleNamespace

import pytest
import torch

from p2ptrain.train import attention, model
from tests.train.families import DESCRIPTIONS, description

GROUPED = [name for name, config in DESCRIPTIONS.items() if "num_key_value_heads" in config]


@pytest.mark.parametrize("architecture", GROUPED)
def test_repeated_keys_give_the_same_gradient(architecture, monkeypatch):
    module = model.build_module(description(architecture), 5).double()
    batch = torch.arange(34).reshape(2, 17) * 7 % 256
    shapes, results = [], []
    fused = torch.nn.functional.scaled_dot_product_attention

    def seen(query, key, value, **options):
        shapes.append((query.shape[1], key.shape[1], options.get("enable_gqa", False)))
        return fused(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    for shares in (True, False):
        monkeypatch.setattr(attention, "shares_keys", lambda query, shares=shares: shares)
        loss = model.summed_loss(module, batch, None)
        results.append([loss, *torch.autograd.grad(loss, list(module.parameters()))])
    has_mask = architecture == "Gemma3ForCausalLM"  # of its first layer, for a window of half the sequence
    assert shapes == [(2, 2, False) if has_mask else (2, 1, True), (2, 1, True)] + [(2, 2, False)] * 2
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "capability", "autocast", "dtype", "shares"),
    [
        ("cpu", None, None, torch.float32, True),
        ("cuda", (8, 6), torch.bfloat16, torch.float32, True),
        ("cuda", (8, 6), None, torch.bfloat16, True),
        ("cuda", (8, 6), None, torch.float32, False),
        ("cuda", (7, 5), torch.float16, torch.float32, False),
        ("xpu", None, None, torch.float32, True),
    ],
)
def test_flash_computes_in_16_bits_on_cards_since_ampere(monkeypatch, kind, capability, autocast, dtype, shares):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: autocast is not None)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: autocast)
    assert attention.shares_keys(SimpleNamespace(device=torch.device(kind), dtype=dtype)) is shares
