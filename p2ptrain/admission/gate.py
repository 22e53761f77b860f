"""What one node knows of who may take part, and whom it lets in. State, but no I/O: time and bytes are handed in."""

from __future__ import annotations

from p2ptrain.admission.check import Refusal, refusal
from p2ptrain.admission.records import AccessList, Certificate
from p2ptrain.base.errors import RemoteError
from p2ptrain.base.ids import PeerId, RunId

MAX_REMEMBERED = 4096
"""Peers whose badges are kept: twice what the DHT's validator takes in."""


class Gate:
    """Of a run that does not take everybody. Lives in the network's loop.

    Args:
        author: the run's public key, 32 bytes.
        badge: what we show ourselves; empty where there is nothing to show.
        rulings: the last that we knew; None: we never saw any.
    """

    def __init__(
        self, policy: str, run: RunId, author: bytes, badge: bytes = b"", rulings: AccessList | None = None
    ) -> None:
        self.policy = policy
        self.run = run
        self.author = author
        self.badge = badge
        self.rulings = rulings or AccessList()
        self._badges: dict[PeerId, Certificate] = {}

    def refusal(self, peer: PeerId, shown: bytes, now: float) -> Refusal | None:
        """Whether to talk with a peer that shows this badge (empty: none). Remembers a good badge."""
        known = self._badges.get(peer)
        badge = known if known is not None and known.encode() == shown else None
        if badge is None and shown and self.policy == "invite":
            try:
                badge = Certificate.decode(shown, self.run, self.author)
            except RemoteError:
                return refusal(self.policy, self.rulings, peer, None, now) and Refusal.NOT_GENUINE
        why = refusal(self.policy, self.rulings, peer, badge, now)
        if why is None and badge is not None:
            self._badges.pop(peer, None)  # the latest are last
            self._badges[peer] = badge
            while len(self._badges) > MAX_REMEMBERED:
                del self._badges[next(iter(self._badges))]
        return why

    def counts(self, peer: PeerId, now: float) -> bool:
        """Whether a peer that somebody speaks of counts as a member: by what it showed before, to us or in the DHT."""
        return refusal(self.policy, self.rulings, peer, self._badges.get(peer), now) is None

    def take(self, encoded: bytes) -> bool:
        """Take in rulings from anybody; whether they are newer than ours. Raises RemoteError when they are forged."""
        rulings = AccessList.decode(encoded, self.run, self.author)
        if rulings.serial <= self.rulings.serial:
            return False
        self.rulings = rulings
        return True
