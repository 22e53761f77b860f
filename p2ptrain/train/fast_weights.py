"""Fast weights of one peer on the training device: how they are displaced, copied to the host, and how far they moved.

A large CUDA card also holds the slow weights, so that the distance is one pass there and one number for the host.
Elsewhere the host compares.

Legend: P parameters (padded), F elements of one fragment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from p2ptrain.outer.mixing import l2_distance
from p2ptrain.ports import InnerTask
from p2ptrain.train import accelerator
from p2ptrain.train.device_copies import Arrival, copies_of

SLOW_SHARE = 0.05
"""Largest share of a card's memory for the slow weights. With a copy of llama-135m (3.4 % of 16 GB, 9 % of 6 GB) a card
of 6 GB no longer has room for a sequence without recomputation (tests/train/test_activations.py)."""


def holds_slow(
    device: torch.device,
    size_bytes: int,  # of the weights
) -> bool:
    """Return whether a card holds the slow weights beside the fast ones."""
    return device.type == "cuda" and size_bytes <= SLOW_SHARE * accelerator.total_bytes(device)


@dataclass(frozen=True, slots=True)
class FastCopy:
    """Copy of the fast weights on the host that may still be on its way from a card."""

    weights: Arrival  # [F] each
    distances: Arrival | None  # of the fragments from the slow weights; None: the host measures them

    @property
    def is_complete(self) -> bool:
        return self.weights.is_complete

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The copy, [F] each. Waits for it."""
        return self.weights.wait()

    def distances_from(
        self,
        slow: Sequence[Tensor],  # [F] each, as they were at the copy
    ) -> Tensor:
        """Return the L2 norm of each fragment of ``slow`` minus the copy, fp64. Waits for it."""
        if self.distances is not None:
            return self.distances.wait()[0].double()
        return _distances(slow, self.parts)


class FastWeights:
    """The inner task's vector theta, in fragments. Only the trainer thread uses it.

    Args:
        task: its ``theta`` [P] are the fast weights; they begin at the slow ones.
        pieces: slices of [0, P), one per fragment.
    """

    def __init__(self, task: InnerTask, pieces: Sequence[slice]) -> None:
        self._task = task
        self._pieces = tuple(pieces)
        self._copies = copies_of(task.theta.device)
        holds = holds_slow(task.theta.device, task.theta.nbytes)
        self._slow = task.theta.detach().clone() if holds else None
        """Slow weights, [P] on the card."""

    @property
    def parts(self) -> Iterator[Tensor]:
        """Fast weights, [F] each on the host: views of theta if that is there too, else one copy after the other."""
        if not self._copies.are_late:
            yield from (part.cpu() for part in self._views)
            return
        coming: list[Arrival] = []
        for part in self._views:
            coming.append(self._copies.snapshot([part]))  # while the caller uses the fragment before
            if len(coming) == 2:
                yield from coming.pop(0).wait()
        yield from coming.pop().wait()

    def copy(self) -> FastCopy:
        """Start to copy the fast weights as they are now; return at once from a CUDA card."""
        distances = None if self._slow is None else self._copies.result(self._distances_on_card(self._slow))
        return FastCopy(self._copies.snapshot(self._views), distances)

    def distances(
        self,
        slow: Sequence[Tensor],  # [F] each on the host
    ) -> Tensor:
        """Return the L2 norm of each fragment of a phase's pseudo-gradient, ``slow`` minus the fast weights, fp64."""
        if self._slow is not None:
            return self._copies.result(self._distances_on_card(self._slow)).wait()[0].double()
        return _distances(slow, self.parts)

    def begin_at(
        self,
        slow: Sequence[Tensor],  # [F] each on the host
    ) -> None:
        """Set the fast weights to the slow ones, where an inner phase begins."""
        self.load(slow)
        if self._slow is not None:
            self._slow.copy_(self._task.theta)

    def resume(
        self,
        theta: Tensor,  # [P]
        slow: Tensor,  # [P]
    ) -> None:
        """Set the weights of an inner phase that was interrupted."""
        self._task.theta.copy_(theta)
        if self._slow is not None:
            self._slow.copy_(slow)

    def load(
        self,
        parts: Sequence[Tensor],  # [F] each on the host
    ) -> None:
        """Replace the fast weights within an inner phase."""
        for view, part in zip(self._views, parts, strict=True):
            view.copy_(part)

    def buffer(self, like: Tensor) -> Tensor | None:
        """Return host memory of this shape from which a displacement reaches theta fast; None if any memory is."""
        return self._copies.buffer(like)

    def displace(
        self,
        fragment: int,
        taken: Tensor,  # [F] on the host: displacement of theta
        moved: Tensor,  # [F] on the host: displacement of x
    ) -> None:
        """Displace a fragment of the fast weights, and on a card of the slow ones there."""
        piece, device = self._pieces[fragment], self._task.theta.device
        there = self._copies.to_device(taken, device)
        self._task.theta[piece].add_(there)
        if self._slow is not None:
            self._slow[piece].add_(there if moved is taken else self._copies.to_device(moved, device))

    @property
    def _views(self) -> list[Tensor]:
        return [self._task.theta[piece] for piece in self._pieces]

    def _distances_on_card(self, slow: Tensor) -> Tensor:
        """Return the L2 distance of each fragment from the slow weights."""
        pairs = zip((slow[piece] for piece in self._pieces), self._views, strict=True)
        return torch.stack([torch.linalg.vector_norm(x - theta) for x, theta in pairs])


class Mirrored(InnerTask, Protocol):
    """Inner task whose ``theta`` is a copy on the host of the weights that a trainer's card has."""

    def store(self, moments: bool = False) -> None:
        """Copy the weights from the card to ``theta``; without a trainer, ``theta`` holds the last copy."""

    def load(self) -> None:
        """Copy ``theta`` to the card."""

    def add(self, piece: slice, displacement: Tensor) -> None:
        """Add a displacement, on the host, to a piece of the weights on the card."""


class MirroredWeights(FastWeights):
    """Fast weights of a trainer that has them elsewhere: they are copied before they are read, and back."""

    def __init__(self, task: Mirrored, pieces: Sequence[slice]) -> None:
        super().__init__(task, pieces)
        self._mirrored = task

    @property
    def parts(self) -> Iterator[Tensor]:
        self._mirrored.store()
        return super().parts

    def copy(self) -> FastCopy:
        self._mirrored.store()
        return super().copy()

    def distances(self, slow: Sequence[Tensor]) -> Tensor:
        return _distances(slow, self.parts)

    def resume(self, theta: Tensor, slow: Tensor) -> None:
        super().resume(theta, slow)
        self._mirrored.load()

    def load(self, parts: Sequence[Tensor]) -> None:
        super().load(parts)
        self._mirrored.load()

    def displace(self, fragment: int, taken: Tensor, moved: Tensor) -> None:
        self._mirrored.add(self._pieces[fragment], taken)


def _distances(slow: Sequence[Tensor], thetas: Sequence[Tensor] | Iterator[Tensor]) -> Tensor:
    norms = [l2_distance(x, theta) for x, theta in zip(slow, thetas, strict=True)]
    return torch.tensor(norms, dtype=torch.float64)
