"""Inner optimizers, AdamW and Muon, over flat vectors.

``adamw`` moves everything by AdamW (Loshchilov and Hutter, arXiv 1711.05101). ``muon`` moves the hidden matrices by
Muon (Jordan et al., kellerjordan.github.io/posts/muon) and the rest (embeddings, output layer, norms, biases) by AdamW,
as its authors do. Muon's update, an orthogonalized momentum, is scaled to the root mean square of AdamW's (.2
sqrt(max(rows, columns)); Liu et al., arXiv 2502.16982, section 2.2), so that both share one learning rate, one schedule
and one weight decay::

    b <- mu b + (1 - mu) g ;  u = (1 - mu) g + mu b         mu: training.muon_momentum
    o = newton_schulz(u)                                    five quintic steps, in bf16 or fp16
    w <- (1 - lr decay) w - .2 sqrt(max(rows, columns)) lr o

Matrices and embeddings decay, norms and biases do not (GPT-3's practice, arXiv 2005.14165). Muon's momentum is stored
in the first moment, like AdamW's; its slice of the second moment stays zero. The state of a peer therefore has one
layout for both optimizers.

torch's fused AdamW runs over the few stretches of the flat vector with and without weight decay, not over parameters;
its plain AdamW does where a device lacks the fused one. torch.optim.Muon takes one matrix after another; here matrices
of one shape are orthogonalized together (measured with 14 matrices of 64 x 64 and 64 x 192: 4.4 ms a step by
torch.optim.Muon, 1.3 ms here).

Legend: P parameters (padded), n matrices of one shape, R and S rows and columns of a matrix, R <= S.
"""

from __future__ import annotations

from math import prod, sqrt
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from p2ptrain.outer.flat import FlatLayout
from p2ptrain.train.accelerator import half_type, has_fused_adamw

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from p2ptrain.manifest import TrainingSection

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic step, from Jordan (kellerjordan.github.io/posts/muon), as in torch.optim.Muon."""

NEWTON_SCHULZ_STEPS = 5
"""Number of steps, from Jordan, as in torch.optim.Muon."""

SMALLEST_NORM = 1e-7
"""Lower bound of the norm, from Jordan, as in torch.optim.Muon."""

TOGETHER = 1 << 26
"""Most elements of the matrices that are orthogonalized together; their copies take ten bytes an element. Guess: time
and memory on cards with other values would settle it."""


def hidden_matrices(module: PreTrainedModel) -> frozenset[str]:
    """Return the names of the parameters that Muon moves: matrices that are neither embeddings nor the output layer."""
    outside = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    output = module.get_output_embeddings()
    if output is not None:
        outside.add(id(output.weight))
    return frozenset(
        name for name, parameter in module.named_parameters() if parameter.ndim == 2 and id(parameter) not in outside
    )


def muon_parameters(module: PreTrainedModel, training: TrainingSection) -> frozenset[str]:
    """Return the names of the parameters that Muon moves in this run; none with AdamW."""
    return hidden_matrices(module) if training.optimizer == "muon" else frozenset()


class _Stretch(NamedTuple):
    """Views that AdamW updates with one weight decay, one per stretch of the flat vector."""

    theta: list[Tensor]
    gradient: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]
    steps: list[Tensor]  # one counter each, which torch increments
    decay: float


class FlatOptimizer:
    """Inner optimizer of one peer. Its state is the given moments, of which it holds views, and AdamW's counter.

    Args:
        layout: layout of the flat vectors.
        training: the manifest's section.
        hidden: the parameters that Muon updates; none with AdamW.
        theta, gradient, first, second: [P] each.
    """

    def __init__(
        self,
        layout: FlatLayout,
        training: TrainingSection,
        hidden: frozenset[str],
        theta: Tensor,
        gradient: Tensor,
        first: Tensor,
        second: Tensor,
    ) -> None:
        self._training = training
        self._products = half_type(theta.device)
        self._is_fused = has_fused_adamw(theta.device)
        self._skips_on_device = self._is_fused and theta.device.type == "cuda"
        runs = _runs(layout, hidden)
        self._counters = torch.zeros(len(runs["decays"]) + len(runs["plain"]), device=theta.device)
        counters = list(self._counters)
        self._adamw = [
            _Stretch(
                [theta[run] for run in runs[kind]],
                [gradient[run] for run in runs[kind]],
                [first[run] for run in runs[kind]],
                [second[run] for run in runs[kind]],
                [counters.pop() for _ in runs[kind]],
                decay,
            )
            for kind, decay in (("decays", training.weight_decay), ("plain", 0.0))
        ]
        self._muon = [(theta[run], gradient[run], first[run]) for run in runs["hidden"]]
        self._shapes = _matrices(layout, hidden, gradient)

    @property
    def steps(self) -> int:
        return int(self._counters[0])

    @steps.setter
    def steps(self, steps: int) -> None:
        self._counters.fill_(steps)

    def step(
        self,
        rate: float,
        skips: Tensor | None = None,  # bool, on the device: whether the gradient is not finite; None: it is finite
    ) -> None:
        """Update theta by the clipped gradient, or skip the step. Overwrites the gradient.

        A CUDA card decides itself, so that the host need not wait for it.
        """
        if skips is not None and not self._skips_on_device:
            if bool(skips):
                return
            skips = None
        self._step_adamw(rate, skips)
        self._step_muon(rate, skips)

    def _step_adamw(self, rate: float, skips: Tensor | None) -> None:
        training = self._training
        found_inf = None if skips is None else skips.float()
        for some in self._adamw:
            adamw(
                some.theta,
                some.gradient,
                some.first,
                some.second,
                [],
                some.steps,
                fused=self._is_fused,
                found_inf=found_inf,
                amsgrad=False,
                maximize=False,
                beta1=training.beta1,
                beta2=training.beta2,
                lr=rate,
                weight_decay=some.decay,
                eps=training.epsilon,
            )

    def _step_muon(self, rate: float, skips: Tensor | None) -> None:
        training = self._training
        learns: float | Tensor = 1 - training.muon_momentum
        keeps: float | Tensor = 1 - rate * training.weight_decay
        if skips is not None:
            learns, keeps = torch.where(skips, 0.0, learns), torch.where(skips, 1.0, keeps)
        for _, update, momentum in self._muon:
            if skips is not None:
                update.masked_fill_(skips, 0.0)  # NaN times 0 is NaN
            momentum.lerp_(update, learns)
            update.lerp_(momentum, training.muon_momentum)
            if skips is not None:
                update.masked_fill_(skips, 0.0)
        for matrices in self._shapes:
            scale = 0.2 * sqrt(max(matrices[0].shape))  # arXiv 2502.16982, section 2.2
            for matrix, orthogonal in zip(matrices, orthogonalized(torch.stack(matrices), self._products), strict=True):
                torch.mul(orthogonal, scale, out=matrix)
        for theta, update, _ in self._muon:
            theta.mul_(keeps).add_(update, alpha=-rate)


def orthogonalized(
    matrices: Tensor,  # [n, R, S] fp32, R <= S
    products: torch.dtype = torch.bfloat16,  # or fp16, for cards that only emulate bf16
) -> Tensor:
    """Return each matrix with its singular values moved to between about .5 and 1.5, [n, R, S] of type ``products``."""
    a, b, c = NEWTON_SCHULZ
    # fp16 has no numbers as small as gradients are, and holds all that the steps compute.
    x = matrices if products is torch.float16 else matrices.to(products)
    x = (x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=SMALLEST_NORM)).to(products)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = torch.bmm(x, x.mT)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x


def _runs(layout: FlatLayout, hidden: frozenset[str]) -> dict[str, list[slice]]:
    """Cut the flat vector into the longest stretches of one kind: hidden (Muon's), decays, plain."""
    runs: dict[str, list[slice]] = {"hidden": [], "decays": [], "plain": []}
    ends = (*layout.offsets[1:], layout.total)
    for name, shape, start, end in zip(layout.names, layout.shapes, layout.offsets, ends, strict=True):
        kind = runs["hidden" if name in hidden else "decays" if len(shape) >= 2 else "plain"]
        if kind and kind[-1].stop == start:
            kind[-1] = slice(kind[-1].start, end)
        else:
            kind.append(slice(start, end))
    return runs


def _matrices(layout: FlatLayout, hidden: frozenset[str], flat: Tensor) -> list[list[Tensor]]:
    """Return views of the hidden matrices in ``flat`` [P], transposed to [R, S] with R <= S, in groups of one shape."""
    shapes: dict[tuple[int, ...], list[Tensor]] = {}
    for name, shape, offset in zip(layout.names, layout.shapes, layout.offsets, strict=True):
        if name in hidden:
            matrix = flat[offset : offset + prod(shape)].view(shape)
            matrix = matrix.T if shape[0] > shape[1] else matrix
            shapes.setdefault(tuple(matrix.shape), []).append(matrix)
    groups = []
    for shape, matrices in shapes.items():
        count = max(1, TOGETHER // prod(shape))
        groups += [matrices[at : at + count] for at in range(0, len(matrices), count)]
    return groups
