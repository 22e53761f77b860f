"""hivemind's DHT protocol with limits on what other peers' requests and responses may cost or cause.

hivemind 1.1.12 trusts both sides. A request may name as many keys as fit in 4 MiB; a response that names the requester
ends its search with an AssertionError; an empty response that never expires is believed forever; and every node chooses
its own id. ``Protocol`` keeps the messages of ``DHTProtocol`` and rewrites every handler:

- A node's id is the SHA-1 of its libp2p peer id, so each peer has one place. Other ids enter no routing table.
- Requests are rate-limited by peer and overall; one above the limit is answered with "nothing found" or "nothing
  stored".
- Bytes are booked on the owner's throttles (``net.throttle``) and never wait. Above the DHT's share of a cap, or while
  the peer rests, fewer requests are answered.
- Records are stored one by one, each checked. Whole dictionaries are rejected; nothing is cached or handed over to new
  nodes, since presence is announced every 20 s and access lists within a minute.
- Only records that the validator accepts are taken from a response, each until its own expiration time.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

import msgpack
from google.protobuf.message import Message
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.timed_storage import ValueWithExpiration

from p2ptrain.base.clock import wall
from p2ptrain.base.errors import RemoteError
from p2ptrain.net.rate_limiter import RateLimit, RateLimiter
from p2ptrain.net.throttle import Throttles

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound=Message)

DHT_PROTOCOL = "/p2ptrain/dht/1"
"""Prefix of the three handlers' protocol names, so that unmodified hivemind nodes are not served."""

MAX_KEYS = 32
"""Most keys in one request; ours have at most 4, the square root of a leaving peer's 17 buckets. Guess: the keys per
request in a large swarm would settle it."""
MAX_ENTRIES = 2048
"""Most records under one key in a response; a node stores records of as many peers (``directory.MAX_STORED_PEERS``)."""
MAX_NEAREST = 20
"""Most nodes that a response names for one key, as in hivemind (``DHTNode.create``, bucket_size)."""
MAX_SPARES = 20
"""Most replacement nodes of a full routing-table bucket, as many as it holds; hivemind has no bound."""
MAX_ANSWER_BYTES = 4_000_000
"""Most bytes of records in a response; p2pd accepts 4 MiB, and the longest records of a full key have 3.6 MB."""
PEER_ID_BYTES = range(34, 43)
"""Sizes of libp2p multihashes: 34 bytes (RSA) to 42 (the longest identity hash); Ed25519 has 38. The bound is needed
because base58 costs the square of the length."""
MAX_UNFIT = 32
"""Invalid records after which the rest of a response is skipped; each costs a signature check, .15 ms. Guess: how often
honest clocks and access lists differ would settle it."""
RENEWAL_S = 60.0
"""Least extension for which an unchanged record is stored again, since the sender chooses its expiration time. Guess:
the writes per access list would settle it; a list lasts an hour."""
AT_ONCE = 32
"""Records checked before other tasks of the event loop run, about 5 ms. Guess: a peer's event-loop latency would settle
it."""

EACH = RateLimit(burst=200.0, per_s=10.0)
"""Rate limit of one peer in keys; 128 requested records cost one key more. A peer looks up and announces itself every
20 s, and asks a node at most three times per key. Guess: requests per node in a large swarm would settle it."""
OVERALL = RateLimit(burst=2000.0, per_s=400.0)
"""Rate limit of all peers in keys: a sixth of a core (measured: .2 ms to find 128 records, .4 ms to store one). In a
swarm of 95, where all ask the same nodes for one key, a node receives 20 per second. Guess: a larger swarm would settle
it."""
RECORDS_A_TOKEN = 128  # requested records that cost as much as one key
RESTING_COST = 20.0
"""Factor on a request's cost while this peer rests: ten requests per peer at once, one every two seconds, and twenty
per second overall, as honest peers need. Silence would hide the records stored here. Guess: lookups while half of a
swarm rests would settle it."""


def id_of(peer: bytes) -> DHTID:
    """Return the only id that a peer's node may have, from the multihash of its peer id."""
    return DHTID.generate(source=peer)


class Protocol(DHTProtocol):
    """hivemind's DHT protocol with limits; see the module. ``create`` constructs one and starts to serve."""

    _rpc_handlers = None  # hivemind caches handlers on the class, so this subclass needs its own
    _stub_type = None

    def __init__(self, *, _initialized_with_create: bool = False) -> None:
        super().__init__(_initialized_with_create=_initialized_with_create)
        self._limiter: RateLimiter[PeerID] = RateLimiter(EACH, OVERALL)
        self._pings: set[asyncio.Task[Any]] = set()
        self.rates = Throttles()

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        return f"{DHT_PROTOCOL}/{method_name.removeprefix('rpc_')}"

    # --- inbound requests -------------------------------------------------------------------------------------------

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        """Answer a ping and enter its sender into the routing table; ``request.validate`` (dial back) is ignored."""
        if self._admits(context.remote_id, 1):
            await self._meet(request.peer, context.remote_id)
        return self._sent(request, dht_pb2.PingResponse(peer=self.node_info, dht_time=wall(), available=False))

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """Store those records that the validator accepts. Raises RemoteError for a malformed request."""
        columns = request.keys, request.subkeys, request.values, request.expiration_time, request.in_cache
        _check_size(len(request.keys))
        if len(set(map(len, columns))) > 1:
            raise RemoteError("expected complete records to store, got columns of different lengths")
        admitted = self._admits(context.remote_id, len(request.keys))
        if admitted:
            await self._meet(request.peer, context.remote_id)
        stored = [admitted and self._keep(*record) for record in zip(*columns, strict=True)]
        return self._sent(request, dht_pb2.StoreResponse(store_ok=stored, peer=self.node_info))

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        """Return these keys' records and nearest known nodes. Raises RemoteError for a malformed request."""
        _check_size(len(request.keys))
        if any(len(key) != DHTID.HASH_NBYTES for key in request.keys):
            raise RemoteError(f"expected keys of {DHTID.HASH_NBYTES} bytes, got other lengths")
        held = {key: self._held(key) for key in map(DHTID.from_bytes, request.keys)}
        records = sum(len(found.value) for found in held.values() if found is not None)
        if not self._admits(context.remote_id, len(request.keys) + records / RECORDS_A_TOKEN):
            nothing = [dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)] * len(request.keys)
            return self._sent(request, dht_pb2.FindResponse(results=nothing, peer=self.node_info))
        await self._meet(request.peer, context.remote_id)
        asker = id_of(context.remote_id.to_bytes())
        response = dht_pb2.FindResponse(peer=self.node_info)
        room = MAX_ANSWER_BYTES
        for key in map(DHTID.from_bytes, request.keys):
            result = self._neighbours(key, asker)
            if (found := held.pop(key, None)) is not None:  # a repeated key gets its records once
                value = self.serializer.dumps(found.value)
                if (room := room - len(value)) >= 0:
                    result.type, result.value = dht_pb2.FOUND_DICTIONARY, value
                    result.expiration_time = found.expiration_time
            response.results.append(result)
        return self._sent(request, response)

    def _admits(self, peer: PeerID, tokens: float) -> bool:
        if self.rates.up.is_flooded or self.rates.down.is_flooded:
            return False
        tokens = min(max(1.0, tokens) * (RESTING_COST if self.rates.rests else 1.0), EACH.burst)
        return self._limiter.admits(peer, asyncio.get_running_loop().time(), tokens)

    def _sent(self, request: Message, response: Answer) -> Answer:
        self.rates.down.book_unwaited(request.ByteSize())
        self.rates.up.book_unwaited(response.ByteSize())
        return response

    def _keep(self, key: bytes, subkey: bytes, value: bytes, expiration: float, in_cache: bool) -> bool:
        """Store one record; return False if it is invalid or the stored one lasts (nearly) as long."""
        if in_cache or len(key) != DHTID.HASH_NBYTES or subkey in self.RESERVED_SUBKEYS:
            return False
        if not math.isfinite(expiration):  # hivemind would keep it forever
            return False
        if not self._validate_record(key, subkey, value, expiration):
            return False
        place, name = DHTID.from_bytes(key), self.serializer.loads(subkey)
        held = self._held(place)
        before = held.value.get(name) if held is not None else None
        if before is not None:  # hivemind would add a heap entry for every renewal
            renewed = before.expiration_time + (RENEWAL_S if before.value == value else 0.0)
            if renewed >= expiration:
                return False
        return bool(self.storage.store_subkey(place, name, value, expiration))

    def _held(self, key: DHTID) -> ValueWithExpiration[Any] | None:
        """Return the dictionary under a key; None if it has no live record."""
        found = self.storage.get(key)
        return found if found is not None and isinstance(found.value, DictionaryDHTValue) and len(found.value) else None

    def _neighbours(self, key: DHTID, asker: DHTID) -> dht_pb2.FindResult:
        nearest = self.routing_table.get_nearest_neighbors(key, k=MAX_NEAREST, exclude=asker)
        return dht_pb2.FindResult(
            type=dht_pb2.NOT_FOUND,
            nearest_node_ids=[each.to_bytes() for each, _ in nearest],
            nearest_peer_ids=[peer.to_bytes() for _, peer in nearest],
        )

    # --- outbound requests ------------------------------------------------------------------------------------------

    def get_stub(self, peer: PeerID) -> _BookedStub:
        return _BookedStub(super().get_stub(peer), self.rates)

    async def call_ping(self, peer: PeerID, validate: bool = False, strict: bool = True) -> DHTID | None:
        """Ping a peer, enter it into the routing table and return its node id; None without an answer or a valid id."""
        try:
            async with self.rpc_semaphore:
                request = dht_pb2.PingRequest(peer=self.node_info)
                response = await self.get_stub(peer).rpc_ping(request, timeout=self.wait_timeout)
        except Exception:  # any failure of the network, p2pd or the peer counts as no answer
            logger.debug("no answer from %s to a ping", peer, exc_info=True)
            await self.update_routing_table(None, peer, responded=False)
            return None
        return await self._meet(response.peer, peer)

    async def call_find(
        self, peer: PeerID, keys: Collection[DHTID]
    ) -> dict[DHTID, tuple[ValueWithExpiration[Any] | None, dict[DHTID, PeerID]]] | None:
        """Ask a peer for the records under each key and its nearest nodes; None without a valid answer."""
        request = dht_pb2.FindRequest(keys=[key.to_bytes() for key in keys], peer=self.node_info)
        try:
            async with self.rpc_semaphore:
                response = await self.get_stub(peer).rpc_find(request, timeout=self.wait_timeout)
            if len(response.results) != len(keys):
                raise RemoteError(f"expected {len(keys)} results, got {len(response.results)}")
            found = {
                key: (await self._checked(key, result), self._nearest(result))
                for key, result in zip(keys, response.results, strict=True)
            }
        except Exception:  # as for a ping, or bytes that msgpack cannot read
            logger.debug("no valid answer from %s to a lookup", peer, exc_info=True)
            await self.update_routing_table(None, peer, responded=False)
            return None
        await self._meet(response.peer, peer)
        return found

    async def _checked(self, key: DHTID, result: dht_pb2.FindResult) -> ValueWithExpiration[Any] | None:
        """Return a response's valid records with the latest expiration time; None if there are none."""
        if result.type != dht_pb2.FOUND_DICTIONARY:  # only dictionaries are stored
            return None
        kept, unfit = DictionaryDHTValue(), 0
        for number, (subkey, value, expiration) in enumerate(_entries(result.value), 1):
            if self._validate_record(key.to_bytes(), self.serializer.dumps(subkey), value, expiration):
                kept.store(subkey, value, expiration)
            elif (unfit := unfit + 1) > MAX_UNFIT:
                break
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        last = max((expiration for _, (_, expiration) in kept.items()), default=None)
        return None if last is None else ValueWithExpiration(kept, last)

    def _nearest(self, result: dht_pb2.FindResult) -> dict[DHTID, PeerID]:
        """Return the nodes that a response names, except this one and those whose id does not match their peer id."""
        nearest = {}
        for raw_id, raw_peer in zip(result.nearest_node_ids[:MAX_NEAREST], result.nearest_peer_ids, strict=False):
            if len(raw_peer) in PEER_ID_BYTES:
                bound = id_of(raw_peer)
                if bound.to_bytes() == raw_id and bound != self.node_id:
                    nearest[bound] = PeerID(raw_peer)
        return nearest

    # --- routing table ----------------------------------------------------------------------------------------------

    async def _meet(self, info: dht_pb2.NodeInfo, peer: PeerID) -> DHTID | None:
        """Enter a node into the routing table and return its id; None if the id does not match its peer id."""
        bound = id_of(peer.to_bytes())
        if info.node_id != bound.to_bytes():
            return None
        await self.update_routing_table(bound, peer)
        return bound

    async def update_routing_table(self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        """Record that a node responded or failed to. Unlike hivemind's, this hands no records over to new nodes."""
        bound, table = id_of(peer_id.to_bytes()), self.routing_table
        if not responded:
            if bound in table:
                del table[bound]
        elif node_id == bound != self.node_id:
            to_ping = table.add_or_update_node(bound, peer_id)
            bucket = table.buckets[table.get_bucket_index(bound)]
            for spare in list(bucket.replacement_nodes)[:-MAX_SPARES]:  # the oldest
                del table[spare]
            if to_ping is not None:  # the bucket is full: check its least recently seen node
                task = asyncio.create_task(self.call_ping(to_ping[1]))
                self._pings.add(task)
                task.add_done_callback(self._pings.discard)


class _BookedStub:
    def __init__(self, stub: Any, rates: Throttles) -> None:
        self._stub = stub
        self._rates = rates

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._stub, name)

        async def ask(request: Message, timeout: float | None = None) -> Message:
            self._rates.up.book_unwaited(request.ByteSize())
            response: Message = await method(request, timeout=timeout)
            self._rates.down.book_unwaited(response.ByteSize())
            return response

        return ask


def _check_size(keys: int) -> None:
    if keys > MAX_KEYS:
        raise RemoteError(f"expected at most {MAX_KEYS} keys, got {keys}")


def _entries(packed: bytes) -> list[tuple[str | int, bytes, float]]:
    """Decode the records that hivemind's ``DictionaryDHTValue.packb`` packed. Raises RemoteError and msgpack's errors.

    hivemind itself would unpack nested values at any depth, with a copy of the remaining bytes per level.
    """
    outer = msgpack.unpackb(packed, max_array_len=0, max_map_len=0)
    if type(outer) is msgpack.ExtType and outer.code == _DICTIONARY:
        match msgpack.unpackb(outer.data, max_array_len=MAX_ENTRIES, max_map_len=0, max_ext_len=0):
            case [_, _, [*entries]] if all(map(_is_entry, entries)):
                return entries
    raise RemoteError("expected a dictionary of records, got something else")


_DICTIONARY = 0x50  # extension code of a dictionary (hivemind's ``MSGPackSerializer.ext_serializable``)


def _is_entry(entry: Any) -> bool:
    match entry:
        case [str() | int(), bytes(), float()]:
            return True
    return False
