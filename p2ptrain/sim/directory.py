"""The simulated directory: the DHT's buckets in memory (``sim.shelves``), what peers make of them, what it costs."""

from __future__ import annotations

from random import Random

from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.sim.shelves import SimulatedBuckets
from p2ptrain.sim.sizes import presence_bytes
from p2ptrain.swarm import Presence
from p2ptrain.swarm.presence_buckets import PresenceBuckets

MOST = 128
"""Records that one lookup returns, at random where it found more: as ``net.directory.MAX_RECORDS``."""

REPLICAS = 5
"""Nodes that store a record: hivemind's default (``DHTNode``, num_replicas)."""

REQUEST_BYTES = 150
"""A request to store or find, or its answer without the records: keys, node ids, signatures. A guess."""

Dated = tuple[Presence, float]
"""A record, and the time until which it counts."""


class SimulatedDirectory:
    """All peers' views of one DHT.

    Args:
        random: decides which buckets peers begin with, and which records are left out of a long answer.
    """

    def __init__(self, run: RunId, random: Random) -> None:
        self._run = run
        self._random = random
        self._shelves: SimulatedBuckets[Presence] = SimulatedBuckets(run)
        self._views: dict[PeerId, PresenceBuckets] = {}

    def announce(self, presence: Presence, now: float) -> tuple[int, int]:
        """Store a record; bytes that its peer sends and receives. As a real one, a peer looks first how large the
        swarm is."""
        view = self._view(presence.peer)
        sent = received = 0
        if view.size is None:
            _, sent, received = self.lookup(presence.peer, now)
        until = presence.issued_at + presence.lifetime_s
        stores = REPLICAS * self._shelves.announce(view, presence.peer, presence, until)
        return sent + stores * (REQUEST_BYTES + presence_bytes(presence)), received + stores * REQUEST_BYTES

    def lookup(self, peer: PeerId, now: float) -> tuple[tuple[Dated, ...], int, int]:
        """Live records, and the bytes that asking for them sends and receives."""
        answers = self._shelves.lookup(self._view(peer), now)
        found = answers[0]
        if len(answers) > 1:
            found = {}
            for answer in answers:
                found.update(answer)
        records = list(found.values())
        received = len(answers) * REQUEST_BYTES
        if records:  # all are as long, but for a byte or two
            received += sum(map(len, answers)) * presence_bytes(records[0][0])
        if len(records) > MOST:
            records = self._random.sample(records, MOST)
        return tuple(records), len(answers) * REQUEST_BYTES, received

    def _view(self, peer: PeerId) -> PresenceBuckets:
        view = self._views.get(peer)
        if view is None:
            view = self._views[peer] = PresenceBuckets(self._random)
        return view
