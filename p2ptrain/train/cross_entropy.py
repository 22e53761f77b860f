"""Cross entropy of a language model's output layer that never holds all logits.

Logits of N tokens and V words are the largest tensor of a training step: for llama-135m and 16 sequences of 2,048
tokens 6.4 GB, three times over. Here they exist for a chunk of tokens at a time. As in Liger Kernel's fused linear
cross entropy (arXiv 2410.10989), the gradient of a chunk is computed with its loss, so nothing is computed again in the
backward pass; plain torch, so it runs on every device::

    z = h W^T - max                 [C, V], one chunk; computed in place from here on
    loss += sum(log(sum(exp(z))) - z[target])
    p = softmax(z) - onehot(target)
    dh = p W ;  dW += p^T h         both kept for the backward pass, which only scales them

Cards multiply matrices fast only if their rows are aligned, so on them W gets rows of zeros up to a multiple of 64,
whose logits are set to -inf: probability and gradient are exactly 0.

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

ROW_MULTIPLE = 64
"""Words to whose multiple a card computes logits. nanoGPT gained 25 % by 50,304 rather than 50,257 (A. Karpathy); a
CPU gains nothing."""


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
            words = len(weight)
            cast = _padded(weight.to(compute), 1 if hidden.device.type == "cpu" else ROW_MULTIPLE)  # [V', D], V' >= V
            d_hidden = torch.empty_like(hidden) if grows else None
            d_weight = torch.zeros_like(weight) if grows else None
            chunk = max(1, CHUNK_LOGITS // len(cast))
            for at in range(0, len(hidden), chunk):
                part = hidden[at : at + chunk].to(compute)  # [C, D]
                wanted = targets[at : at + chunk, None]  # [C, 1]
                logits = (part @ cast.T).to(weight.dtype)  # [C, V']
                logits[:, words:] = -torch.inf
                logits -= logits.amax(1, keepdim=True)
                total -= logits.gather(1, wanted).sum()
                sums = logits.exp_().sum(1, keepdim=True)
                total += sums.log().sum()
                if d_hidden is None or d_weight is None:
                    continue
                logits /= sums
                logits.scatter_add_(1, wanted, logits.new_full((), -1.0).expand_as(wanted))
                if scale != 1.0:
                    logits *= scale
                slope = logits.to(compute)
                del logits  # before the products
                d_hidden[at : at + chunk] = slope @ cast
                if compute is weight.dtype and len(cast) == words:
                    d_weight.addmm_(slope.T, part)
                else:
                    d_weight += (slope.T @ part)[:words]
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.scale = scale
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        gradient = gradient / ctx.scale
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * gradient, d_weight * gradient, None, None, None, None


def _padded(
    weight: Tensor,  # [V, D]
    multiple: int,
) -> Tensor:
    """Return the weight with rows of zeros up to a multiple; itself if there is nothing to add."""
    return torch.nn.functional.pad(weight, (0, 0, 0, extra)) if (extra := -len(weight) % multiple) else weight
