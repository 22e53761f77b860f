"""Commitments of planned partners, and for how many rounds a broken one is ignored."""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.ids import PeerId
from p2ptrain.swarm.rules import MAX_KNOWN

MAX_IGNORED = 64
"""Maximum number of rounds in which a commitment is ignored: a trainer then waits in vain in one round of 65. Guess:
measure the delays that unreliable partners cause."""

MAX_OURS = 3
"""Broken commitments of one peer that count from rounds in which nobody answered. After an hour without a connection
this peer waits for all partners again within seven rounds; if all break commitments, they delay one round of eight.
Guess: measure how long connections fail."""

EXCHANGES_TO_FORGIVE = 16
"""Exchanges after which one broken commitment of the partner is forgotten. With a value of one, a peer that comes in
every other round would be waited for in all the others. Guess: measure how often honest partners are late."""


@dataclass(slots=True)
class _Broken:
    """Broken commitments of one peer."""

    times: int = 0
    ignored: int = 0
    """Coming rounds in which the peer's commitments are ignored."""
    kept: int = 0
    """Commitments kept since the last broken one was forgiven."""


class RoundCommitments:
    """Commitments that the trainer still waits for; a peer that announces itself makes one, too.

    After a broken one, the peer is not waited for in the next round, then in three, seven, and so on. If it comes
    anyway, it is met. A peer that leaves for a minute does not restore its credit.
    """

    def __init__(self) -> None:
        self._broken: BoundedDict[PeerId, _Broken] = BoundedDict(MAX_KNOWN)

    def broke(self, peer: PeerId, perhaps_ours: bool = False) -> None:
        """Record a broken commitment: the peer did not come, or did not answer.

        ``perhaps_ours``: no other of several partners did either, so our connection may be the cause (``MAX_OURS``).
        """
        broken = self._broken.get(peer) or _Broken()
        broken.times = max(broken.times, min(broken.times + 1, MAX_OURS)) if perhaps_ours else broken.times + 1
        broken.ignored = min(2 ** min(broken.times, 16) - 1, MAX_IGNORED)
        self._broken[peer] = broken

    def take(self, peer: PeerId) -> bool:
        """Take a commitment: return whether our trainer waits for the peer. Each False uses up one round."""
        if not self.are_void(peer):
            return True
        self._broken[peer].ignored -= 1
        return False

    def are_void(self, peer: PeerId) -> bool:
        """Report whether ``take`` will return False."""
        return peer in self._broken and self._broken[peer].ignored > 0

    def kept(self, peer: PeerId) -> None:
        broken = self._broken.get(peer)
        if broken is None:
            return
        broken.kept += 1
        if broken.kept == EXCHANGES_TO_FORGIVE:
            broken.kept = 0
            broken.times -= 1
            if not broken.times:
                del self._broken[peer]
