"""Payloads that are not where their sender's sketch said: is it the partner, or are our step widths stale?

Blocks that do not fit the agreed widths count as no difference, which no gate for distances stops, and what they teach
is steps too wide for everybody else. So an exchange of which most blocks do not fit, where they had fitted, is refused.
Widths that are stale fit nobody; weights that are false fit nobody's. Only what several partners in a row say, with
none between them whose weights fit, is said of our widths.
"""

from __future__ import annotations

from p2ptrain.ids import PeerId

WITNESSES = 3
"""Partners in a row, different ones, whose weights do not fit: then it is our widths, and not two liars that meet us
one after the other."""

MOST = 6
"""In a row, from fewer partners: a swarm of two or three has no more. Where two of seven partners lie, six in a row are
theirs once in two thousand exchanges."""


class Misfits:
    """Those in a row."""

    def __init__(self) -> None:
        self._partners: list[PeerId] = []

    def end(self) -> None:
        """A partner's weights fitted."""
        self._partners.clear()

    def add(self, partner: PeerId) -> bool:
        """This partner's did not. Whether our own widths must be stale: the row begins anew."""
        self._partners.append(partner)
        if len(set(self._partners)) < WITNESSES and len(self._partners) < MOST:
            return False
        self._partners.clear()
        return True
