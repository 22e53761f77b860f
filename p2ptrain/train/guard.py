"""The guard of one peer's inner phases: what has gone wrong reaches neither its slow weights nor its partners.

It judges by length, against this peer's own earlier phases (``outer.pseudo_gradient_fault``). What displacements
brought is no fault of a phase, however much: two halves of a swarm that meet again would each drop the other's weights.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from p2ptrain.outer import NORM_HISTORY, pseudo_gradient_fault


class PhaseGuard:
    """Remembers how long pseudo-gradients were, and what moved theta beside the inner steps.

    Args:
        theta: [P] at the start of the first phase, on any device.
    """

    def __init__(self, theta: Tensor) -> None:
        self._norms: deque[float] = deque(maxlen=NORM_HISTORY)
        self._norm_at_start = 0.0
        self._displaced = 0.0
        self.begin(theta)

    def begin(
        self,
        theta: Tensor,  # [P]
    ) -> None:
        """An inner phase begins here."""
        self._norm_at_start = _norm(theta)
        self._displaced = 0.0

    def displaced(self, norm: float) -> None:
        """A displacement of at most this L2 norm was added to theta."""
        self._displaced += norm

    def fault_so_far(
        self,
        theta: Tensor,  # [P]
    ) -> str | None:
        """Why nobody must see the fast weights of this phase. Looks at theta's norm alone: one pass, on its device.

        The norm changes by at most the way that theta went, so whoever is found out here is at the phase's end, too.
        """
        return pseudo_gradient_fault(_less(abs(_norm(theta) - self._norm_at_start), self._displaced), self._norms)

    def fault(self, norm: float, follow: float) -> str | None:
        """Why this phase must not enter the slow weights.

        Args:
            norm: L2 norm of its pseudo-gradient.
            follow: share of the displacements that the slow weights took already (``Recipe.follow``).
        """
        found = pseudo_gradient_fault(_less(norm, (1 - follow) * self._displaced), self._norms)
        if math.isfinite(norm):
            self._norms.append(norm)
        return found

    def forget(self) -> None:
        """The weights were replaced by a donor's: what was usual before is no measure."""
        self._norms.clear()

    def state_dict(self) -> dict[str, Any]:
        """Readable numbers."""
        return {
            "norms": list(self._norms),
            "norm_at_start": self._norm_at_start if math.isfinite(self._norm_at_start) else None,
            "displaced": self._displaced if math.isfinite(self._displaced) else None,
        }

    def load_state_dict(self, numbers: Mapping[str, Any]) -> None:
        """Inverse of ``state_dict``; raises KeyError where it does not fit."""
        self._norms = deque(numbers["norms"], maxlen=NORM_HISTORY)
        start, displaced = numbers["norm_at_start"], numbers["displaced"]
        self._norm_at_start = math.nan if start is None else start
        self._displaced = math.inf if displaced is None else displaced


def _norm(theta: Tensor) -> float:
    return float(torch.linalg.vector_norm(theta))


def _less(norm: float, part: float) -> float:
    """What of a norm is left without a part of it; what is not finite stays so."""
    return max(norm - part, 0.0) if math.isfinite(norm) else norm


__all__ = ["PhaseGuard"]
