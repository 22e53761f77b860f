"""Parts of a written-out Llama: products, norms, cross entropy, and the constants of a shape.

Legend: as in ``sim.lm.stacked``. A single peer's tensors have no dimension N.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
"""Whether oneDNN's product is available. Torch uses this operator for compiled models; it has no public name."""


class Normalized(NamedTuple):
    """Tensors that the backward pass of a norm needs."""

    plain: Tensor  # [N, M, C] before the multiplication by the norm's weight
    scale: Tensor  # [N, M, 1] inverse root mean square


class Fixed(NamedTuple):
    """Constants of one shape and device."""

    rows: Tensor  # [J] order of the rows of q, k, v: those that rotate together are neighbours
    back: Tensor  # [J] the inverse order
    rotation: Tensor  # [T, 1, D/2] complex rotations, of absolute value 1
    rotation_back: Tensor  # [T, 1, D/2] conjugate of ``rotation``
    mask: Tensor  # [T, T] minus infinity where a query must not attend


@lru_cache(maxsize=16)
def fixed(
    heads: int, head_size: int, rope_theta: float, tokens: int, device: torch.device, dtype: torch.dtype
) -> Fixed:
    neighbours = torch.arange(head_size, device=device).view(2, -1).T.flatten()  # 0, D/2, 1, D/2 + 1, ...
    plain = torch.arange(head_size, device=device)
    orders = [*[neighbours] * (2 * heads), *[plain] * heads]
    rows = torch.cat([number * head_size + order for number, order in enumerate(orders)])
    exponents = torch.arange(0, head_size, 2, device=device).float() / head_size
    angle = torch.arange(tokens, device=device)[:, None].float() / rope_theta**exponents  # fp32, as in transformers
    rotation = torch.polar(torch.ones_like(angle), angle).to(dtype.to_complex())[:, None]
    mask = torch.full((tokens, tokens), float("-inf"), device=device, dtype=dtype).triu_(1)
    return Fixed(rows, rows.argsort(), rotation, rotation.conj().resolve_conj(), mask)


def cross_entropy(
    logits: Tensor,  # [N, M, V]
    targets: Tensor,  # [N, M, 1]
) -> tuple[Tensor, Tensor]:
    """Return the [N] summed losses and their gradient by the logits, [N, M, V].

    The logarithm of a sum of exponentials is the largest logit minus the logarithm of its probability.
    """
    probabilities = torch.softmax(logits, dim=-1)
    losses = logits.amax(dim=-1).sub_(probabilities.amax(dim=-1).log_()).sub_(logits.gather(-1, targets)[..., 0])
    return losses.sum(-1), probabilities.scatter_add_(
        -1, targets, probabilities.new_full((), -1.0).expand(targets.shape)
    )


def normalized(
    x: Tensor,  # [N, M, C]
    weight: Tensor,  # [N, 1, C]
    epsilon: float,
) -> tuple[Tensor, Normalized]:
    """Return the root-mean-square norm of every token, [N, M, C], and what its backward pass needs."""
    scale = torch.linalg.vecdot(x, x).div_(x.shape[-1]).add_(epsilon).rsqrt_()[..., None]
    plain = x * scale
    return plain * weight, Normalized(plain, scale)


def norm_backward(
    gradient: Tensor,  # [N, M, C] by the norm's output; overwritten
    kept: Normalized,
    weight: Tensor,  # [N, 1, C]
    by_weight: Tensor,  # [N, 1, C] added to
    by_input: Tensor,  # [N, M, C] added to
) -> None:
    """Add the gradients by the norm's weight and input."""
    product = gradient * kept.plain
    by_weight.add_(product.sum(dim=-2, keepdim=True))
    along = torch.matmul(product, weight.mT).div_(product.shape[-1])  # [N, M, 1]
    by_input.addcmul_(gradient.mul_(weight).addcmul_(kept.plain, along, value=-1), kept.scale)


def linear(
    a: Tensor,  # [N, I, K]
    matrix: Tensor,  # [N, J, K]
) -> Tensor:
    """Return ``a matrix^T``, [N, I, J].

    oneDNN's product is used because it is twice as fast on AMD processors as MKL's, torch's default (measured: 512 x 64
    x 192 on an EPYC with AVX-512, 194 against 94 GFLOP/s).
    """
    if a.dim() == 3:
        return torch.bmm(a, matrix.mT)
    if ONEDNN and a.dtype == torch.float32 and a.device.type == "cpu":
        return torch.ops.mkldnn._linear_pointwise(a, matrix, None, "none", [], "")
    return torch.mm(a, matrix.mT)


def outer(
    gradient: Tensor,  # [N, M, J] by the output of a linear map
    x: Tensor,  # [N, M, K] its input
) -> Tensor:
    """Return the gradient by the matrix, [N, J, K]."""
    if gradient.shape[-1] > x.shape[-1]:  # oneDNN's operator copies the left factor, which should be the smaller one
        return linear(x.mT, gradient.mT).mT
    return linear(gradient.mT, x.mT)
