"""Cost of the directory from 8 to 10,000 peers: ``swarm.presence_buckets`` over a DHT in memory. Takes seconds.

    python -m bench.directory

Peers announce and look up every 20 s and stay for an hour on average. Records outlive their peers by up to 75 s, and
lookups of newcomers are counted. Bytes are those of records with two addresses; DHT routing is left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from statistics import mean, pstdev
from typing import Any

import msgpack
from rich.console import Console
from rich.table import Table

from p2ptrain import wire
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.swarm import PRESENCE_LIFETIME_S, PeerState, Presence
from p2ptrain.swarm.presence_buckets import PresenceBucket, PresenceBuckets
from p2ptrain.swarm.rules import ANNOUNCE_PERIOD_S
from sim.directory import SimulatedBuckets

SIZES = (8, 32, 100, 320, 1000, 3200, 10_000)
SESSION_S = 3600.0
"""Mean stay of a peer. Only newcomers query the root. Guess: measure how long volunteers stay."""
SETTLING_ROUNDS = 6
ROUNDS = 9
"""Measured rounds of 20 s each."""
REPLICAS = 5
"""Nodes that store each key: the default of hivemind."""
RUN = RunId("ab" * 32)
PER_MINUTE = 60.0 / ANNOUNCE_PERIOD_S


def measure(sizes: tuple[int, ...] = SIZES) -> dict[str, Any]:
    """Return the figures by size of swarm."""
    return {str(size): settled(size) for size in sizes}


def settled(size: int, seed: int = 1) -> dict[str, float]:
    """Return the figures of one swarm with steady churn."""
    random = Random(seed)
    shelves: SimulatedBuckets[None] = SimulatedBuckets(RUN)
    peers: dict[PeerId, PresenceBuckets] = {}
    arrivals, received, largest, crowded = 0, 0, 0, 0
    records: list[int] = []
    newcomers: list[int] = []
    in_degrees: Counter[PeerId] = Counter()
    settled_peers: set[PeerId] = set()
    for turn in range(SETTLING_ROUNDS + ROUNDS):
        if turn == SETTLING_ROUNDS:
            shelves.stores.clear()
            shelves.gets.clear()
            in_degrees.clear()
            records, newcomers, received, largest, crowded = [], [], 0, 0, 0
            settled_peers = set(peers)
        start = turn * ANNOUNCE_PERIOD_S
        staying = [peer for peer in peers if random.random() > ANNOUNCE_PERIOD_S / SESSION_S]
        coming = [PeerId(f"peer{arrivals + number}") for number in range(size - len(staying))]
        arrivals += len(coming)
        peers = {peer: peers[peer] for peer in staying} | {peer: PresenceBuckets(random) for peer in coming}
        for place, (peer, buckets) in enumerate(peers.items()):
            now = start + ANNOUNCE_PERIOD_S * place / size
            if buckets.size is None:
                answers = shelves.lookup(buckets, now)
                newcomers.append(len(answers))
                received += sum(map(len, answers))
                crowded = max(crowded, *map(len, answers))
            shelves.announce(buckets, peer, None, now + PRESENCE_LIFETIME_S)
        for buckets in peers.values():
            answers = shelves.lookup(buckets, start + ANNOUNCE_PERIOD_S)
            found = set().union(*answers)
            records.append(len(found))
            in_degrees.update(found)
            received += sum(map(len, answers))
            largest = max(largest, *map(len, answers))
    stayed = [in_degrees[peer] for peer in staying if peer in settled_peers]
    load = shelves.gets + shelves.stores
    record = record_bytes()
    per_peer = PER_MINUTE / (size * ROUNDS)
    return {
        "gets_per_lookup": shelves.gets.total() / (size * ROUNDS),
        "gets_per_peer_per_minute": shelves.gets.total() * per_peer,
        "keys_stored_per_peer_per_minute": shelves.stores.total() * per_peer,
        "newcomer_gets": max(newcomers, default=0),
        "records_per_lookup": mean(records),
        "largest_answer_records": largest,
        "largest_answer_bytes": largest * record,
        "newcomer_largest_answer_records": crowded,
        "newcomer_largest_answer_bytes": crowded * record,
        "kilobytes_per_peer_per_minute": REPLICAS * record * (received + shelves.stores.total()) * per_peer / 1000,
        "busiest_key_share": max(load.values()) / load.total(),
        "busiest_key_per_minute": max(load.values()) * PER_MINUTE / ROUNDS,
        "root_share": load[PresenceBucket(0, 0)] / load.total(),
        "root_records": len(shelves.get(PresenceBucket(0, 0), start + ANNOUNCE_PERIOD_S)),
        "in_degree_deviation": pstdev(stayed) / mean(stayed),
        "one_key_answer_bytes": size * record,
    }


def record_bytes() -> int:
    """Return the size of a record in a DHT answer: subkey, expiration and signed presence with two addresses."""
    places = ("/ip4/203.0.113.7/tcp/31337", "/ip6/2001:db8:1234:5678:9abc:def0:1234:5678/tcp/31337")
    peer = PeerId("12D3KooWPKW6a218aXBfTyERGQHu5bituwTmktMG1Wjqemw5Z91h")
    state, lifetime_s = PeerState.TRAINING, PRESENCE_LIFETIME_S
    presence = Presence(peer, RUN, places, state, 123, 1e7, True, "a nickname", 1.7e9, lifetime_s)
    encoded = wire.encode_presence(replace(presence, signature=b"x" * 64))
    return len(msgpack.packb([msgpack.packb(peer), msgpack.packb(encoded), 1.7e9]))


def main() -> None:
    figures = measure()
    shown = Table(title=f"presence in buckets; a record has {record_bytes()} bytes")
    for heading in (
        "peers", "gets/peer/min", "keys stored/peer/min", "records/lookup", "largest answer", "newcomer: gets, largest",
        "kB/peer/min", "busiest key", "its load/min", "root", "in-degree sd", "one key's answer",
    ):  # fmt: skip
        shown.add_column(heading, justify="right")
    for size, each in figures.items():
        shown.add_row(
            size,
            f"{each['gets_per_peer_per_minute']:.2f}",
            f"{each['keys_stored_per_peer_per_minute']:.1f}",
            f"{each['records_per_lookup']:.0f}",
            f"{each['largest_answer_records']} ({each['largest_answer_bytes'] / 1000:.0f} kB)",
            f"{each['newcomer_gets']}, {each['newcomer_largest_answer_records']}"
            f" ({each['newcomer_largest_answer_bytes'] / 1000:.0f} kB)",
            f"{each['kilobytes_per_peer_per_minute']:.0f}",
            f"{100 * each['busiest_key_share']:.2f} %",
            f"{each['busiest_key_per_minute']:.0f}",
            f"{each['root_records']}, {100 * each['root_share']:.2f} %",
            f"{100 * each['in_degree_deviation']:.1f} %",
            f"{each['one_key_answer_bytes'] / 1000:.0f} kB",
        )
    Console(width=200).print(shown)


if __name__ == "__main__":
    main()
