"""The DHT in memory, as far as presence needs it: what lies in each bucket, until when, and how often it is asked."""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

from p2ptrain.ids import PeerId, RunId
from p2ptrain.swarm.buckets import Bucket, Buckets

Record = TypeVar("Record")


class Shelves(Generic[Record]):
    """One run's buckets. Time comes in as an argument; expired records are cleared away when their bucket is asked.

    Args:
        most: records that a bucket takes in; those of more peers are refused.
    """

    def __init__(self, run: RunId, most: int = 2048) -> None:
        self.stores: Counter[Bucket] = Counter()
        self.gets: Counter[Bucket] = Counter()
        self._run = run
        self._most = most
        self._records: dict[Bucket, dict[PeerId, tuple[Record, float]]] = {}

    def announce(self, buckets: Buckets, peer: PeerId, record: Record, until: float) -> int:
        """Store a peer's record where its view of the buckets says; returns under how many keys."""
        homes = buckets.homes(self._run, peer)
        for bucket in homes:
            self.stores[bucket] += 1
            held = self._records.setdefault(bucket, {})
            if peer in held or len(held) < self._most:
                held[peer] = record, until
        return len(homes)

    def lookup(self, buckets: Buckets, now: float) -> list[dict[PeerId, Record]]:
        """The live records by peer of each bucket that one lookup asks."""
        answers = []
        search = buckets.search()
        while search.next is not None:
            answers.append(self.get(search.next, now))
            search.answered(len(answers[-1]))
        return answers

    def get(self, bucket: Bucket, now: float) -> dict[PeerId, Record]:
        """The live records in one bucket, by peer."""
        self.gets[bucket] += 1
        held = self._records.get(bucket, {})
        live = {peer: kept for peer, kept in held.items() if kept[1] > now}
        if len(live) < len(held):
            self._records[bucket] = live
        return {peer: record for peer, (record, _) in live.items()}
