"""A Llama for several peers at once: their weights are the rows of one tensor, forward and backward are written out.

The mathematics is that of ``transformers.LlamaForCausalLM`` (arXiv 2302.13971) on the same flat layout; a test holds
losses and gradients to the real module's. Written out, because a model of a hundred thousand weights spends half of its
time in autograd and in operations that need not be there:

- a norm's scale is folded into the matrix that reads it: ``(x_hat * scale) W^T = x_hat (W * scale)^T``;
- rotary positions are one complex multiplication, once a head's rows i and i + D/2 lie side by side;
- query heads that share a key head are rows of one product, so that nothing is repeated;
- on the CPU, fp32 products go to oneDNN, which on this kind of processor is twice as fast as the BLAS that torch calls.

Legend: N peers, P parameters (padded), B sequences, T tokens a sequence, M = B*T, C hidden size, F feed-forward size,
H query heads, K key heads, G = H/K, D head size, J = (H+2K)*D, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from p2ptrain.errors import ManifestError
from p2ptrain.outer import FlatLayout

if TYPE_CHECKING:
    from p2ptrain.manifest import Decoder

ALIGNMENT = 16
"""The hidden size is a multiple of it: then q, k and v, and gate and up, lie without a gap in the flat layout, and each
group is one matrix."""


class _Block(NamedTuple):
    """One block's matrices, as views of the rows of a weight or gradient tensor."""

    query_key_value: Tensor  # [N, J, C]
    attended: Tensor  # [N, C, H*D]
    gate_up: Tensor  # [N, 2F, C]
    down: Tensor  # [N, C, F]
    norm1: Tensor  # [N, 1, C]
    norm2: Tensor  # [N, 1, C]


class _Model(NamedTuple):
    """All parameters, as views of the rows of a weight or gradient tensor."""

    embedding: Tensor  # [N, V, C]
    blocks: list[_Block]
    norm: Tensor  # [N, 1, C]
    head: Tensor  # [N, V, C], the embedding itself where they are tied


class _Kept(NamedTuple):
    """What a block's backward pass needs."""

    query_key_value: Tensor  # [N, J, C] the matrix with the norm folded in
    gate_up: Tensor  # [N, 2F, C] the matrix with the norm folded in
    x1: Tensor  # [N, M, C] normalized input of the attention
    scale1: Tensor  # [N, M, 1] what normalized it
    query: Tensor  # [N*B*K, G*T, D] rotated
    key: Tensor  # [N*B*K, T, D] rotated
    value: Tensor  # [N*B*K, T, D]
    chances: Tensor  # [N*B*K, G*T, T] softmax of the scores
    attended: Tensor  # [N, M, H*D]
    x2: Tensor  # [N, M, C] normalized input of the feed-forward part
    scale2: Tensor  # [N, M, 1]
    gate_and_up: Tensor  # [N, M, 2F]
    opened: Tensor  # [N, M, F] silu(gate)
    inner: Tensor  # [N, M, F] silu(gate) * up


class _Fixed(NamedTuple):
    """Constants of one shape and device."""

    rows: Tensor  # [J] order of the rows of q, k, v: those that rotate together are neighbours
    back: Tensor  # [J] the inverse order
    turn: Tensor  # [T, 1, D/2] complex, of absolute value 1
    mask: Tensor  # [G*T, T] minus infinity where a query must not look


@dataclass(frozen=True, slots=True)
class StackedLlama:
    """The shape of one model, and the losses and gradients of any number of weight vectors of that shape."""

    layout: FlatLayout
    layers: int
    heads: int
    key_heads: int
    head_size: int
    hidden: int
    inner: int
    epsilon: float
    rope_theta: float
    tied: bool

    @classmethod
    def of(cls, description: Decoder, layout: FlatLayout) -> StackedLlama:
        """Raises ManifestError for what is not a Llama with silu."""
        from p2ptrain.manifest.model import Llama

        fits = description.config.hidden_act == "silu" and description.config.hidden_size % ALIGNMENT == 0
        if not (isinstance(description, Llama) and fits):
            wrong = description.config
            raise ManifestError(
                f"learner lm does not compute {description.architecture} with hidden_act {wrong.hidden_act} and"
                f" hidden_size {wrong.hidden_size}",
                f"Take LlamaForCausalLM, silu, and a hidden_size that is a multiple of {ALIGNMENT}.",
            )
        config = description.config
        return cls(
            layout=layout,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads,
            head_size=description.head_size,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            epsilon=config.norm_epsilon,
            rope_theta=config.rope_theta,
            tied=config.tie_word_embeddings,
        )

    @torch.no_grad()
    def losses(
        self,
        theta: Tensor,  # [N, P]
        batch: Tensor,  # [N, B, T+1] int64 on the device of theta
    ) -> Tensor:
        """[N] cross entropy in nats, summed over the B*T predicted tokens of each peer."""
        model = self._parameters(theta)
        x_hat, _, _ = self._forward(model, batch, [])
        logits = _product(x_hat, (model.head * model.norm).mT)
        return (
            functional.cross_entropy(logits.flatten(0, 1), batch[:, :, 1:].flatten(), reduction="none")
            .unflatten(0, (len(theta), -1))
            .sum(1)
        )

    @torch.no_grad()
    def accumulate(
        self,
        theta: Tensor,  # [N, P]
        batch: Tensor,  # [N, B, T+1] int64 on the device of theta
        gradient: Tensor,  # [N, P] to which the gradients are added
        weight: float = 1.0,  # of this batch in the gradient: 1/tokens where the mean loss is wanted
    ) -> Tensor:
        """[N] the losses as ``losses`` gives them; adds their gradients, times ``weight``, to ``gradient``."""
        model, slope = self._parameters(theta), self._parameters(gradient)
        kept: list[_Kept] = []
        x_hat, scale, place = self._forward(model, batch, kept)
        head = model.head * model.norm
        loss, logits = _cross_entropy(_product(x_hat, head.mT), batch[:, :, 1:].flatten(1)[..., None])
        logits.mul_(weight)
        _unfold(_product(logits.mT, x_hat), model.head, model.norm, slope.head, slope.norm)
        flow = _unnormalized(_product(logits, head), x_hat, scale)  # [N, M, C] by the residual stream, from here on
        fixed = self._fixed(theta, batch.shape[2] - 1)
        for number in reversed(range(self.layers)):
            self._backward(model.blocks[number], slope.blocks[number], kept[number], flow, fixed)
        embedding = torch.zeros_like(model.embedding).flatten(0, 1)
        embedding.index_add_(0, place, flow.flatten(0, 1))
        slope.embedding.add_(embedding.view(model.embedding.shape))
        return loss

    # --- forward ------------------------------------------------------------------------------------------------------

    def _forward(self, model: _Model, batch: Tensor, kept: list[_Kept]) -> tuple[Tensor, Tensor, Tensor]:
        """The normalized output [N, M, C], what normalized it [N, M, 1], each token's row of all embeddings [N*M].

        Appends to ``kept`` what every block's backward pass needs.
        """
        peers, vocabulary = model.embedding.shape[:2]
        first = torch.arange(0, peers * vocabulary, vocabulary, device=batch.device)
        place = (batch[:, :, :-1] + first[:, None, None]).flatten()
        x = functional.embedding(place, model.embedding.flatten(0, 1)).view(peers, -1, self.hidden)
        fixed = self._fixed(x, batch.shape[2] - 1)
        for block in model.blocks:
            x = self._block(block, x, fixed, kept)
        x_hat, scale = self._normalized(x)
        return x_hat, scale, place

    def _block(self, block: _Block, x: Tensor, fixed: _Fixed, kept: list[_Kept]) -> Tensor:
        tokens = fixed.mask.shape[1]
        x1, scale1 = self._normalized(x)
        qkv_matrix = (block.query_key_value * block.norm1).index_select(1, fixed.rows)
        qkv = self._parts(_product(x1, qkv_matrix.mT), tokens)
        self._rotate(qkv, fixed.turn)
        query, key, value = (self._gather(part) for part in self._split(qkv))
        scores = torch.baddbmm(fixed.mask.expand(len(query), -1, -1), query, key.mT, alpha=self.head_size**-0.5)
        chances = torch.softmax(scores, dim=-1)
        attended = x.new_empty(len(x), x.shape[1], self.heads * self.head_size)
        self._scatter(torch.bmm(chances, value), self._parts(attended, tokens))
        x = x + _product(attended, block.attended.mT)

        x2, scale2 = self._normalized(x)
        gate_up_matrix = block.gate_up * block.norm2
        gate_and_up = _product(x2, gate_up_matrix.mT)
        gate, up = gate_and_up.chunk(2, dim=-1)
        opened = functional.silu(gate)
        inner = opened * up
        kept.append(
            _Kept(
                qkv_matrix,
                gate_up_matrix,
                x1,
                scale1,
                query,
                key,
                value,
                chances,
                attended,
                x2,
                scale2,
                gate_and_up,
                opened,
                inner,
            )
        )
        return x.add_(_product(inner, block.down.mT))

    # --- backward -----------------------------------------------------------------------------------------------------

    def _backward(
        self,
        block: _Block,
        slope: _Block,  # gradients of the parameters: added to
        kept: _Kept,
        flow: Tensor,  # [N, M, C] gradient by the block's output; becomes that by its input, in place
        fixed: _Fixed,
    ) -> None:
        slope.down.add_(_product(flow.mT, kept.inner))
        inner = _product(flow, block.down)
        gate, up = kept.gate_and_up.chunk(2, dim=-1)
        gate_and_up = torch.empty_like(kept.gate_and_up)
        by_gate, by_up = gate_and_up.chunk(2, dim=-1)
        torch.mul(inner, kept.opened, out=by_up)
        torch.ops.aten.silu_backward.grad_input(inner.mul_(up), gate, grad_input=by_gate)
        _unfold(_product(gate_and_up.mT, kept.x2), block.gate_up, block.norm2, slope.gate_up, slope.norm2)
        flow.add_(_unnormalized(_product(gate_and_up, kept.gate_up), kept.x2, kept.scale2))

        tokens = fixed.mask.shape[1]
        slope.attended.add_(_product(flow.mT, kept.attended))
        attended = self._gather(self._parts(_product(flow, block.attended), tokens))
        chances = torch.bmm(attended, kept.value.mT)
        scores = torch.ops.aten._softmax_backward_data(chances, kept.chances, -1, chances.dtype)
        scores.mul_(self.head_size**-0.5)
        qkv = flow.new_empty(len(flow), flow.shape[1], kept.query_key_value.shape[1])
        parts = self._parts(qkv, tokens)
        by_query, by_key, by_value = self._split(parts)
        self._scatter(torch.bmm(scores, kept.key), by_query)
        self._scatter(torch.bmm(scores.mT, kept.query), by_key)
        self._scatter(torch.bmm(kept.chances.mT, attended), by_value)
        self._rotate(parts, fixed.turn.conj())
        by_matrix = _product(qkv.mT, kept.x1).index_select(1, fixed.back)
        _unfold(by_matrix, block.query_key_value, block.norm1, slope.query_key_value, slope.norm1)
        flow.add_(_unnormalized(_product(qkv, kept.query_key_value), kept.x1, kept.scale1))

    # --- pieces -------------------------------------------------------------------------------------------------------

    def _parameters(self, rows: Tensor) -> _Model:
        """The flat rows [N, P] as matrices; no copy."""
        places = dict(zip(self.layout.names, zip(self.layout.offsets, self.layout.shapes, strict=True), strict=True))

        def view(name: str, height: int = 0) -> Tensor:
            """One parameter, or the ``height`` rows from its beginning."""
            offset, shape = places[name]
            shape = (height or (shape[0] if len(shape) == 2 else 1), shape[-1])
            return rows[:, offset : offset + prod(shape)].unflatten(1, shape)

        blocks = []
        for number in range(self.layers):
            name = f"model.layers.{number}."
            blocks.append(
                _Block(
                    view(name + "self_attn.q_proj.weight", (self.heads + 2 * self.key_heads) * self.head_size),
                    view(name + "self_attn.o_proj.weight"),
                    view(name + "mlp.gate_proj.weight", 2 * self.inner),
                    view(name + "mlp.down_proj.weight"),
                    view(name + "input_layernorm.weight"),
                    view(name + "post_attention_layernorm.weight"),
                )
            )
        embedding = view("model.embed_tokens.weight")
        return _Model(embedding, blocks, view("model.norm.weight"), embedding if self.tied else view("lm_head.weight"))

    def _normalized(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.linalg.vecdot(x, x).div_(self.hidden).add_(self.epsilon).rsqrt_()[..., None]
        return x * scale, scale

    def _parts(self, flat: Tensor, tokens: int) -> Tensor:
        """[N, B*T, heads*D] -> [N, B, T, heads, D], a view."""
        return flat.view(len(flat), -1, tokens, flat.shape[2] // self.head_size, self.head_size)

    def _split(self, parts: Tensor) -> tuple[Tensor, ...]:
        return parts.split((self.heads, self.key_heads, self.key_heads), dim=3)

    def _rotate(self, parts: Tensor, turn: Tensor) -> None:
        """Turn queries and keys by their places, in place."""
        turning = parts[:, :, :, : self.heads + self.key_heads]
        torch.view_as_complex(turning.unflatten(4, (-1, 2))).mul_(turn)

    def _gather(self, part: Tensor) -> Tensor:
        """[N, B, T, K*G, D] -> [N*B*K, G*T, D], contiguous, as products want it. (For keys and values G is 1.)"""
        part = part.unflatten(3, (self.key_heads, -1)).permute(0, 1, 3, 4, 2, 5)
        return part.reshape(-1, part.shape[3] * part.shape[4], self.head_size)

    def _scatter(self, gathered: Tensor, part: Tensor) -> None:
        """Inverse of ``_gather``, into ``part``."""
        part = part.unflatten(3, (self.key_heads, -1)).permute(0, 1, 3, 4, 2, 5)
        part.copy_(gathered.view(part.shape))

    def _fixed(self, like: Tensor, tokens: int) -> _Fixed:
        return _fixed(self.heads, self.key_heads, self.head_size, self.rope_theta, tokens, like.device, like.dtype)


@lru_cache(maxsize=16)
def _fixed(
    heads: int, key_heads: int, head_size: int, rope_theta: float, tokens: int, device: torch.device, dtype: torch.dtype
) -> _Fixed:
    neighbours = torch.arange(head_size, device=device).view(2, -1).T.flatten()  # 0, D/2, 1, D/2 + 1, ...
    plain = torch.arange(head_size, device=device)
    orders = [*[neighbours] * (heads + key_heads), *[plain] * key_heads]
    rows = torch.cat([number * head_size + order for number, order in enumerate(orders)])
    exponents = torch.arange(0, head_size, 2, device=device).float() / head_size
    angle = torch.arange(tokens, device=device)[:, None].float() / rope_theta**exponents  # fp32, as transformers'
    turn = torch.polar(torch.ones_like(angle), angle).to(dtype.to_complex())
    mask = torch.full((tokens, tokens), float("-inf"), device=device, dtype=dtype).triu_(1)
    return _Fixed(rows, rows.argsort(), turn[:, None], mask.repeat(heads // key_heads, 1))


def _cross_entropy(
    logits: Tensor,  # [N, M, V]
    targets: Tensor,  # [N, M, 1]
) -> tuple[Tensor, Tensor]:
    """[N] summed losses and their gradient by the logits [N, M, V].

    The logarithm of a sum of exponentials is the largest logit less the logarithm of its chance.
    """
    chances = torch.softmax(logits, dim=-1)
    loss = (logits.amax(dim=-1) - chances.amax(dim=-1).log_()).sum(1) - logits.gather(2, targets).sum(dim=(1, 2))
    return loss, chances.scatter_add_(2, targets, chances.new_full((), -1.0).expand(targets.shape))


def _unfold(
    folded: Tensor,  # [N, J, C] gradient by matrix * norm
    matrix: Tensor,  # [N, J, C]
    norm: Tensor,  # [N, 1, C]
    by_matrix: Tensor,  # [N, J, C] added to
    by_norm: Tensor,  # [N, 1, C] added to
) -> None:
    by_matrix.addcmul_(folded, norm)
    by_norm.add_((folded * matrix).sum(dim=1, keepdim=True))


def _unnormalized(
    gradient: Tensor,  # [N, M, C] by the norm's output, before its scale; overwritten
    x_hat: Tensor,  # [N, M, C] that output
    scale: Tensor,  # [N, M, 1] what normalized it
) -> Tensor:
    """[N, M, C] the gradient by the norm's input."""
    along = torch.linalg.vecdot(gradient, x_hat).div_(x_hat.shape[-1])[..., None]
    return gradient.addcmul_(x_hat, along, value=-1).mul_(scale)


def _product(
    a: Tensor,  # [N, I, K]
    b: Tensor,  # [N, K, J]
) -> Tensor:
    """[N, I, J] matrix products."""
    if ONEDNN and len(a) == 1 and a.dtype == torch.float32 and a.device.type == "cpu":
        if a.shape[1] > b.shape[2] and a.stride(1) == 1:  # the left one is copied unless contiguous: the smaller one
            return torch.ops.mkldnn._linear_pointwise(b[0].T, a[0], None, "none", [], "").T[None]
        return torch.ops.mkldnn._linear_pointwise(a[0], b[0].T, None, "none", [], "")[None]
    return torch.bmm(a, b)


ONEDNN = True
