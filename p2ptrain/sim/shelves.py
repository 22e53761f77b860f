"""The DHT in memory, as far as presence needs it: contents and expiry of each bucket, and request counts."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import Generic, TypeVar

from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.swarm.presence_buckets import PresenceBucket, PresenceBuckets

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
