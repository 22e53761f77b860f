"""The directory of presence records as the simulator has it: one list of all, bounded random samples out of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from p2ptrain.ids import PeerId
from p2ptrain.sim.sizes import presence_bytes
from p2ptrain.swarm import Presence

SAMPLE = 32
"""Records that one lookup returns. A guess: a peer exchanges with a few of them before it looks again."""

REPLICAS = 5
"""Nodes that store a record: hivemind's default (``DHTNode`` num_replicas)."""

REQUEST_BYTES = 150
"""A store or find request and its answer without the records: keys, node ids, signatures. A guess."""

Dated = tuple[Presence, float]
"""A record, and the time until which it counts."""


@dataclass(slots=True)
class SampledDirectory:
    """Answers a lookup with a uniform random sample of the live records; with all while they fit.

    Args:
        random: draws the samples.
        sample: records in one answer, at most.
    """

    random: Random
    sample: int = SAMPLE
    _records: dict[PeerId, Dated] = field(default_factory=dict)
    _peers: list[PeerId] = field(default_factory=list)
    """The same peers in an order that only serves drawing."""
    _places: dict[PeerId, int] = field(default_factory=dict)

    def announce(self, presence: Presence) -> int:
        """Take in a record; returns what storing it costs its peer in bytes sent."""
        if presence.peer not in self._records:
            self._places[presence.peer] = len(self._peers)
            self._peers.append(presence.peer)
        self._records[presence.peer] = presence, presence.issued_at + presence.lifetime_s
        return REPLICAS * (REQUEST_BYTES + presence_bytes(presence))

    def lookup(self, now: float) -> tuple[tuple[Dated, ...], int, int]:
        """Live records, and what asking for them costs in bytes sent and received."""
        if len(self._peers) <= self.sample:
            found = [dated for dated in self._records.values() if dated[1] > now]
        else:
            found = self._draw(now)
        return tuple(found), REQUEST_BYTES, REQUEST_BYTES + sum(presence_bytes(presence) for presence, _ in found)

    def _draw(self, now: float) -> list[Dated]:
        found: dict[PeerId, Dated] = {}
        for _ in range(2 * self.sample):  # enough, for all but the smallest swarms, to find that many different ones
            if len(found) == self.sample or not self._peers:
                break
            peer = self._peers[int(self.random.random() * len(self._peers))]
            dated = self._records[peer]
            if dated[1] > now:
                found[peer] = dated
            else:
                self._forget(peer)
        return list(found.values())

    def _forget(self, peer: PeerId) -> None:
        """Its record has run out; the last in the list takes its place."""
        place, last = self._places.pop(peer), self._peers.pop()
        if last != peer:
            self._peers[place], self._places[last] = last, place
        del self._records[peer]
