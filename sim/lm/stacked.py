"""A Llama for several peers at once: weights are the rows of one tensor, forward and backward are written out.

The mathematics is that of ``transformers.LlamaForCausalLM`` (arXiv 2302.13971) on an equal flat layout; a test compares
losses and gradients with the real module's. A small model spends half of its time in autograd and in needless
operations (measured with 123 thousand weights and 512 tokens on one core: the module takes 18 us a token,
torch.func.vmap over it 19 to 28, this code 9.4). Therefore:

- q, k and v, and gate and up, are one matrix each: with a hidden size divisible by 16 they lie without a gap in the
  flat layout;
- rotary positions are one complex multiplication, because a head's rows i and i + D/2 lie side by side;
- for one peer on the CPU, oneDNN computes the products (``kernels.linear``).

A single peer's tensors have no dimension N, so that its products have the two dimensions that oneDNN accepts.

Legend: N peers, P parameters (padded), B sequences, T tokens a sequence, M = B*T, C hidden size, F feed-forward size,
H heads, D head size, J = 3*H*D, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from p2ptrain.manifest.model import Llama
from p2ptrain.outer.flat import FlatLayout
from sim.lm.kernels import (
    Fixed,
    Normalized,
    cross_entropy,
    fixed,
    linear,
    norm_backward,
    normalized,
    outer,
)


class Block(NamedTuple):
    """Parameters of one block, as views of a flat weight or gradient tensor."""

    query_key_value: Tensor  # [N, J, C]
    attended: Tensor  # [N, C, H*D]
    gate_up: Tensor  # [N, 2F, C]
    down: Tensor  # [N, C, F]
    norm1: Tensor  # [N, 1, C]
    norm2: Tensor  # [N, 1, C]


class Parameters(NamedTuple):
    """All parameters, as views of a flat weight or gradient tensor."""

    embedding: Tensor  # [N, V, C]
    blocks: list[Block]
    norm: Tensor  # [N, 1, C]


class _BlockCache(NamedTuple):
    """Tensors that a block's backward pass needs."""

    norm1: Normalized
    x1: Tensor  # [N, M, C] input of the attention
    matrix: Tensor  # [N, J, C] of q, k and v, in the order of ``Fixed.rows``
    query: Tensor  # [N*B*H, T, D] rotated
    key: Tensor  # [N*B*H, T, D] rotated
    value: Tensor  # [N*B*H, T, D]
    attention: Tensor  # [N*B*H, T, T] softmax of the scores
    attended: Tensor  # [N, M, H*D]
    norm2: Normalized
    x2: Tensor  # [N, M, C] input of the feed-forward part
    gate_and_up: Tensor  # [N, M, 2F]
    opened: Tensor  # [N, M, F] silu(gate)
    inner: Tensor  # [N, M, F] silu(gate) * up


@dataclass(frozen=True, slots=True)
class StackedLlama:
    """The shape of one model, and the losses and gradients of any number of weight vectors of that shape."""

    layout: FlatLayout
    layers: int
    heads: int
    head_size: int
    hidden: int
    inner: int
    vocabulary: int
    epsilon: float
    rope_theta: float

    @classmethod
    def of(cls, description: Llama, layout: FlatLayout) -> StackedLlama:
        """Make the shape of a model: a Llama with silu, tied embeddings and as many key heads as query heads."""
        config = description.config
        assert config.tie_word_embeddings
        assert config.num_key_value_heads == config.num_attention_heads
        return cls(
            layout=layout,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            head_size=description.head_size,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            vocabulary=config.vocab_size,
            epsilon=config.norm_epsilon,
            rope_theta=config.rope_theta,
        )

    def parameters(
        self,
        flat: Tensor,  # [N, P] or [P]
    ) -> Parameters:
        """Return each parameter as a matrix: views of ``flat``, which stay valid while it changes in place."""
        places = dict(zip(self.layout.names, zip(self.layout.offsets, self.layout.shapes, strict=True), strict=True))

        def view(name: str, height: int = 0) -> Tensor:
            """Return one parameter, or the ``height`` rows from its beginning."""
            offset, shape = places[name]
            shape = (height or (shape[0] if len(shape) == 2 else 1), shape[-1])
            return flat[..., offset : offset + prod(shape)].unflatten(-1, shape)

        blocks = []
        for number in range(self.layers):
            name = f"model.layers.{number}."
            blocks.append(
                Block(
                    view(name + "self_attn.q_proj.weight", 3 * self.heads * self.head_size),
                    view(name + "self_attn.o_proj.weight"),
                    view(name + "mlp.gate_proj.weight", 2 * self.inner),
                    view(name + "mlp.down_proj.weight"),
                    view(name + "input_layernorm.weight"),
                    view(name + "post_attention_layernorm.weight"),
                )
            )
        return Parameters(view("model.embed_tokens.weight"), blocks, view("model.norm.weight"))

    @torch.no_grad()
    def losses(
        self,
        model: Parameters,
        batch: Tensor,  # [N, B, T+1] int64 on the device of the model
    ) -> Tensor:
        """Return the [N] cross entropies in nats, summed over the B*T predicted tokens of each peer."""
        x, _, _ = self._forward(model, batch, [])
        logits = linear(x, model.embedding)
        targets = batch[..., 1:].flatten(-2)
        return (
            functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
            .view_as(targets)
            .sum(-1)
        )

    @torch.no_grad()
    def accumulate(
        self,
        model: Parameters,
        grads: Parameters,  # to which the gradients are added
        batch: Tensor,  # [N, B, T+1] int64 on the device of the model
        weight: float = 1.0,  # weight of this batch in the gradient: 1/tokens for the mean loss
    ) -> Tensor:
        """Return the [N] losses of ``losses``; add their gradients, times ``weight``, to ``grads``."""
        kept: list[_BlockCache] = []
        x, norm, place = self._forward(model, batch, kept)
        loss, logits = cross_entropy(linear(x, model.embedding), batch[..., 1:].flatten(-2)[..., None])
        logits.mul_(weight)
        grads.embedding.add_(outer(logits, x))
        flow = torch.zeros_like(x)  # [N, M, C] gradient by the residual stream, updated from here on
        norm_backward(linear(logits, model.embedding.mT), norm, model.norm, grads.norm, flow)
        fixed = self._fixed(x, batch.shape[-1] - 1)
        for number in reversed(range(self.layers)):
            self._block_backward(model.blocks[number], grads.blocks[number], kept[number], flow, fixed)
        embedding = torch.zeros_like(model.embedding).flatten(0, -2)
        embedding.index_add_(0, place, flow.flatten(0, -2))
        grads.embedding.add_(embedding.view(model.embedding.shape))
        return loss

    # --- forward ------------------------------------------------------------------------------------------------------

    def _forward(self, model: Parameters, batch: Tensor, kept: list[_BlockCache]) -> tuple[Tensor, Normalized, Tensor]:
        """Return the output [N, M, C] after its norm, the norm's cache, and each token's row of all embeddings [N*M].

        Appends to ``kept`` what every block's backward pass needs.
        """
        place = batch[..., :-1]
        if batch.dim() == 3:
            peers, vocabulary = model.embedding.shape[:2]
            place = place + torch.arange(0, peers * vocabulary, vocabulary, device=batch.device)[:, None, None]
        place = place.flatten()
        x = functional.embedding(place, model.embedding.flatten(0, -2)).view(*batch.shape[:-2], -1, self.hidden)
        fixed = self._fixed(x, batch.shape[-1] - 1)
        for block in model.blocks:
            x = self._block(block, x, fixed, kept)
        return *normalized(x, model.norm, self.epsilon), place

    def _block(self, block: Block, x: Tensor, fixed: Fixed, kept: list[_BlockCache]) -> Tensor:
        tokens = len(fixed.mask)
        x1, norm1 = normalized(x, block.norm1, self.epsilon)
        matrix = block.query_key_value.index_select(-2, fixed.rows)
        qkv = linear(x1, matrix).view(-1, tokens, 3 * self.heads, self.head_size)
        self._rotate(qkv, fixed.rotation)
        query, key, value = (self._gather(part) for part in self._split(qkv))
        scores = torch.baddbmm(fixed.mask.expand(len(query), -1, -1), query, key.mT, alpha=self.head_size**-0.5)
        attention = torch.softmax(scores, dim=-1)
        attended = self._scatter(torch.bmm(attention, value)).reshape(*x.shape[:-1], -1)
        x = linear(attended, block.attended).add_(x)

        x2, norm2 = normalized(x, block.norm2, self.epsilon)
        gate_and_up = linear(x2, block.gate_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        opened = functional.silu(gate)
        inner = opened * up
        kept.append(
            _BlockCache(
                norm1, x1, matrix, query, key, value, attention, attended, norm2, x2, gate_and_up, opened, inner
            )
        )
        return x.add_(linear(inner, block.down))

    # --- backward -----------------------------------------------------------------------------------------------------

    def _block_backward(
        self,
        block: Block,
        grads: Block,  # gradients of the parameters, added to
        kept: _BlockCache,
        flow: Tensor,  # [N, M, C] gradient by the block's output; becomes the one by its input, in place
        fixed: Fixed,
    ) -> None:
        grads.down.add_(outer(flow, kept.inner))
        inner = linear(flow, block.down.mT)
        gate, up = kept.gate_and_up.chunk(2, dim=-1)
        gate_and_up = torch.empty_like(kept.gate_and_up)
        by_gate, by_up = gate_and_up.chunk(2, dim=-1)
        torch.mul(inner, kept.opened, out=by_up)
        torch.ops.aten.silu_backward.grad_input(inner.mul_(up), gate, grad_input=by_gate)
        grads.gate_up.add_(outer(gate_and_up, kept.x2))
        norm_backward(linear(gate_and_up, block.gate_up.mT), kept.norm2, block.norm2, grads.norm2, flow)

        tokens = len(fixed.mask)
        grads.attended.add_(outer(flow, kept.attended))
        attended = linear(flow, block.attended.mT).view(-1, tokens, self.heads, self.head_size)
        attended = self._gather(attended)
        by_attention = torch.bmm(attended, kept.value.mT)
        scores = torch.ops.aten._softmax_backward_data(by_attention, kept.attention, -1, by_attention.dtype)
        scores.mul_(self.head_size**-0.5)
        qkv = flow.new_empty(len(kept.key) // self.heads, tokens, 3 * self.heads, self.head_size)
        by_query, by_key, by_value = self._split(qkv)
        by_query.copy_(self._scatter(torch.bmm(scores, kept.key)))
        by_key.copy_(self._scatter(torch.bmm(scores.mT, kept.query)))
        by_value.copy_(self._scatter(torch.bmm(kept.attention.mT, attended)))
        self._rotate(qkv, fixed.rotation_back)
        qkv = qkv.view(*flow.shape[:-1], -1)
        grads.query_key_value.add_(outer(qkv, kept.x1).index_select(-2, fixed.back))
        norm_backward(linear(qkv, kept.matrix.mT), kept.norm1, block.norm1, grads.norm1, flow)

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _split(
        self,
        qkv: Tensor,  # [N*B, T, 3*H, D]
    ) -> tuple[Tensor, ...]:
        return qkv.chunk(3, dim=2)

    def _rotate(
        self,
        qkv: Tensor,  # [N*B, T, 3*H, D], changed in place
        rotation: Tensor,  # [T, 1, D/2] complex
    ) -> None:
        """Rotate queries and keys by their positions."""
        pairs = torch.view_as_complex(qkv.view(*qkv.shape[:-1], -1, 2))
        pairs[:, :, : 2 * self.heads].mul_(rotation)

    def _gather(self, part: Tensor) -> Tensor:
        """Reorder [N*B, T, H, D] to [N*B*H, T, D], contiguous for products."""
        return part.transpose(1, 2).reshape(-1, part.shape[1], self.head_size)

    def _scatter(self, gathered: Tensor) -> Tensor:
        """Invert ``_gather``; the result is not contiguous."""
        return gathered.unflatten(0, (-1, self.heads)).transpose(1, 2)

    def _fixed(self, like: Tensor, tokens: int) -> Fixed:
        return fixed(self.heads, self.head_size, self.rope_theta, tokens, like.device, like.dtype)
