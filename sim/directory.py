"""The simulated directory: the DHT's buckets in memory, the peers' views of them, and their cost."""

from __future__ import annotations

from collections import Counter, defaultdict
from math import inf
from random import Random
from typing import Generic, TypeVar

from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.swarm import Presence
from p2ptrain.swarm.presence_buckets import PresenceBucket, PresenceBuckets
from sim.sizes import presence_bytes

MOST = 128
"""Most records that one lookup returns, chosen at random if it found more, as in ``net.directory.MAX_RECORDS``."""

REPLICAS = 5
"""Nodes that store a record: hivemind's default (``DHTNode``, num_replicas)."""

REQUEST_BYTES = 150
"""Bytes of a store or find request, or of an answer without the records: keys, node ids, signatures. Guess: counting
the bytes of a real DHT request would settle it."""

Dated = tuple[Presence, float]
"""A record, and the time until which it is valid."""

Record = TypeVar("Record")


class SimulatedBuckets(Generic[Record]):
    """Buckets of one run. Time is an argument; expired records are removed when their bucket is read.

    Args:
        most: most records in a bucket; records of further peers are refused.
    """

    def __init__(self, run: RunId, most: int = 2048) -> None:
        self.stores: Counter[PresenceBucket] = Counter()
        self.gets: Counter[PresenceBucket] = Counter()
        self._run = run
        self._most = most
        self._records: dict[PresenceBucket, dict[PeerId, tuple[Record, float]]] = {}
        self._clean_until: dict[PresenceBucket, float] = {}
        """Times before which nothing in the bucket expires."""

    def announce(self, buckets: PresenceBuckets, peer: PeerId, record: Record, until: float) -> int:
        """Store a peer's record where its view of the buckets says; return the number of keys."""
        homes = buckets.homes(self._run, peer)
        for bucket in homes:
            self.stores[bucket] += 1
            held = self._records.setdefault(bucket, {})
            if peer in held or len(held) < self._most:
                held[peer] = record, until
                self._clean_until[bucket] = min(self._clean_until.get(bucket, until), until)
        return len(homes)

    def lookup(self, buckets: PresenceBuckets, now: float) -> list[dict[PeerId, tuple[Record, float]]]:
        """Return the live records of each bucket that one lookup reads, by peer, each with its end. Read-only."""
        answers = []
        search = buckets.search()
        while search.next is not None:
            answers.append(self.get(search.next, now))
            search.answered(len(answers[-1]))
        return answers

    def get(self, bucket: PresenceBucket, now: float) -> dict[PeerId, tuple[Record, float]]:
        """Return the live records of one bucket, by peer, each with its end. Read-only."""
        self.gets[bucket] += 1
        held = self._records.get(bucket, {})
        if held and now >= self._clean_until[bucket]:
            held = self._records[bucket] = {peer: kept for peer, kept in held.items() if kept[1] > now}
            self._clean_until[bucket] = min((until for _, until in held.values()), default=inf)
        return held


class SimulatedDirectory:
    """All peers' views of one DHT.

    Args:
        random: chooses the buckets that peers begin with, and the records that a long answer omits.
    """

    def __init__(self, run: RunId, random: Random) -> None:
        self._run = run
        self._random = random
        self._buckets: SimulatedBuckets[Presence] = SimulatedBuckets(run)
        self._views: defaultdict[PeerId, PresenceBuckets] = defaultdict(lambda: PresenceBuckets(random))

    def announce(self, presence: Presence, now: float) -> tuple[int, int]:
        """Store a record; return the bytes sent and received for it. A new peer first looks up the swarm's size."""
        view = self._views[presence.peer]
        sent = received = 0
        if view.size is None:
            _, sent, received = self.lookup(presence.peer, now)
        until = presence.issued_at + presence.lifetime_s
        stores = REPLICAS * self._buckets.announce(view, presence.peer, presence, until)
        return sent + stores * (REQUEST_BYTES + presence_bytes(presence)), received + stores * REQUEST_BYTES

    def size(self, peer: PeerId) -> int:
        """Return the number of peers by this peer's last lookup."""
        return self._views[peer].size or 0

    def lookup(self, peer: PeerId, now: float) -> tuple[tuple[Dated, ...], int, int]:
        """Return the live records, and the bytes that looking them up sends and receives."""
        answers = self._buckets.lookup(self._views[peer], now)
        found = answers[0] if len(answers) == 1 else {peer: record for each in answers for peer, record in each.items()}
        records = list(found.values())
        received = len(answers) * REQUEST_BYTES
        if records:  # all have equal length, up to a byte or two
            received += sum(map(len, answers)) * presence_bytes(records[0][0])
        if len(records) > MOST:
            records = self._random.sample(records, MOST)
        return tuple(records), len(answers) * REQUEST_BYTES, received
