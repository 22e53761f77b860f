"""Peer directory: ``ports.Directory`` over the DHT, and the peer cache that survives a restart.

Each presence bucket (``swarm.presence_buckets``) has one DHT key, with one subkey per peer id that holds the encoded,
signed presence until it expires. Every node runs ``PresenceValidator``, so the DHT can neither be filled with other
data nor forged; since a node may be modified, lookups verify records again. In a closed run (``p2ptrain.admission``) a
peer's certificate is stored with its presence, and only admitted peers are stored or found.

The farewell record, the last one of a peer that trained to the run's end, is also kept under a key of its own, for
those who come when the others have left. It expires much later there, and nobody counts its peer as live. A record with
less progress would take the place of one that tells them about the end, so nodes reject it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from random import Random

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer

from p2ptrain import framing, statements, wire
from p2ptrain.admission import Gate
from p2ptrain.base import files
from p2ptrain.base.clock import CLOCK_SKEW_S, wall
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.net import access_list_store
from p2ptrain.net.concurrently import concurrently
from p2ptrain.net.dht import network_errors
from p2ptrain.net.dht_protocol import MAX_ENTRIES
from p2ptrain.net.identity import verify
from p2ptrain.swarm import PRESENCE_LIFETIME_S, PeerState, Presence
from p2ptrain.swarm.presence_buckets import MAX_LEVEL, PresenceBucket, PresenceBuckets, home

logger = logging.getLogger(__name__)

DEADLINE_S = 15.0
"""Timeout of one announcement or lookup; 34 ms per key were measured with 24 nodes, and each dead node on the way costs
3 s. Guess: lookup times in a large swarm with churn would settle it."""
MAX_RECORDS = 128
"""Most presences that one lookup returns, a random sample if it found more; a peer cannot exchange with as many in
their lifetime. Guess: the variety of partners in a large swarm would settle it."""
MAX_STORED_PEERS = MAX_ENTRIES
"""Most peers whose live records a node accepts; beyond it the response for a crowded key would near the 4 MiB limit of
unary calls. In a settled swarm a node sees some hundreds."""
MAX_SEALED_BYTES = wire.MAX_PRESENCE_BYTES + framing.MAX_CERTIFICATE_BYTES + 8
"""Longest presence record with its certificate and msgpack's overhead."""
OWN_CHECKS = 3
"""Announcements of a process, after its first, before which it looks for its own record: another process with its
identity has announced itself since. Later lookups may keep missing it, because each follows our own announcement."""
MAX_CACHED = 64
FINISHED_LIFETIME_S = 30 * 86_400.0
"""How long a node keeps a finished peer's record, if it runs that long: a month, at no cost beyond ``MAX_FINISHED``."""
MAX_FINISHED = 32
"""Finished peers whose records a node keeps, as many as one request may name (``dht_protocol.MAX_KEYS``). A latecomer
needs one; strangers can fill all places, but only with records that state the run's end, too."""


def presence_key(run: RunId, bucket: PresenceBucket) -> str:
    return f"p2ptrain.{run}.presence.{bucket.level}.{bucket.number}"


def finished_key(run: RunId) -> str:
    return f"p2ptrain.{run}.finished"


@lru_cache(maxsize=64)
def _finished_key_bytes(run: RunId) -> bytes:
    """Return ``finished_key`` in the binary form that validators receive."""
    encoded: bytes = DHTID.generate(source=finished_key(run)).to_bytes()
    return encoded


class PresenceValidator(RecordValidatorBase):
    """Validator of DHT records: accepts one run's signed presence records and access lists. Runs on every node."""

    def __init__(self, run: RunId, gate: Gate | None = None) -> None:
        self.gate = gate
        """None for an open run, or until the manifest is known."""
        self.end = math.inf
        """Progress at the run's end; infinite until the manifest is known."""
        self._run = run
        self._expirations: dict[PeerId, float] = {}
        self._finished: dict[PeerId, float] = {}

    def validate(self, record: DHTRecord) -> bool:
        if self.gate is not None and record.key == access_list_store.key_bytes(self._run):
            return access_list_store.may_be_stored(record, self.gate)
        presence = _unwrapped(record.value, self.gate)
        return (
            presence is not None
            and presence.run == self._run
            and record.subkey == MSGPackSerializer.dumps(presence.peer)
            and (self._may_be_kept if record.key == _finished_key_bytes(self._run) else self._is_live)(record, presence)
        )

    def _is_live(self, record: DHTRecord, presence: Presence) -> bool:
        return (
            _is_home(self._run, presence.peer, record.key)
            and self._is_timely(presence, record.expiration_time, presence.lifetime_s)
            and _has_room(self._expirations, presence.peer, record.expiration_time, MAX_STORED_PEERS)
        )

    def _may_be_kept(self, record: DHTRecord, presence: Presence) -> bool:
        """Return whether a record may stay among the finished."""
        return (
            _is_farewell(presence, self.end)
            and self._is_timely(presence, record.expiration_time, FINISHED_LIFETIME_S)
            and _has_room(self._finished, presence.peer, record.expiration_time, MAX_FINISHED)
        )

    def _is_timely(self, presence: Presence, expiration: float, stored_s: float) -> bool:
        return (
            expiration <= presence.issued_at + stored_s + 1.0
            and presence.issued_at <= wall() + CLOCK_SKEW_S
            and presence.lifetime_s <= PRESENCE_LIFETIME_S
        )


class DhtDirectory:
    """Peer directory over the DHT; see the module. Keep it as long as its node, because it learns the swarm's size.

    A presence's lifetime must not shrink between announcements: the DHT keeps the record that expires later.
    """

    def __init__(self, dht: DHTNode, run: RunId, random: Random | None = None) -> None:
        self.gate: Gate | None = None
        """None for an open run, or until the manifest is known."""
        self.end = math.inf
        """Progress at the run's end; infinite until the manifest is known."""
        self._dht = dht
        self._run = run
        self.me: PeerId | None = None
        self.on_own: Callable[[Presence], None] = lambda presence: None
        """Called with each live record of ``me`` that a lookup finds: another process may have announced it."""
        self._random = random or Random()
        self._buckets = PresenceBuckets(self._random)
        self.sees_all = True
        """Whether the last lookup covered all peers, not a sample."""
        self._announcements = 0
        self._stored_until: dict[PresenceBucket, float] = {}  # expiration time of our record in each bucket

    @property
    def size(self) -> int:
        """Estimated number of peers in the swarm; 0 before the first lookup."""
        return self._buckets.size or 0

    async def announce(self, presence: Presence) -> None:
        """Store our record. The first call begins with a lookup, because the swarm's size determines the buckets."""
        if self._buckets.size is None:
            with contextlib.suppress(NetworkError):  # without a size, the root bucket is used, as in a small swarm
                await self.lookup()
        if self.me is not None and 0 < self._announcements <= OWN_CHECKS:
            with contextlib.suppress(NetworkError, TimeoutError):
                async with asyncio.timeout(DEADLINE_S):
                    await self._look_for_own(self.me)
        self._announcements += 1
        until = presence.issued_at + presence.lifetime_s
        homes = self._homes(presence)
        async with network_errors("storing our presence record", DEADLINE_S):
            stored = await self._dht.store_many(
                [presence_key(self._run, bucket) for bucket in homes],
                [self._sealed(presence)] * len(homes),
                until,
                subkeys=[presence.peer] * len(homes),
            )
        if not any(stored.values()):
            raise NetworkError("no node stored our presence record; if this persists, check this machine's clock")
        self._stored_until |= dict.fromkeys(homes, until)

    async def lookup(self) -> list[Presence]:
        """Return live peers' records, and look for our own in any case. Raises NetworkError."""
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
                if not search.saw_all and self.me is not None and self.me not in found:
                    await self._look_for_own(self.me)
        except (TimeoutError, NetworkError) as error:
            if not found:
                raise NetworkError(str(error) or f"the lookup took more than {DEADLINE_S:.0f} s") from error
        self.sees_all = search.saw_all
        # A random sample and not the latest: records dated ahead would displace all others.
        return self._random.sample(list(found.values()), min(len(found), MAX_RECORDS))

    async def _look_for_own(self, me: PeerId) -> None:
        """Look up buckets that we might announce ourselves in now."""
        await concurrently(*(self._records(bucket) for bucket in self._buckets.homes(self._run, me)))

    async def keep_finished(self, presence: Presence) -> None:
        await self.keep_sealed({presence.peer: (self._sealed(presence), presence.issued_at + FINISHED_LIFETIME_S)})

    async def finished(self) -> list[Presence]:
        found = await self.sealed_finished()
        return [presence for sealed, _ in found.values() if (presence := _decoded(sealed, self.gate)) is not None]

    async def sealed_finished(self) -> dict[PeerId, tuple[bytes, float]]:
        """Return the records of finished peers as they are stored, each with its expiration time.

        Raises NetworkError.
        """
        async with network_errors("the lookup of finished peers", DEADLINE_S):
            found = await self._dht.get(finished_key(self._run), latest=True)
        entries = found.value if found is not None and isinstance(found.value, dict) else {}
        records = {
            presence.peer: (entry.value, entry.expiration_time)
            for entry in entries.values()
            if (presence := _decoded(entry.value, self.gate)) is not None
            and presence.run == self._run
            and _is_farewell(presence, self.end)
        }
        return dict(list(records.items())[:MAX_FINISHED])

    async def keep_sealed(self, records: Mapping[PeerId, tuple[bytes, float]]) -> None:
        """Store records that ``sealed_finished`` returned, also of others. Raises NetworkError."""
        async with network_errors("storing the records of finished peers", DEADLINE_S):
            await self._dht.store_many(
                [finished_key(self._run)] * len(records),
                [sealed for sealed, _ in records.values()],
                [until for _, until in records.values()],
                subkeys=list(records),
            )

    def _sealed(self, presence: Presence) -> bytes:
        """Encode the stored value: the presence record and, in a closed run, our certificate."""
        encoded = wire.encode_presence(presence)
        return encoded if self.gate is None else statements.packed([encoded, self.gate.certificate])

    def _homes(self, presence: Presence) -> list[PresenceBucket]:
        """Return the buckets for a record; a leaving peer's also replaces its earlier records that are still live."""
        now = wall()
        self._stored_until = {bucket: until for bucket, until in self._stored_until.items() if until > now}
        homes = self._buckets.homes(self._run, presence.peer)
        return list({*homes, *self._stored_until}) if presence.state is PeerState.LEAVING else homes

    async def _records(self, bucket: PresenceBucket) -> list[Presence]:
        async with network_errors("the lookup"):
            found = await self._dht.get(presence_key(self._run, bucket), latest=True)
        entries = found.value if found is not None and isinstance(found.value, dict) else {}
        now = wall()
        records = {
            presence.peer: presence
            for entry in entries.values()
            if (presence := _decoded(entry.value, self.gate)) is not None
            and presence.run == self._run
            and presence.issued_at + presence.lifetime_s > now
            and home(self._run, presence.peer, bucket.level) == bucket
        }
        if self.me is not None and (own := records.get(self.me)) is not None:
            self.on_own(own)
        return list(records.values())


def _is_farewell(presence: Presence, end: float) -> bool:
    return presence.state is PeerState.LEAVING and presence.progress >= end


def _has_room(expirations: dict[PeerId, float], peer: PeerId, expiration: float, most: int) -> bool:
    """Return whether a peer is among at most ``most`` unexpired ones, and enter it."""
    if peer not in expirations and len(expirations) >= most:
        now = wall()
        for known in [known for known, until in expirations.items() if until <= now]:
            del expirations[known]
        if len(expirations) >= most:
            return False
    expirations[peer] = max(expiration, expirations.get(peer, 0.0))
    return True


class PeerCache:
    """Cache of the last known peers on disk, to rejoin a swarm when every bootstrap is gone."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self, run: RunId) -> list[Presence]:
        """Return the run's well-formed, signed records, expired ones too; a damaged file counts as empty."""
        try:
            entries = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            logger.warning("the peer cache %s cannot be read, so it starts empty: %s", self._path, error)
            return []
        records = [_from_hex(entry) for entry in entries[:MAX_CACHED]] if isinstance(entries, list) else []
        return [record for record in records if record is not None and record.run == run]

    def save(self, records: Iterable[Presence]) -> None:
        """Replace the cache by the latest of these records, one per peer. Raises OSError."""
        latest = {record.peer: record for record in sorted(records, key=lambda record: record.issued_at)}
        kept = sorted(latest.values(), key=lambda record: record.issued_at, reverse=True)[:MAX_CACHED]
        text = json.dumps([wire.encode_presence(record).hex() for record in kept], indent=1)
        files.replace(self._path, text.encode(), lasting=False)  # no fsync: this runs on the event loop


@lru_cache(maxsize=4 * MAX_STORED_PEERS)
def _is_home(run: RunId, peer: PeerId, key: bytes) -> bool:
    """Return whether a key belongs to one of the peer's buckets. Cached, since the same arguments recur."""
    keys = (presence_key(run, home(run, peer, level)) for level in range(MAX_LEVEL + 1))
    return any(DHTID.generate(source=each).to_bytes() == key for each in keys)


@lru_cache(maxsize=2 * MAX_STORED_PEERS)
def _genuine(encoded: bytes) -> Presence | None:
    """Decode a presence; None if it is malformed or not validly signed. Cached, since each record recurs."""
    try:
        presence = wire.decode_presence(encoded)
    except (RemoteError, RecursionError):  # lists nested too deep to decode
        return None
    return presence if verify(presence) else None


def _decoded(value: object, gate: Gate | None) -> Presence | None:
    """Decode a stored value; None unless it holds a valid presence of an admitted peer."""
    if type(value) is not bytes:
        return None
    if gate is None:
        return _genuine(value)
    try:
        match statements.unpacked(value, MAX_SEALED_BYTES):
            case [bytes(encoded), bytes(certificate)]:
                presence = _genuine(encoded)
                if presence is not None and gate.refusal(presence.peer, certificate, wall()) is None:
                    return presence
    except RemoteError:
        pass
    return None


def _unwrapped(value: bytes, gate: Gate | None) -> Presence | None:
    try:
        return _decoded(msgpack.unpackb(value, max_bin_len=MAX_SEALED_BYTES, max_map_len=0, max_array_len=0), gate)
    except (ValueError, TypeError):
        return None


def _from_hex(entry: object) -> Presence | None:
    try:
        return _genuine(bytes.fromhex(entry)) if isinstance(entry, str) else None
    except ValueError:
        return None
