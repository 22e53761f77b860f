"""When a keeper exchanges, and what a peer tells of fragments that nobody else holds (``swarm.keeping``)."""

from __future__ import annotations

from p2ptrain.swarm.core_state import CoreState
from p2ptrain.swarm.exchange_manager import ExchangeManager
from p2ptrain.swarm.keeping import held_by, words
from p2ptrain.swarm.messages import PeerState
from p2ptrain.swarm.peer_info import NEVER

JITTER = (0.75, 1.25)
"""Bounds of the random factor of a keeper's pause, so that keepers started together do not offer together."""


class KeeperSchedule:
    """A keeper's next exchange, and its notes while it has no weights."""

    def __init__(self, core: CoreState, exchanges: ExchangeManager) -> None:
        self._core = core
        self._exchanges = exchanges
        self._next_at = NEVER
        self._told_why = ""

    def begin(self, now: float) -> None:
        """Make the first exchange due: the keeper has its fragments."""
        self._next_at = now

    def next_due(self) -> float:
        return self._next_at if self._core.state is PeerState.KEEPING else NEVER

    def keep_up(self, now: float) -> None:
        """Make the next exchange due when its time has come."""
        if now >= self.next_due():
            self._next_at = now + self._exchanges.keeper_pace_s(now) * self._core.random.uniform(*JITTER)
            self._exchanges.make_due(now)

    def wait(self, why: str) -> None:
        """Note why a keeper without weights cannot begin, once for each reason."""
        if self._core.progress <= 0 and why != self._told_why:
            self._core.note("keeper waits", why=why)
        self._told_why = why


class HolderWatch:
    """Notes fragments that no other peer holds: they end with this peer."""

    def __init__(self, core: CoreState) -> None:
        self._core = core
        self._told: frozenset[int] = frozenset()

    def look(self, now: float) -> None:
        """Note them, once. Unless there are keepers, every peer holds all."""
        others = [known for known in self._core.members.live(now) if known.state is not PeerState.JOINING]
        lacking: frozenset[int] = frozenset()
        if any(known.state is PeerState.KEEPING for known in others):
            everything = self._core.rules.everything
            lacking = everything.difference(*(held_by(known, everything) for known in others))
        if lacking and lacking != self._told:
            self._core.note("not held", why=words(lacking))
        self._told = lacking
