"""Guard of one peer's inner phases: a failed phase reaches neither its slow weights nor its partners.

It compares norms with this peer's own earlier phases (``outer.pseudo_gradient_fault``). Displacements are excluded,
however large: otherwise two halves of a swarm that meet again would each drop the other's weights.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from p2ptrain.outer.step import NORM_HISTORY, pseudo_gradient_fault


class PhaseGuard:
    """History of pseudo-gradient norms, and the norm that displacements have added in the present phase."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=NORM_HISTORY)
        self._added = 0.0

    def begin(self) -> None:
        self._added = 0.0

    def added(self, norm: float) -> None:
        """Count a displacement that moved theta further than x by a vector of this L2 norm."""
        self._added += norm

    def fault_so_far(self, norm: float) -> str | None:
        """Return why a phase whose pseudo-gradient has this L2 norm must not be published; None if it may be."""
        own = max(norm - self._added, 0.0) if math.isfinite(norm) else norm
        return pseudo_gradient_fault(own, self._norms)

    def fault(self, norm: float) -> str | None:
        """Return why a finished phase must not enter the slow weights, and record its norm.

        The history takes the whole norm, including what displacements added: without it, the history would be a lower
        bound that is often near zero, and the first phase without an exchange would look like a fault.
        """
        found = self.fault_so_far(norm)
        if math.isfinite(norm):
            self._norms.append(norm)
        return found

    def forget(self) -> None:
        """Clear the history after the weights were replaced by a donor's."""
        self._norms.clear()
        self._added = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"norms": list(self._norms), "added": self._added}

    def load_state_dict(self, numbers: Mapping[str, Any]) -> None:
        """Restore the result of ``state_dict``. Raises KeyError if it does not fit."""
        self._norms, self._added = deque(numbers["norms"], maxlen=NORM_HISTORY), numbers["added"]
