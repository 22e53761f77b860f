"""A Llama for several peers at once: their weights are the rows of one tensor, forward and backward are written out.

The mathematics is that of ``transformers.LlamaForCausalLM`` (arXiv 2302.13971) on the same flat layout; a test holds
losses and gradients to the real module's. Written out, because a model of a hundred thousand weights spends half of its
time in autograd and in operations that need not be there:

- q, k and v, and gate and up, are one matrix each, and query heads that share a key head are rows of one product;
- rotary positions are one complex multiplication, once a head's rows i and i + D/2 lie side by side;
- for one peer on the CPU, products go to oneDNN, which on processors of AMD is twice as fast as MKL, torch's BLAS.

A single peer's tensors have no dimension N.

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

ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
"""Whether oneDNN's product can be called. Torch uses this operator for compiled models; it has no public name."""


class Block(NamedTuple):
    """One block's parameters, as views of a flat weight or gradient tensor."""

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
    head: Tensor  # [N, V, C], the embedding itself where they are tied


class _Normalized(NamedTuple):
    """What the backward pass of a norm needs."""

    plain: Tensor  # [N, M, C] before the multiplication with the norm's weight
    scale: Tensor  # [N, M, 1] what normalized it


class _Kept(NamedTuple):
    """What a block's backward pass needs."""

    norm1: _Normalized
    x1: Tensor  # [N, M, C] input of the attention
    matrix: Tensor  # [N, J, C] that of q, k and v, in the order of ``_Fixed.rows``
    query: Tensor  # [N*B*K, G*T, D] rotated
    key: Tensor  # [N*B*K, T, D] rotated
    value: Tensor  # [N*B*K, T, D]
    chances: Tensor  # [N*B*K, G*T, T] softmax of the scores
    attended: Tensor  # [N, M, H*D]
    norm2: _Normalized
    x2: Tensor  # [N, M, C] input of the feed-forward part
    gate_and_up: Tensor  # [N, M, 2F]
    opened: Tensor  # [N, M, F] silu(gate)
    inner: Tensor  # [N, M, F] silu(gate) * up


class _Fixed(NamedTuple):
    """Constants of one shape and device."""

    rows: Tensor  # [J] order of the rows of q, k, v: those that rotate together are neighbours
    back: Tensor  # [J] the inverse order
    turn: Tensor  # [T, 1, D/2] complex, of absolute value 1
    turn_back: Tensor  # [T, 1, D/2] its conjugate
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

    def parameters(
        self,
        flat: Tensor,  # [N, P] or [P]
    ) -> Parameters:
        """Weights, or gradients, as matrices: views, to be made once and used for every step."""
        places = dict(zip(self.layout.names, zip(self.layout.offsets, self.layout.shapes, strict=True), strict=True))

        def view(name: str, height: int = 0) -> Tensor:
            """One parameter, or the ``height`` rows from its beginning."""
            offset, shape = places[name]
            shape = (height or (shape[0] if len(shape) == 2 else 1), shape[-1])
            return flat[..., offset : offset + prod(shape)].unflatten(-1, shape)

        blocks = []
        for number in range(self.layers):
            name = f"model.layers.{number}."
            blocks.append(
                Block(
                    view(name + "self_attn.q_proj.weight", (self.heads + 2 * self.key_heads) * self.head_size),
                    view(name + "self_attn.o_proj.weight"),
                    view(name + "mlp.gate_proj.weight", 2 * self.inner),
                    view(name + "mlp.down_proj.weight"),
                    view(name + "input_layernorm.weight"),
                    view(name + "post_attention_layernorm.weight"),
                )
            )
        embedding = view("model.embed_tokens.weight")
        head = embedding if self.tied else view("lm_head.weight")
        return Parameters(embedding, blocks, view("model.norm.weight"), head)

    @torch.no_grad()
    def losses(
        self,
        model: Parameters,
        batch: Tensor,  # [N, B, T+1] int64 on the device of the model
    ) -> Tensor:
        """[N] cross entropy in nats, summed over the B*T predicted tokens of each peer."""
        x, _, _ = self._forward(model, batch, [])
        logits = _linear(x, model.head)
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
        slope: Parameters,  # to which the gradients are added
        batch: Tensor,  # [N, B, T+1] int64 on the device of the model
        weight: float = 1.0,  # of this batch in the gradient: 1/tokens where the mean loss is wanted
    ) -> Tensor:
        """[N] the losses as ``losses`` gives them; adds their gradients, times ``weight``, to ``slope``."""
        kept: list[_Kept] = []
        x, norm, place = self._forward(model, batch, kept)
        loss, logits = _cross_entropy(_linear(x, model.head), batch[..., 1:].flatten(-2)[..., None])
        logits.mul_(weight)
        slope.head.add_(_outer(logits, x))
        flow = torch.zeros_like(x)  # [N, M, C] gradient by the residual stream, from here on
        _norm_backward(_linear(logits, model.head.mT), norm, model.norm, slope.norm, flow)
        fixed = self._fixed(x, batch.shape[-1] - 1)
        for number in reversed(range(self.layers)):
            self._block_backward(model.blocks[number], slope.blocks[number], kept[number], flow, fixed)
        embedding = torch.zeros_like(model.embedding).flatten(0, -2)
        embedding.index_add_(0, place, flow.flatten(0, -2))
        slope.embedding.add_(embedding.view(model.embedding.shape))
        return loss

    # --- forward ------------------------------------------------------------------------------------------------------

    def _forward(self, model: Parameters, batch: Tensor, kept: list[_Kept]) -> tuple[Tensor, _Normalized, Tensor]:
        """The output [N, M, C] after its norm, what the norm keeps, and each token's row of all embeddings [N*M].

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
        return *self._normalized(x, model.norm), place

    def _block(self, block: Block, x: Tensor, fixed: _Fixed, kept: list[_Kept]) -> Tensor:
        tokens = fixed.mask.shape[1]
        x1, norm1 = self._normalized(x, block.norm1)
        matrix = block.query_key_value.index_select(-2, fixed.rows)
        qkv = _linear(x1, matrix).view(-1, tokens, self.heads + 2 * self.key_heads, self.head_size)
        self._turn(qkv, fixed.turn)
        query, key, value = (self._gather(part) for part in self._split(qkv))
        scores = torch.baddbmm(fixed.mask.expand(len(query), -1, -1), query, key.mT, alpha=self.head_size**-0.5)
        chances = torch.softmax(scores, dim=-1)
        attended = self._scatter(torch.bmm(chances, value), tokens).reshape(*x.shape[:-1], -1)
        x = _linear(attended, block.attended).add_(x)

        x2, norm2 = self._normalized(x, block.norm2)
        gate_and_up = _linear(x2, block.gate_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        opened = functional.silu(gate)
        inner = opened * up
        kept.append(
            _Kept(norm1, x1, matrix, query, key, value, chances, attended, norm2, x2, gate_and_up, opened, inner)
        )
        return x.add_(_linear(inner, block.down))

    # --- backward -----------------------------------------------------------------------------------------------------

    def _block_backward(
        self,
        block: Block,
        slope: Block,  # gradients of the parameters: added to
        kept: _Kept,
        flow: Tensor,  # [N, M, C] gradient by the block's output; becomes that by its input, in place
        fixed: _Fixed,
    ) -> None:
        slope.down.add_(_outer(flow, kept.inner))
        inner = _linear(flow, block.down.mT)
        gate, up = kept.gate_and_up.chunk(2, dim=-1)
        gate_and_up = torch.empty_like(kept.gate_and_up)
        by_gate, by_up = gate_and_up.chunk(2, dim=-1)
        torch.mul(inner, kept.opened, out=by_up)
        torch.ops.aten.silu_backward.grad_input(inner.mul_(up), gate, grad_input=by_gate)
        slope.gate_up.add_(_outer(gate_and_up, kept.x2))
        _norm_backward(_linear(gate_and_up, block.gate_up.mT), kept.norm2, block.norm2, slope.norm2, flow)

        tokens = fixed.mask.shape[1]
        slope.attended.add_(_outer(flow, kept.attended))
        attended = _linear(flow, block.attended.mT).view(-1, tokens, self.heads, self.head_size)
        attended = self._gather(attended)
        chances = torch.bmm(attended, kept.value.mT)
        scores = torch.ops.aten._softmax_backward_data(chances, kept.chances, -1, chances.dtype)
        scores.mul_(self.head_size**-0.5)
        qkv = flow.new_empty(len(kept.key) // self.key_heads, tokens, self.heads + 2 * self.key_heads, self.head_size)
        by_query, by_key, by_value = self._split(qkv)
        by_query.copy_(self._scatter(torch.bmm(scores, kept.key), tokens))
        by_key.copy_(self._scatter(torch.bmm(scores.mT, kept.query), tokens))
        by_value.copy_(self._scatter(torch.bmm(kept.chances.mT, attended), tokens))
        self._turn(qkv, fixed.turn_back)
        qkv = qkv.view(*flow.shape[:-1], -1)
        slope.query_key_value.add_(_outer(qkv, kept.x1).index_select(-2, fixed.back))
        _norm_backward(_linear(qkv, kept.matrix.mT), kept.norm1, block.norm1, slope.norm1, flow)

    # --- pieces -------------------------------------------------------------------------------------------------------

    def _normalized(
        self,
        x: Tensor,  # [N, M, C]
        weight: Tensor,  # [N, 1, C]
    ) -> tuple[Tensor, _Normalized]:
        scale = torch.linalg.vecdot(x, x).div_(self.hidden).add_(self.epsilon).rsqrt_()[..., None]
        plain = x * scale
        return plain * weight, _Normalized(plain, scale)

    def _split(
        self,
        qkv: Tensor,  # [N*B, T, H+2K, D]
    ) -> tuple[Tensor, ...]:
        """Its queries, keys and values: views."""
        return qkv.split((self.heads, self.key_heads, self.key_heads), dim=2)

    def _turn(
        self,
        qkv: Tensor,  # [N*B, T, H+2K, D], changed in place
        turn: Tensor,  # [T, 1, D/2] complex
    ) -> None:
        """Turn queries and keys by their places."""
        pairs = torch.view_as_complex(qkv.view(*qkv.shape[:-1], -1, 2))
        pairs[:, :, : self.heads + self.key_heads].mul_(turn)

    def _gather(self, part: Tensor) -> Tensor:
        """[N*B, T, K*G, D] -> [N*B*K, G*T, D], contiguous, as products want it. (For keys and values G is 1.)"""
        sequences, tokens, heads, _ = part.shape
        part = part.view(sequences, tokens, self.key_heads, -1, self.head_size).permute(0, 2, 3, 1, 4)
        return part.reshape(sequences * self.key_heads, heads // self.key_heads * tokens, self.head_size)

    def _scatter(self, gathered: Tensor, tokens: int) -> Tensor:
        """Inverse of ``_gather``; not contiguous."""
        part = gathered.view(-1, self.key_heads, gathered.shape[1] // tokens, tokens, self.head_size)
        return part.permute(0, 3, 1, 2, 4).flatten(2, 3) if part.shape[2] > 1 else part[:, :, 0].transpose(1, 2)

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
    turn = torch.polar(torch.ones_like(angle), angle).to(dtype.to_complex())[:, None]
    mask = torch.full((tokens, tokens), float("-inf"), device=device, dtype=dtype).triu_(1)
    return _Fixed(rows, rows.argsort(), turn, turn.conj().resolve_conj(), mask.repeat(heads // key_heads, 1))


def _cross_entropy(
    logits: Tensor,  # [N, M, V]
    targets: Tensor,  # [N, M, 1]
) -> tuple[Tensor, Tensor]:
    """[N] summed losses and their gradient by the logits [N, M, V].

    The logarithm of a sum of exponentials is the largest logit less the logarithm of its chance.
    """
    chances = torch.softmax(logits, dim=-1)
    loss = (logits.amax(dim=-1) - chances.amax(dim=-1).log_()).sum(-1) - logits.gather(-1, targets).sum(dim=(-1, -2))
    return loss, chances.scatter_add_(-1, targets, chances.new_full((), -1.0).expand(targets.shape))


def _norm_backward(
    gradient: Tensor,  # [N, M, C] by the norm's output; overwritten
    kept: _Normalized,
    weight: Tensor,  # [N, 1, C]
    by_weight: Tensor,  # [N, 1, C] added to
    by_input: Tensor,  # [N, M, C] added to
) -> None:
    product = gradient * kept.plain
    by_weight.add_(product.sum(dim=-2, keepdim=True))
    along = torch.matmul(product, weight.mT).div_(product.shape[-1])  # [N, M, 1]
    by_input.addcmul_(gradient.mul_(weight).addcmul_(kept.plain, along, value=-1), kept.scale)


def _linear(
    a: Tensor,  # [N, I, K]
    matrix: Tensor,  # [N, J, K]
) -> Tensor:
    """[N, I, J] ``a matrix^T``."""
    if a.dim() == 3:
        return torch.bmm(a, matrix.mT)
    if ONEDNN and a.dtype == torch.float32 and a.device.type == "cpu":
        return torch.ops.mkldnn._linear_pointwise(a, matrix, None, "none", [], "")
    return torch.mm(a, matrix.mT)


def _outer(
    gradient: Tensor,  # [N, M, J] by the output of a linear map
    x: Tensor,  # [N, M, K] its input
) -> Tensor:
    """[N, J, K] the gradient by its matrix."""
    if gradient.shape[-1] > x.shape[-1]:  # oneDNN's door copies the left factor: let it be the smaller one
        return _linear(x.mT, gradient.mT).mT
    return _linear(gradient.mT, x.mT)
