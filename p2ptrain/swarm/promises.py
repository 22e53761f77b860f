"""Promises of partners that a trainer waits for, and what is remembered of those that were broken."""

from __future__ import annotations

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm.rules import MAX_KNOWN

MOST_UNHEARD = 64
"""Rounds in which a promise counts for nothing, at most: then a trainer waits for one that lies in one round of 65. A
guess."""

MOST_OURS = 3
"""Broken promises of one peer that count of rounds in which nobody answered: after an hour without a line we wait for
everybody again seven rounds later, and partners who all lie hold us up in one round of eight. A guess."""

FORGIVEN = 16
"""Exchanges with one that broke a promise after which one of those is forgotten. If it were one alone, whoever comes in
every other round would be waited for in all the others. A guess."""


class RoundCommitments:
    """Whose word that it will come our trainer still waits for; whoever announces itself gives it, too.

    Who did not come, or did not answer, is not waited for in the next round, then in three, seven, and so on. Whoever
    comes all the same is met. Bounded by number, and not by who is here: else going away for a minute would be all
    that it takes to be believed again.
    """

    def __init__(self) -> None:
        self._broken: dict[PeerId, int] = {}
        """How many that are not forgiven; who broke one last comes last, ..."""
        self._unheard: dict[PeerId, int] = {}
        """... in how many rounds to come the next ones count for nothing, ..."""
        self._kept: dict[PeerId, int] = {}
        """... and how many were kept since the last one was forgiven."""

    def broke(self, peer: PeerId, perhaps_ours: bool = False) -> None:
        """It did not come, or did not answer.

        Args:
            perhaps_ours: nobody else of several did either. That may be our own line, and counts up to ``MOST_OURS``.
        """
        before = self._broken.pop(peer, 0)
        self._broken[peer] = times = max(before, min(before + 1, MOST_OURS)) if perhaps_ours else before + 1
        self._unheard[peer] = min(2 ** min(times, 16) - 1, MOST_UNHEARD)
        if len(self._broken) > MAX_KNOWN:
            self._forget(next(iter(self._broken)))

    def count(self, peer: PeerId) -> bool:
        """It promises to come: whether our trainer waits for it. No is said once a round."""
        if left := self._unheard.get(peer, 0):
            self._unheard[peer] = left - 1
        return not left

    def are_void(self, peer: PeerId) -> bool:
        """Whether ``count`` will say no."""
        return self._unheard.get(peer, 0) > 0

    def kept(self, peer: PeerId) -> None:
        """It came, and we exchanged."""
        if peer not in self._broken:
            return
        self._kept[peer] = self._kept.get(peer, 0) + 1
        if self._kept[peer] == FORGIVEN:
            self._kept[peer] = 0
            self._broken[peer] -= 1
            if not self._broken[peer]:
                self._forget(peer)

    def _forget(self, peer: PeerId) -> None:
        for each in (self._broken, self._unheard, self._kept):
            each.pop(peer, None)
