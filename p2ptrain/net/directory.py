"""``ports.Directory`` over the DHT: where live peers of the run are found, and the cache that outlives a restart.

One DHT key per bucket (``swarm.presence_buckets`` decides which of them a peer announces itself under, and which a
lookup asks); under it one subkey per peer id holding its encoded, signed presence until it expires. Every node, the
bootstrap too, runs ``PresenceValidator``: it stores and returns nothing but presence records of this run whose
signatures hold, under the keys of their own peers' buckets, so the DHT can neither be filled with other things nor
forged. Since a node may be modified, lookups verify again what comes back. In a run that does not take everybody
(``p2ptrain.admission``) a peer's badge lies beside its presence, and only those that are admitted are stored or found.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from random import Random

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import get_dht_time

from p2ptrain import framing, statements, wire
from p2ptrain.admission import Gate
from p2ptrain.base import files
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.net import access_list_store
from p2ptrain.net.dht import network_errors
from p2ptrain.net.dht_protocol import MAX_ENTRIES
from p2ptrain.net.identity import verify
from p2ptrain.swarm import PRESENCE_LIFETIME_S, PeerState, Presence
from p2ptrain.swarm.presence_buckets import MAX_LEVEL, PresenceBucket, PresenceBuckets, home

logger = logging.getLogger(__name__)

DEADLINE_S = 15.0
"""For one announcement or lookup. A guess: 34 ms a key were measured with 24 nodes, and each dead node on the way costs
3 s."""
MAX_RECORDS = 128
"""Presences that one lookup returns, at random where it found more: a newcomer does, and a peer in a swarm that just
grew. A guess: more than a peer can exchange with in their lifetime."""
MAX_STORED_PEERS = MAX_ENTRIES
"""Peers that a node takes in live records of, to store or as a lookup's answer: beyond it the answer of a crowded key
would near the 4 MiB that break unary calls. In a swarm that has settled a node sees some hundreds."""
CLOCK_SKEW_S = 300.0
"""How far ahead of ours an issuer's clock may be. A guess."""
MAX_SEALED_BYTES = wire.MAX_PRESENCE_BYTES + framing.MAX_BADGE_BYTES + 8
"""A presence record and a badge, and what msgpack puts around them."""
MAX_CACHED = 64


def presence_key(run: RunId, bucket: PresenceBucket) -> str:
    """The DHT key of a bucket of a run's presence records."""
    return f"p2ptrain.{run}.presence.{bucket.level}.{bucket.number}"


class PresenceValidator(RecordValidatorBase):
    """Lets pass presence records of one run that their owners signed, and its rulings. Runs on every node."""

    def __init__(self, run: RunId, gate: Gate | None = None) -> None:
        self.gate = gate
        """None: an open run, or one whose manifest is not here yet."""
        self._run = run
        self._expirations: dict[PeerId, float] = {}

    def validate(self, record: DHTRecord) -> bool:
        if self.gate is not None and record.key == access_list_store.key_bytes(self._run):
            return access_list_store.may_be_stored(record, self.gate)
        presence = _unwrapped(record.value, self.gate)
        return (
            presence is not None
            and presence.run == self._run
            and record.subkey == MSGPackSerializer.dumps(presence.peer)
            and _is_home(self._run, presence.peer, record.key)
            and self._is_timely(presence, record.expiration_time)
            and self._has_room(presence.peer, record.expiration_time)
        )

    def _is_timely(self, presence: Presence, expiration: float) -> bool:
        until = presence.issued_at + presence.lifetime_s
        return (
            expiration <= until + 1.0
            and presence.issued_at <= get_dht_time() + CLOCK_SKEW_S
            and presence.lifetime_s <= PRESENCE_LIFETIME_S
        )

    def _has_room(self, peer: PeerId, expiration: float) -> bool:
        if peer not in self._expirations and len(self._expirations) >= MAX_STORED_PEERS:
            now = get_dht_time()
            self._expirations = {known: until for known, until in self._expirations.items() if until > now}
            if len(self._expirations) >= MAX_STORED_PEERS:
                return False
        self._expirations[peer] = max(expiration, self._expirations.get(peer, 0.0))
        return True


class DhtDirectory:
    """See the module. A presence's lifetime must not shrink from one announcement to the next: the DHT keeps whichever
    record expires later. Keep it as long as the node: it learns how large the swarm is."""

    def __init__(self, dht: DHTNode, run: RunId, random: Random | None = None) -> None:
        self.gate: Gate | None = None
        """None: an open run, or one whose manifest is not here yet."""
        self._dht = dht
        self._run = run
        self._random = random or Random()
        self._buckets = PresenceBuckets(self._random)
        self._saw_all = True
        self._lying: dict[PresenceBucket, float] = {}
        """Where records of ours lie, until when."""

    @property
    def size(self) -> int:
        """About how many peers the swarm has; 0 before the first lookup."""
        return self._buckets.size or 0

    @property
    def sees_all(self) -> bool:
        """Whether the last lookup could find everybody, not a sample."""
        return self._saw_all

    async def announce(self, presence: Presence) -> None:
        """Store a record. The first time this looks up first: how large the swarm is decides where the record lies."""
        if self._buckets.size is None:
            with contextlib.suppress(NetworkError):  # then the root it is, as in any small swarm
                await self.lookup()
        until = presence.issued_at + presence.lifetime_s
        homes = self._homes(presence)
        try:
            async with asyncio.timeout(DEADLINE_S), network_errors("storing our record"):
                stored = await self._dht.store_many(
                    [presence_key(self._run, bucket) for bucket in homes],
                    [self._sealed(presence)] * len(homes),
                    until,
                    subkeys=[presence.peer] * len(homes),
                )
        except TimeoutError:
            raise NetworkError(f"storing our record took more than {DEADLINE_S:.0f} s") from None
        if not any(stored.values()):
            raise NetworkError("no node stored our record; if this lasts, check this machine's clock")
        self._lying |= dict.fromkeys(homes, until)

    async def lookup(self) -> list[Presence]:
        if not self._dht.protocol.routing_table.uid_to_peer_id:
            raise NetworkError("no other node is known")
        found: dict[PeerId, Presence] = {}
        search = self._buckets.search()
        try:
            async with asyncio.timeout(DEADLINE_S):
                while search.next is not None:
                    records = await self._records(search.next)
                    search.answered(len(records))
                    found |= {record.peer: record for record in records}
        except TimeoutError:
            if not found:
                raise NetworkError(f"the lookup took more than {DEADLINE_S:.0f} s") from None
        except NetworkError:
            if not found:
                raise
        self._saw_all = search.saw_all
        # Not the latest: records may be dated ahead, and would then crowd out all others.
        return self._random.sample(list(found.values()), min(len(found), MAX_RECORDS))

    def _sealed(self, presence: Presence) -> bytes:
        """What is stored of us: the record, and where there is a gate our badge."""
        encoded = wire.encode_presence(presence)
        return encoded if self.gate is None else statements.packed([encoded, self.gate.badge])

    def _homes(self, presence: Presence) -> list[PresenceBucket]:
        """Where to store a record now; the last one also wherever an earlier one still says that we are here."""
        now = get_dht_time()
        self._lying = {bucket: until for bucket, until in self._lying.items() if until > now}
        homes = self._buckets.homes(self._run, presence.peer)
        return list({*homes, *self._lying}) if presence.state is PeerState.LEAVING else homes

    async def _records(self, bucket: PresenceBucket) -> list[Presence]:
        """The live records of a bucket that their owners signed. Raises NetworkError."""
        async with network_errors("the lookup"):
            found = await self._dht.get(presence_key(self._run, bucket), latest=True)
        entries = found.value if found is not None and isinstance(found.value, dict) else {}
        now = get_dht_time()
        records = {
            presence.peer: presence
            for entry in entries.values()
            if (presence := _decoded(entry.value, self.gate)) is not None
            and presence.run == self._run
            and presence.issued_at + presence.lifetime_s > now
            and home(self._run, presence.peer, bucket.level) == bucket
        }
        return list(records.values())


class PeerCache:
    """The last known peers, on disk: how a known swarm is rejoined when every bootstrap is gone."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self, run: RunId) -> list[Presence]:
        """The run's cached records that are well-formed and signed; expired ones too, for their addresses.

        It is only a cache: a missing or damaged file is an empty one.
        """
        try:
            entries = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            logger.warning("the peer cache %s is unreadable and starts anew: %s", self._path, error)
            return []
        records = [_from_json(entry) for entry in entries[:MAX_CACHED]] if isinstance(entries, list) else []
        return [record for record in records if record is not None and record.run == run and verify(record)]

    def save(self, records: Iterable[Presence]) -> None:
        """Replace the cache by the latest of these, one per peer. Raises OSError."""
        latest = {record.peer: record for record in sorted(records, key=lambda record: record.issued_at)}
        kept = sorted(latest.values(), key=lambda record: record.issued_at, reverse=True)[:MAX_CACHED]
        text = json.dumps([_to_json(record) for record in kept], indent=1)
        files.replace(self._path, text.encode(), lasting=False)  # on the event loop, and it is only a cache


@lru_cache(maxsize=4 * MAX_STORED_PEERS)
def _is_home(run: RunId, peer: PeerId, key: bytes) -> bool:
    """Whether a key is that of one of the peer's buckets. Remembered: the same come back with every record."""
    keys = (presence_key(run, home(run, peer, level)) for level in range(MAX_LEVEL + 1))
    return any(DHTID.generate(source=each).to_bytes() == key for each in keys)


@lru_cache(maxsize=2 * MAX_STORED_PEERS)
def _genuine(encoded: bytes) -> Presence | None:
    """The record that these bytes spell, if it is well-formed and signed. Remembered: each comes back many times."""
    try:
        presence = wire.decode_presence(encoded)
    except (RemoteError, RecursionError):  # lists in lists, so deep that the wire cannot say what they are
        return None
    return presence if verify(presence) else None


def _decoded(value: object, gate: Gate | None) -> Presence | None:
    """The genuine presence in what is stored, of a peer that may take part."""
    if type(value) is not bytes:
        return None
    if gate is None:
        return _genuine(value)
    try:
        match statements.unpacked(value, MAX_SEALED_BYTES):
            case [bytes(encoded), bytes(badge)]:
                presence = _genuine(encoded)
                if presence is not None and gate.refusal(presence.peer, badge, get_dht_time()) is None:
                    return presence
    except RemoteError:
        pass
    return None


def _unwrapped(value: bytes, gate: Gate | None) -> Presence | None:
    """The presence in a stored value, which hivemind wraps in one layer of msgpack."""
    try:
        return _decoded(msgpack.unpackb(value, max_bin_len=MAX_SEALED_BYTES, max_map_len=0, max_array_len=0), gate)
    except (ValueError, TypeError):
        return None


def _to_json(record: Presence) -> dict[str, object]:
    return dataclasses.asdict(record) | {"signature": record.signature.hex()}


def _from_json(entry: object) -> Presence | None:
    """A record as the wire would accept it, or None."""
    if not isinstance(entry, dict):
        return None
    try:
        record = Presence(
            **entry
            | {
                "addresses": tuple(entry["addresses"]),
                "state": PeerState(entry["state"]),
                "signature": bytes.fromhex(entry["signature"]),
            }
        )
        return wire.decode_presence(wire.encode_presence(record))
    except (KeyError, TypeError, ValueError, AttributeError, RemoteError):
        return None
