"""Penalty for partners that hold fragments or the only place for a newcomer longer than necessary.

A slow partner may be honest, so this is not an offence. A partner that held us for too long waits ``REST`` times as
long, whichever side calls, so it takes at most a fifth of our time beyond its due. A peer ten times slower than the
others still spends most of its time in exchanges, because each of its partners pauses independently.

If the trainer waits for partners, only what exceeds the training time of an outer step counts. So slow connections are
met in every round with long inner phases, and no partner takes more than half of a trainer's time and a fifth of the
rest.
"""

from __future__ import annotations

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.ids import PeerId
from p2ptrain.swarm.core_state import CoreState
from p2ptrain.swarm.exchange import Exchange
from p2ptrain.swarm.peer_info import REST
from p2ptrain.swarm.rules import MAX_KNOWN


class SlowPartnerPenalty:
    """Pauses by peer, unknown ones included. ``of_trainers``: whether the trainer is what a partner holds."""

    def __init__(self, core: CoreState, of_trainers: bool = False) -> None:
        self._core = core
        self._of_trainers = of_trainers
        self._until: BoundedDict[PeerId, float] = BoundedDict(MAX_KNOWN)

    def exchanged(self, exchange: Exchange, now: float) -> None:
        """Record that an exchange's fragments are free again, whether or not its payloads were transferred."""
        size = sum(self._core.rules.fragment_bytes[fragment] for fragment in exchange.fragments)
        self._held(exchange.link.peer, size, now - exchange.swap_started_at, now)

    def gave(self, peer: PeerId, seconds: float, now: float) -> None:
        self._held(peer, self._core.rules.weights_bytes, seconds, now)

    def waits(self, peer: PeerId, now: float) -> bool:
        return self._until.get(peer, now) > now

    def _held(self, peer: PeerId, size: int, seconds: float, now: float) -> None:
        too_long_s = self._core.deadlines.too_long_s(size, seconds)
        if self._of_trainers:
            too_long_s -= self._core.seconds_per_outer_step
        if too_long_s <= 0:
            return
        until = self._until[peer] = max(self._until.get(peer, now), now + REST * too_long_s)
        self._core.members.pause(peer, until, now)
