"""Who kept something of ours for longer than it takes, and now waits while others are served.

A partner that is slow may be honest, so it is no offence. But what it holds, nobody else gets: fragments while they
pass one byte at a time, the one place for a newcomer. Whoever has held us for too long waits ``REST`` times as long,
whoever calls; so no partner has more than a fifth of our time beyond its due, and others come between. The slowest of a
swarm, ten times slower than the others, still spends most of its time with somebody: each of its partners rests from it
alone.

Where a trainer waits for partners, its recipe says that it waits for the slowest of them. There a partner may hold it
beyond its due for as long as it trains in an outer step, and only what is more counts: so one whose line is ten times
slower than others' is met in every round of a recipe with long inner phases, and none has more than half of a trainer's
time and a fifth of the rest.
"""

from __future__ import annotations

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm.core_state import CoreState
from p2ptrain.swarm.exchange import Exchange
from p2ptrain.swarm.peer_info import REST
from p2ptrain.swarm.rules import MAX_KNOWN


class SlowPartnerPenalty:
    """By peer, strangers too; bounded: the one that was noted first is forgotten first.

    Args:
        of_trainers: it is the trainer that is held.
    """

    def __init__(self, standing: CoreState, of_trainers: bool = False) -> None:
        self._standing = standing
        self._of_trainers = of_trainers
        self._until: dict[PeerId, float] = {}

    def exchanged(self, exchange: Exchange, now: float) -> None:
        """Its payloads passed, or did not, and its fragments are free again."""
        size = sum(self._standing.rules.fragment_bytes[fragment] for fragment in exchange.fragments)
        self._held(exchange.link.peer, size, now - exchange.swap_started_at, now)

    def gave(self, peer: PeerId, seconds: float, now: float) -> None:
        """A newcomer took our weights, or broke off, and its place is free again."""
        self._held(peer, self._standing.rules.weights_bytes, seconds, now)

    def waits(self, peer: PeerId, now: float) -> bool:
        """Others come first."""
        return self._until.get(peer, now) > now

    def _held(self, peer: PeerId, size: int, seconds: float, now: float) -> None:
        too_long_s = self._standing.deadlines.too_long_s(size, seconds)
        if self._of_trainers:
            too_long_s -= self._standing.seconds_per_outer_step
        if too_long_s <= 0:
            return
        until = self._until[peer] = max(self._until.pop(peer, now), now + REST * too_long_s)
        self._standing.members.pause(peer, until)
        if len(self._until) > MAX_KNOWN:
            del self._until[next(iter(self._until))]
