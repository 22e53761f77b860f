"""The final gossip: exchanges after the trainer's end, until the swarm's weights agree.

Who has come to the run's end trains no more and goes on exchanging, one at a time and at a random pace. It is over when
recent exchanges measured next to nothing and nobody known still trains, when nobody is left, or when patience ends.
"""

from __future__ import annotations

from itertools import takewhile

from p2ptrain.swarm.core_state import CoreState
from p2ptrain.swarm.exchange_manager import ExchangeManager
from p2ptrain.swarm.messages import PeerState
from p2ptrain.swarm.rules import FINAL_PACE_S

AGREEMENTS = 3
"""So many exchanges in a row must measure no more than the final disagreement, with as many partners or all there are:
peers that keep meeting in the same pairs agree with nobody else."""

LONELY_S = 5.0
"""A finished peer that could not exchange for this long, and knows nobody who still trains, has nobody left."""


class FinalGossip:
    """When to exchange after the run's end, and when that is enough."""

    def __init__(self, standing: CoreState, exchanging: ExchangeManager) -> None:
        self._standing = standing
        self._exchanging = exchanging
        self.has_begun = False
        self._until = float("inf")  # until the trainer's end
        self._at = float("inf")

    def begin(self, now: float) -> None:
        """The trainer reached the run's end."""
        self.has_begun = True
        self._until = now + self._standing.rules.final_gossip_s
        self._at = now

    def exchanged(self, now: float) -> None:
        """An exchange was acknowledged: the next one is due after a pause."""
        self._at = now + self._pause_s() if self.has_begun else float("inf")

    def why_over(self, now: float) -> str:
        """Why the final gossip is over; empty while it is not."""
        standing, exchanging = self._standing, self._exchanging
        if not standing.rules.exchanges:
            return "this recipe exchanges nothing"
        live = standing.members.live(now)
        near = takewhile(lambda met: met[1] <= standing.rules.final_disagreement, reversed(exchanging.distances))
        agreeing = [peer for peer, _ in near]
        agreed = len(agreeing) >= AGREEMENTS and len(set(agreeing)) >= min(AGREEMENTS, len(live))
        agreed = agreed and not exchanging.book.engaged()  # what we just accepted, we also do
        alone = not len(exchanging.book) and now >= exchanging.last_commit_at + LONELY_S
        if (agreed or alone) and all(known.state is PeerState.FINISHING for known in live):
            return "the swarm agrees" if agreed else "nobody is left to exchange with"
        if now >= self._until:
            return "waited long enough for the others"
        return ""

    def keep_up(self, now: float) -> None:
        """Make an exchange due where it is time to and none is under way."""
        if now >= self._at and not len(self._exchanging.book):
            self._at = now + self._pause_s()
            self._exchanging.make_due(now)

    def next_due(self) -> float:
        """When it is over at the latest, or ``keep_up`` has something to do."""
        if not self.has_begun or len(self._exchanging.book):  # the next one waits for the exchange's end
            return self._until
        return min(self._until, self._at)

    def _pause_s(self) -> float:
        """Random, or two that just exchanged would call each other at once, and again."""
        return FINAL_PACE_S * self._standing.random.uniform(0.75, 1.25)
