"""Cross entropy of a language model's output layer that never holds all logits.

Logits of N tokens and V words are the largest tensor of a training step: for llama-135m and 16 sequences of 2,048
tokens 6.4 GB, three times over. Here they exist for a chunk of tokens at a time. As in Liger Kernel's fused linear
cross entropy (arXiv 2410.10989), the gradient of a chunk is computed with its loss, so nothing is computed again in the
backward pass; plain torch, so it runs on every device::

    z = h W^T                       [C, V], one chunk
    loss += sum(logsumexp(z) - z[target])
    p = softmax(z) - onehot(target)
    dh = p W ;  dW += p^T h         both kept for the backward pass, which only scales them

In fp16, whose smallest number is 6e-8, most of p is rounded to zero, and dW may exceed the largest, 65,504. The factor
of the backward pass is therefore an argument: p is multiplied by it before it is rounded.

Dimension letters: N tokens, C tokens of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_LOGITS = 1 << 24
"""Logits held at once, 64 MiB in fp32. Guess: time on cards with other numbers would settle it."""


def summed_cross_entropy(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D] of the output layer
    targets: Tensor,  # [N] int64, each below V
    compute: torch.dtype | None = None,  # type of the matrix products; None: the weights' own
    gradient_scale: float = 1.0,  # positive; multiplies gradients before they are rounded to ``compute``
) -> Tensor:
    """Return the cross entropy in nats, summed over the tokens: a scalar with a graph, in the weights' type.

    ``gradient_scale`` should be about what the backward pass multiplies the gradients by, which it does not change.
    """
    grows = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    result: Tensor = _SummedCrossEntropy.apply(hidden, weight, targets, compute or weight.dtype, grows, gradient_scale)
    return result


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        compute: torch.dtype,
        grows: bool,
        scale: float,
    ) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            total = weight.new_zeros(())
            cast = weight.to(compute)
            d_hidden = torch.empty_like(hidden) if grows else None
            d_weight = torch.zeros_like(weight) if grows else None
            chunk = max(1, CHUNK_LOGITS // len(weight))
            for at in range(0, len(hidden), chunk):
                part = hidden[at : at + chunk].to(compute)  # [C, D]
                wanted = targets[at : at + chunk, None]  # [C, 1]
                logits = (part @ cast.T).to(weight.dtype)  # [C, V]
                log_sums = torch.logsumexp(logits, 1, keepdim=True)
                total += (log_sums - logits.gather(1, wanted)).sum()
                if d_hidden is None or d_weight is None:
                    continue
                slope = logits.sub_(log_sums).exp_()
                slope.scatter_add_(1, wanted, slope.new_full((), -1.0).expand_as(wanted))
                if scale != 1.0:
                    slope *= scale
                slope = slope.to(compute)
                d_hidden[at : at + chunk] = slope @ cast
                if compute is weight.dtype:
                    d_weight.addmm_(slope.T, part)
                else:
                    d_weight += slope.T @ part
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.scale = scale
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        gradient = gradient / ctx.scale
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * gradient, d_weight * gradient, None, None, None, None
