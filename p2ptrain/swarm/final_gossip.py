"""The final gossip: exchanges after the end of training, until the swarm's weights agree.

A peer at the run's end stops training and keeps exchanging, one exchange at a time with random pauses. The final gossip
is over when recent exchanges measured almost no distance and no known peer still trains, when no peer is left, or at
the deadline.
"""

from __future__ import annotations

from itertools import takewhile

from p2ptrain.swarm.core_state import CoreState
from p2ptrain.swarm.exchange_manager import ExchangeManager
from p2ptrain.swarm.messages import PeerState
from p2ptrain.swarm.rules import FINAL_PACE_S

AGREEMENTS = 3
"""Consecutive exchanges that must measure at most the final disagreement, with as many partners or all there are. Peers
that keep meeting in the same pairs agree with nobody else."""

LONELY_S = 5.0
"""Seconds without a possible exchange, and without a known peer that still trains, after which no peer is left."""


class FinalGossip:
    def __init__(self, core: CoreState, exchanges: ExchangeManager) -> None:
        self._core = core
        self._exchanges = exchanges
        self.has_begun = False
        self._until = float("inf")  # until the trainer's end
        self._at = float("inf")

    def begin(self, now: float) -> None:
        self.has_begun = True
        self._until = now + self._core.rules.final_gossip_s
        self._at = now

    def exchanged(self, now: float) -> None:
        self._at = now + self._pause_s() if self.has_begun else float("inf")

    def why_over(self, now: float) -> str:
        """Say why the final gossip is over; return an empty string while it is not."""
        core, exchanges = self._core, self._exchanges
        if not core.rules.exchanges:
            return "this recipe exchanges nothing"
        live = [known for known in core.members.live(now) if known.state is not PeerState.KEEPING]
        near = takewhile(lambda met: met[1] <= core.rules.final_disagreement, reversed(exchanges.distances))
        agreeing = [peer for peer, _ in near]
        agreed = len(agreeing) >= AGREEMENTS and len(set(agreeing)) >= min(AGREEMENTS, len(live))
        agreed = agreed and not exchanges.book.engaged()  # finish what was just accepted
        alone = not len(exchanges.book) and now >= exchanges.last_commit_at + LONELY_S
        if (agreed or alone) and all(known.state is PeerState.FINISHING for known in live):
            return "the swarm agrees" if agreed else "nobody is left to exchange with"
        if now >= self._until:
            return "waited long enough for the others"
        return ""

    def keep_up(self, now: float) -> None:
        if now >= self._at and not len(self._exchanges.book):
            self._at = now + self._pause_s()
            self._exchanges.make_due(now)

    def next_due(self) -> float:
        if not self.has_begun or len(self._exchanges.book):  # the next one waits for the exchange's end
            return self._until
        return min(self._until, self._at)

    def _pause_s(self) -> float:
        """Return a random pause, so that two peers that just exchanged do not repeatedly call each other at once."""
        return FINAL_PACE_S * self._core.random.uniform(0.75, 1.25)
