"""The simulated directory: the DHT's buckets in memory (``sim.shelves``), the peers' views of them, and their cost."""

from __future__ import annotations

from random import Random

from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.sim.shelves import SimulatedBuckets
from p2ptrain.sim.sizes import presence_bytes
from p2ptrain.swarm import Presence
from p2ptrain.swarm.presence_buckets import PresenceBuckets

MOST = 128
"""Most records that one lookup returns, chosen at random if it found more, as in ``net.directory.MAX_RECORDS``."""

REPLICAS = 5
"""Nodes that store a record: hivemind's default (``DHTNode``, num_replicas)."""

REQUEST_BYTES = 150
"""Bytes of a store or find request, or of an answer without the records: keys, node ids, signatures. Guess: counting
the bytes of a real DHT request would settle it."""

Dated = tuple[Presence, float]
"""A record, and the time until which it is valid."""


class SimulatedDirectory:
    """All peers' views of one DHT.

    Args:
        random: chooses the buckets that peers begin with, and the records that a long answer omits.
    """

    def __init__(self, run: RunId, random: Random) -> None:
        self._run = run
        self._random = random
        self._shelves: SimulatedBuckets[Presence] = SimulatedBuckets(run)
        self._views: dict[PeerId, PresenceBuckets] = {}

    def announce(self, presence: Presence, now: float) -> tuple[int, int]:
        """Store a record; return the bytes sent and received for it. A new peer first looks up the swarm's size."""
        view = self._view(presence.peer)
        sent = received = 0
        if view.size is None:
            _, sent, received = self.lookup(presence.peer, now)
        until = presence.issued_at + presence.lifetime_s
        stores = REPLICAS * self._shelves.announce(view, presence.peer, presence, until)
        return sent + stores * (REQUEST_BYTES + presence_bytes(presence)), received + stores * REQUEST_BYTES

    def lookup(self, peer: PeerId, now: float) -> tuple[tuple[Dated, ...], int, int]:
        """Return the live records, and the bytes that looking them up sends and receives."""
        answers = self._shelves.lookup(self._view(peer), now)
        found = answers[0]
        if len(answers) > 1:
            found = {}
            for answer in answers:
                found.update(answer)
        records = list(found.values())
        received = len(answers) * REQUEST_BYTES
        if records:  # all have equal length, up to a byte or two
            received += sum(map(len, answers)) * presence_bytes(records[0][0])
        if len(records) > MOST:
            records = self._random.sample(records, MOST)
        return tuple(records), len(answers) * REQUEST_BYTES, received

    def _view(self, peer: PeerId) -> PresenceBuckets:
        view = self._views.get(peer)
        if view is None:
            view = self._views[peer] = PresenceBuckets(self._random)
        return view
