"""Commitments of partners that a trainer waits for, and the record of broken ones."""

from __future__ import annotations

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm.rules import MAX_KNOWN

MOST_UNHEARD = 64
"""Maximum number of rounds in which a commitment is ignored: a trainer then waits in vain in one round of 65. Guess:
measure the delays that unreliable partners cause."""

MOST_OURS = 3
"""Broken commitments of one peer that count from rounds in which nobody answered. After an hour without a connection we
wait for everybody again within seven rounds, and partners that all break commitments delay one round of eight. Guess:
measure how long connections fail."""

FORGIVEN = 16
"""Exchanges after which one broken commitment of the partner is forgotten. With a value of one, a peer that comes in
every other round would be waited for in all the others. Guess: measure how often honest partners are late."""


class RoundCommitments:
    """Commitments that the trainer still waits for; a peer that announces itself makes one, too.

    After a broken commitment, the peer is not waited for in the next round, then in three, seven, and so on. If it
    comes anyway, it is met. Bounded by number and not by presence; otherwise a peer could restore its credit by leaving
    for a minute.
    """

    def __init__(self) -> None:
        self._broken: dict[PeerId, int] = {}
        """Unforgiven broken commitments by peer; the latest to break one comes last."""
        self._unheard: dict[PeerId, int] = {}
        """Coming rounds in which the peer's commitments are ignored."""
        self._kept: dict[PeerId, int] = {}
        """Commitments kept since the last broken one was forgiven."""

    def broke(self, peer: PeerId, perhaps_ours: bool = False) -> None:
        """Record a broken commitment: the peer did not come, or did not answer.

        Args:
            perhaps_ours: no other of several partners did either. Our own connection may be the cause, so this counts
                only up to ``MOST_OURS``.
        """
        before = self._broken.pop(peer, 0)
        self._broken[peer] = times = max(before, min(before + 1, MOST_OURS)) if perhaps_ours else before + 1
        self._unheard[peer] = min(2 ** min(times, 16) - 1, MOST_UNHEARD)
        if len(self._broken) > MAX_KNOWN:
            self._forget(next(iter(self._broken)))

    def count(self, peer: PeerId) -> bool:
        """Handle a commitment: return whether our trainer waits for the peer. Each False uses up one round."""
        if left := self._unheard.get(peer, 0):
            self._unheard[peer] = left - 1
        return not left

    def are_void(self, peer: PeerId) -> bool:
        """Report whether ``count`` will return False."""
        return self._unheard.get(peer, 0) > 0

    def kept(self, peer: PeerId) -> None:
        """Record a kept commitment: the peer came, and we exchanged."""
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
