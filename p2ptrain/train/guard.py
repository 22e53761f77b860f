"""The guard of one peer's inner phases: what has gone wrong reaches neither its slow weights nor its partners.

It judges by length, against this peer's own earlier phases (``outer.pseudo_gradient_fault``). What displacements
brought is no fault of a phase, however much: two halves of a swarm that meet again would each drop the other's weights.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from p2ptrain.outer import NORM_HISTORY, pseudo_gradient_fault


class PhaseGuard:
    """Remembers how long pseudo-gradients were, and what displacements have added to the present one."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=NORM_HISTORY)
        self._added = 0.0

    def begin(self) -> None:
        """An inner phase begins."""
        self._added = 0.0

    def added(self, norm: float) -> None:
        """A displacement moved theta further than x, by a vector of this L2 norm."""
        self._added += norm

    def fault_so_far(self, norm: float) -> str | None:
        """Why a phase whose pseudo-gradient has this L2 norm now must not be seen by anybody; None when it may."""
        own = max(norm - self._added, 0.0) if math.isfinite(norm) else norm
        return pseudo_gradient_fault(own, self._norms)

    def fault(self, norm: float) -> str | None:
        """The same at the phase's end, where it must not enter the slow weights either.

        The history takes the whole norm, with what displacements added: without, it would be a lower bound that is
        often near zero, and the first phase that met nobody would look like a fault.
        """
        found = self.fault_so_far(norm)
        if math.isfinite(norm):
            self._norms.append(norm)
        return found

    def forget(self) -> None:
        """The weights were replaced by a donor's: what was usual before is no measure."""
        self._norms.clear()
        self._added = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Readable numbers."""
        return {"norms": list(self._norms), "added": self._added}

    def load_state_dict(self, numbers: Mapping[str, Any]) -> None:
        """Inverse of ``state_dict``; raises KeyError where it does not fit."""
        self._norms, self._added = deque(numbers["norms"], maxlen=NORM_HISTORY), numbers["added"]


__all__ = ["PhaseGuard"]
