"""Attention that keeps no scores on cards whose fused kernels want as many key heads as query heads.

torch's flash kernel lets query heads share keys, but computes in 16 bits and on NVIDIA's cards since Ampere only. The
memory-efficient kernel, which computes in fp32 and on older cards, does not (torch 2.13, ``sdp_utils.cpp``). torch then
takes plain products and keeps all scores: for llama-135m 151 MB a layer and sequence, several times. Repeated keys and
values take 9 MB.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

FLASH_CAPABILITY = (8, 0)
"""First compute capability with the flash kernel: Ampere."""


def use_fused_attention() -> None:
    """Let transformers' models with ``sdpa`` call ``fused_attention`` in this process."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS["sdpa"] = fused_attention


def fused_attention(
    module: Any,
    query: Tensor,  # [B, heads, T, head size]
    key: Tensor,  # [B, key heads, T, head size]
    value: Tensor,  # as key
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute transformers' ``sdpa`` attention, with keys and values repeated where no fused kernel shares them."""
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    groups = getattr(module, "num_key_value_groups", 1)
    if groups > 1 and not shares_keys(query):
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        module = SimpleNamespace(is_causal=module.is_causal)  # has no groups
    result: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return result


def shares_keys(query: Tensor) -> bool:
    """Return whether the fused kernel for this tensor, under the current autocast, lets query heads share keys."""
    if query.device.type != "cuda":
        return True
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
    return has_flash_kernel(query.device, dtype)


def has_flash_kernel(card: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch's flash kernel runs on a CUDA card in this type; otherwise the memory-efficient one does."""
    return dtype.itemsize == 2 and torch.cuda.get_device_capability(card) >= FLASH_CAPABILITY
