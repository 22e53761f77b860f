"""A plain training loop to compare with: a small Llama, its loss and one optimizer step, as one would write them today.

Nothing here is the project's: one module, ``F.scaled_dot_product_attention``, ``F.cross_entropy`` over all logits,
``torch.compile``, torch's Muon and fused AdamW, bf16 where the device has it fast. Parameters have transformers' names,
so that a state dict of ``LlamaForCausalLM`` fits, and a test can check that both compute the same loss.

Dimension letters: B sequences, T tokens, D width, H heads, K heads of keys and values, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """LlamaShape of a Llama, in the words of transformers' configuration."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rope_theta: float
    norm_epsilon: float


class Attention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        width, self.heads, self.kv_heads = shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads
        kv_width = width // self.heads * self.kv_heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q = rotated(self.q_proj(x).view(batch, tokens, self.heads, -1).transpose(1, 2), cos, sin)
        k = rotated(self.k_proj(x).view(batch, tokens, self.kv_heads, -1).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(batch, tokens, self.kv_heads, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return out


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embeddings (arXiv 2104.09864) to [B, H, T, D/H], the halves as pairs."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_epsilon)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_epsilon)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_epsilon)


class PlainLlama(nn.Module):
    """A Llama with tied embeddings; calling it gives the mean cross entropy in nats a token."""

    def __init__(self, shape: LlamaShape, tokens: int) -> None:
        super().__init__()
        self.model = Body(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight
        half = shape.hidden_size // shape.num_attention_heads // 2
        frequencies = shape.rope_theta ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(tokens), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(
        self,
        batch: Tensor,  # [B, T+1] int64
    ) -> Tensor:
        x = self.model.embed_tokens(batch[:, :-1])
        for layer in self.model.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.lm_head(self.model.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def stepper(
    model: PlainLlama,
    micro_batch: int,
    learning_rate: float,
    half: torch.dtype | None,
    compiled: bool,
    optimizer: Literal["adamw", "muon"] = "adamw",
) -> Callable[[Tensor], None]:
    """Return a function that takes one optimizer step on a batch [B, T+1] from the host.

    Args:
        micro_batch: sequences computed at once.
        half: type of the matrix products, by autocast; None: fp32.
        compiled: whether ``torch.compile`` compiles the loss.
        optimizer: of the matrices of the layers; the rest has AdamW.
    """
    device = model.lm_head.weight.device
    loss_of = torch.compile(model) if compiled else model
    hidden = [each for each in model.model.layers.parameters() if each.ndim == 2 and optimizer == "muon"]
    known = set(map(id, hidden))
    rest = [each for each in model.parameters() if id(each) not in known]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ]
    if hidden:
        optimizers.append(torch.optim.Muon(hidden, lr=learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))

    def step(batch: Tensor) -> None:
        parts = batch.to(device, non_blocking=True).split(micro_batch)
        for part in parts:
            with torch.autocast(device.type, half, enabled=half is not None):
                loss = loss_of(part)
            torch.autograd.backward(loss * (len(part) / len(batch)))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in optimizers:
            each.step()
            each.zero_grad()

    return step
