"""Inner optimizers, AdamW and Muon, over flat vectors.

``adamw`` moves everything by AdamW (Loshchilov and Hutter, arXiv 1711.05101). ``muon`` moves the hidden matrices by
Muon (Jordan et al., kellerjordan.github.io/posts/muon) and the rest (embeddings, output layer, norms, biases) by AdamW,
as its authors do. Muon's update, an orthogonalized momentum, is scaled to the root mean square of AdamW's (.2
sqrt(max(rows, columns)); Liu et al., arXiv 2502.16982, section 2.2), so that both share one learning rate, one schedule
and one weight decay::

    b <- mu b + (1 - mu) g ;  u = (1 - mu) g + mu b         mu: training.muon_momentum
    o = U S' V^T, where u = U S V^T and S' is near 1        ``orthogonalized`` or ``rational``
    w <- (1 - lr decay) w - .2 sqrt(max(rows, columns)) lr o

A card multiplies 16-bit matrices so fast that five Newton-Schulz steps in them are cheap. A CPU does not, and most only
emulate them (measured with AVX2: 3 GFLOP/s in bf16 beside 90 in fp32). There o is a rational function of u in fp32,
which takes one inverse matrix.

Matrices and embeddings decay, norms and biases do not (GPT-3's practice, arXiv 2005.14165). Muon's momentum is stored
in the first moment, like AdamW's; its slice of the second moment stays zero. The state of a peer therefore has one
layout for both optimizers.

torch's fused AdamW runs over the few stretches of the flat vector with and without weight decay, not over parameters.

Legend: P parameters (padded), n matrices, R and S rows and columns of a matrix, R <= S.
"""

from __future__ import annotations

from math import prod, sqrt
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from p2ptrain.outer.flat import FlatLayout
from p2ptrain.train.accelerator import half_type

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from p2ptrain.manifest import TrainingSection

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic step, from Jordan (kellerjordan.github.io/posts/muon), as in torch.optim.Muon."""

NEWTON_SCHULZ_STEPS = 5
"""Number of steps, from Jordan, as in torch.optim.Muon."""

SMALLEST_NORM = 1e-7
"""Lower bound of the norm, from Jordan, as in torch.optim.Muon."""

RATIONAL = (1.4319, 0.033567, 2.6812e-4)
"""c, a and b of s -> c s (s^2 + a) / (s^2 + b): of all such functions the one nearest to 1 between .003 and 1, off by
at most .48 there (computed). About two thirds of the singular values of the demo's square momenta lie there, and nearly
all of the others (two steps of one run). The losses that chose .003 over .001 are in docs/results/CARD.md."""

TOGETHER = 1 << 26
"""Most elements of the matrices that are orthogonalized together; their copies take ten bytes an element. Guess: time
and memory on cards with other values would settle it."""

FACTORIZED_ROWS = 48
"""Most rows of a matrix that LAPACK factorizes. Measured with 64, 96, 384 and 576 rows: 24 to 64 are about equal."""

GRAMS_TOGETHER = 1 << 20
"""Most elements of the Gram matrices that are inverted together: 12 MB with the copies. One is always allowed."""


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
        products: type of the products of Muon; None: that of the kind of device.
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
        products: torch.dtype | None = None,
    ) -> None:
        self._training = training
        self.products = products or products_type(theta.device)
        """Type of the products of Muon."""
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
        self._matrices = [
            list(zip(*both, strict=True))
            for both in zip(
                *(_matrices(layout, hidden, flat, self.products) for flat in (theta, gradient)), strict=True
            )
        ]
        """Views of theta and of the gradient, in groups that are orthogonalized together."""

    @property
    def steps(self) -> int:
        return int(self._counters[0])

    @steps.setter
    def steps(self, steps: int) -> None:
        self._counters.fill_(steps)

    def step(self, rate: float) -> None:
        """Update theta by the clipped gradient, which is finite. Overwrites the gradient."""
        self._step_adamw(rate)
        self._step_muon(rate)

    def _step_adamw(self, rate: float) -> None:
        training = self._training
        for some in self._adamw:
            adamw(
                some.theta,
                some.gradient,
                some.first,
                some.second,
                [],
                some.steps,
                fused=True,
                amsgrad=False,
                maximize=False,
                beta1=training.beta1,
                beta2=training.beta2,
                lr=rate,
                weight_decay=some.decay,
                eps=training.epsilon,
            )

    def _step_muon(self, rate: float) -> None:
        training = self._training
        for theta, update, momentum in self._muon:
            momentum.lerp_(update, 1 - training.muon_momentum)
            update.lerp_(momentum, training.muon_momentum)
            theta.mul_(1 - rate * training.weight_decay)
        for group in self._matrices:
            if self.products is torch.float32:
                factors = rational(torch.stack([update @ update.mT for _, update in group]))
                for (theta, update), factor in zip(group, factors, strict=True):
                    theta.addmm_(factor, update, alpha=-rate * _scale(theta))
            else:
                found = orthogonalized(torch.stack([update for _, update in group]), self.products)
                for (theta, _), orthogonal in zip(group, found, strict=True):
                    theta.add_(orthogonal, alpha=-rate * _scale(theta))


def products_type(device: torch.device) -> torch.dtype:
    """Return the type in which a kind of device multiplies Muon's matrices: fp32 on a CPU, 16 bits on a card."""
    return torch.float32 if device.type == "cpu" else half_type(device)


def rational(
    grams: Tensor,  # [n, R, R] fp32, X X^T of each matrix X; overwritten
) -> Tensor:
    """Return Q [n, R, R] of which Q X is X with its singular values moved to between about .5 and 1.5 by ``RATIONAL``.

    Q = c + c (a - b) (G + b)^-1 by partial fractions, where G is X X^T divided by its norm, which no square exceeds.
    """
    c, a, b = RATIONAL
    norm = torch.linalg.matrix_norm(grams, keepdim=True).clamp(min=SMALLEST_NORM**2)
    grams.div_(norm).diagonal(dim1=-2, dim2=-1).add_(b)
    found = _inverse(grams)
    found.mul_(c * (a - b)).diagonal(dim1=-2, dim2=-1).add_(c)
    return found.mul_(norm.rsqrt())


def _inverse(
    matrices: Tensor,  # [n, R, R] symmetric, positive definite
) -> Tensor:
    """Return the inverses [n, R, R], by those of halves: products are faster than LAPACK's small factorizations.

    Measured on one thread: 1.2 ms in place of 2.0 for 21 matrices of 96 rows, 11 in place of 13 for seven of 384.
    """
    rows = matrices.shape[-1]
    if rows <= FACTORIZED_ROWS:
        return torch.cholesky_inverse(torch.linalg.cholesky_ex(matrices).L)
    half = rows // 2
    corner = matrices[:, :half, half:]
    first = _inverse(matrices[:, :half, :half])
    across = torch.bmm(first, corner)
    last = _inverse(torch.baddbmm(matrices[:, half:, half:], corner.mT, across, alpha=-1))
    beside = torch.bmm(across, last)
    found = torch.empty_like(matrices)
    found[:, :half, :half] = torch.baddbmm(first, beside, across.mT)
    found[:, :half, half:] = -beside
    found[:, half:, :half] = -beside.mT
    found[:, half:, half:] = last
    return found


def _scale(matrix: Tensor) -> float:
    """Return the factor of an orthogonal update that makes it as large as AdamW's."""
    return 0.2 * sqrt(max(matrix.shape))  # arXiv 2502.16982, section 2.2


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


def _matrices(layout: FlatLayout, hidden: frozenset[str], flat: Tensor, products: torch.dtype) -> list[list[Tensor]]:
    """Return views of the hidden matrices in ``flat`` [P], transposed to [R, S] with R <= S, in groups: of one R for
    ``rational``, which fp32 uses, or of one shape for ``orthogonalized``.
    """
    is_exact = products is torch.float32
    groups: dict[tuple[int, ...], list[Tensor]] = {}
    for name, shape, offset in zip(layout.names, layout.shapes, layout.offsets, strict=True):
        if name in hidden:
            matrix = flat[offset : offset + prod(shape)].view(shape)
            matrix = matrix.T if shape[0] > shape[1] else matrix
            groups.setdefault((len(matrix),) * 2 if is_exact else tuple(matrix.shape), []).append(matrix)
    found = []
    for shape, matrices in groups.items():
        count = max(1, (GRAMS_TOGETHER if is_exact else TOGETHER) // prod(shape))
        found += [matrices[at : at + count] for at in range(0, len(matrices), count)]
    return found
