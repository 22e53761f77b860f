"""hivemind's DHT with limits: what a stranger's request costs us, what its answer may do, and who it may say it is.

hivemind 1.1.12 trusts whoever asks and whoever answers. A request may name as many keys as fit 4 MiB; an answer that
names the asker ends the asker's search with an AssertionError, one that holds nothing and says that it is good for ever
is believed for ever, and node ids are anybody's choice. ``Protocol`` is its ``DHTProtocol`` with the same messages and
every door rewritten:

- A node's id is the SHA-1 of its libp2p peer id, so that a peer has one place and keeps it when it starts anew. Ids
  that are not so made enter no routing table, and are skipped in answers.
- Requests have a rate by peer and in all (``rate_limiter``). Who asks too often hears that nothing is here, or that
  nothing was stored, and is served again a little later.
- Its bytes are booked on the owner's lines (``net.throttle``) and never wait. Beyond its share of a cap, or while the
  peer rests, fewer questions are answered.
- Records are stored one by one, each checked. Whole dictionaries are not taken in. Nobody sends any: nothing is cached,
  and nothing is handed over to nodes that come, since presence is announced anew every 20 s, and rulings within a
  minute.
- Of an answer counts what the validator lets pass, each record for as long as it says itself.
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
from hivemind.utils.timed_storage import ValueWithExpiration, get_dht_time

from p2ptrain.base.errors import RemoteError
from p2ptrain.net.rate_limiter import RateLimit, RateLimiter
from p2ptrain.net.throttle import Throttles

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound=Message)

DHT_PROTOCOL = "/p2ptrain/dht/1"
"""What its three questions' names begin with: a node of hivemind's own is not answered."""

MAX_KEYS = 32
"""In one request. Ours name 4 at most: the square root of a leaving peer's 17 buckets. A guess."""
MAX_ENTRIES = 2048
"""Records under one key, in an answer: of as many peers a node stores records (``directory.MAX_STORED_PEERS``)."""
MAX_NEAREST = 20
"""Nodes that an answer names for one key: hivemind's own number (``DHTNode.create``, bucket_size)."""
MAX_SPARES = 20
"""Nodes in reserve for a full bucket of the routing table, of which hivemind forgets none. As many as it holds."""
MAX_ANSWER_BYTES = 4_000_000
"""Of records under all keys of a request together; p2pd takes 4 MiB, and a full key's longest records have 3.6 MB."""
PEER_ID_BYTES = range(34, 43)
"""Multihashes of keys that libp2p knows have 34 (RSA) to 42 bytes (the longest whose key is written out); ours have 38.
Without a bound each would cost the square of its length, to be written in base58."""
MOST_UNFIT = 32
"""Records of an answer that may fail their check before the rest is left unread; each failure costs a signature's
check, .15 ms. Some do honestly: clocks and rulings differ. A guess."""
RENEWAL_S = 60.0
"""The same record is stored anew where it is to last so much longer than it did: its end is the word of whoever stores
it. A guess; rulings last an hour, and a presence record is a new one each time."""
AT_ONCE = 32
"""Records checked before the loop has its turn: 5 ms. A guess."""

EACH = RateLimit(burst=200.0, per_s=10.0)
"""Of one peer, in keys; 128 records asked for count as one key more. A peer looks up and announces itself every 20 s,
and asks a node three times a key at most. A guess with room."""
OVERALL = RateLimit(burst=2000.0, per_s=400.0)
"""Of all peers together: a sixth of a core (measured: .2 ms to find 128 records, .4 ms to store one). In a swarm of 95,
which all ask the same nodes for one key, a node sees 20 a second. A guess.
"""
RECORDS_A_TOKEN = 128
RESTING_COST = 20.0
"""What a token costs while this peer rests: ten questions of a peer at once and one every two seconds, which is
what honest ones need, and twenty a second in all. To be silent would hide the records that lie here, and many peers may
rest at the same hours. A guess."""


def id_of(peer: bytes) -> DHTID:
    """The one id that a peer's node may have; ``peer`` is its peer id's multihash."""
    return DHTID.generate(source=peer)


class Protocol(DHTProtocol):
    """See the module. Construct with ``create``, which serves at once."""

    _rpc_handlers = None  # hivemind keeps them on the class: ours has its own
    _stub_type = None

    def __init__(self, *, _initialized_with_create: bool = False) -> None:
        super().__init__(_initialized_with_create=_initialized_with_create)
        self._limiter: RateLimiter[PeerID] = RateLimiter(EACH, OVERALL)
        self._pings: set[asyncio.Task[Any]] = set()
        self.rates = Throttles()

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        return f"{DHT_PROTOCOL}/{method_name.removeprefix('rpc_')}"

    # --- what others ask --------------------------------------------------------------------------------------------

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        """Somebody is here and would be known. ``request.validate``, which asks us to call back, is not done."""
        if self._admits(context.remote_id, 1):
            await self._meet(request.peer, context.remote_id)
        return self._sent(request, dht_pb2.PingResponse(peer=self.node_info, dht_time=get_dht_time(), available=False))

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """Keep these records, those that the validator lets pass. RemoteError for a request that is none of ours."""
        columns = request.keys, request.subkeys, request.values, request.expiration_time, request.in_cache
        _check_size(len(request.keys))
        if len(set(map(len, columns))) > 1:
            raise RemoteError("a record to store was due with all its parts")
        admitted = self._admits(context.remote_id, len(request.keys))
        if admitted:
            await self._meet(request.peer, context.remote_id)
        stored = [admitted and self._keep(*record) for record in zip(*columns, strict=True)]
        return self._sent(request, dht_pb2.StoreResponse(store_ok=stored, peer=self.node_info))

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        """What lies under these keys here, and who is nearer. RemoteError for a request that is none of ours."""
        _check_size(len(request.keys))
        if any(len(key) != DHTID.HASH_NBYTES for key in request.keys):
            raise RemoteError(f"keys of {DHTID.HASH_NBYTES} bytes were due")
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
            if (found := held.pop(key, None)) is not None:  # a key that is named twice is answered once
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
        """Book a question of theirs, and our answer. Returns the answer."""
        asked, told = request.ByteSize(), response.ByteSize()
        self.rates.down.book_unwaited(asked)
        self.rates.up.book_unwaited(told)
        return response

    def _keep(self, key: bytes, subkey: bytes, value: bytes, expiration: float, in_cache: bool) -> bool:
        """Store one record; False where it must not be, or where we have one that lasts as long, or nearly."""
        if in_cache or len(key) != DHTID.HASH_NBYTES or subkey in self.RESERVED_SUBKEYS:
            return False
        if not math.isfinite(expiration):  # hivemind would keep it for ever
            return False
        if not self._validate_record(key, subkey, value, expiration):
            return False
        place, name = DHTID.from_bytes(key), self.serializer.loads(subkey)
        held = self._held(place)
        before = held.value.get(name) if held is not None else None
        if before is not None:  # hivemind would note its end once more, each time
            renewed = before.expiration_time + (RENEWAL_S if before.value == value else 0.0)
            if renewed >= expiration:
                return False
        return bool(self.storage.store_subkey(place, name, value, expiration))

    def _held(self, key: DHTID) -> ValueWithExpiration[Any] | None:
        """The dictionary under a key, if it has a record that lasts."""
        found = self.storage.get(key)
        return found if found is not None and isinstance(found.value, DictionaryDHTValue) and len(found.value) else None

    def _neighbours(self, key: DHTID, asker: DHTID) -> dht_pb2.FindResult:
        nearest = self.routing_table.get_nearest_neighbors(key, k=MAX_NEAREST, exclude=asker)
        return dht_pb2.FindResult(
            type=dht_pb2.NOT_FOUND,
            nearest_node_ids=[each.to_bytes() for each, _ in nearest],
            nearest_peer_ids=[peer.to_bytes() for _, peer in nearest],
        )

    # --- what we ask ------------------------------------------------------------------------------------------------

    def get_stub(self, peer: PeerID) -> _BookedStub:
        return _BookedStub(super().get_stub(peer), self.rates)

    async def call_ping(self, peer: PeerID, validate: bool = False, strict: bool = True) -> DHTID | None:
        """The peer's node id; None where it does not answer, or with another. Enters it into the routing table."""
        try:
            async with self.rpc_semaphore:
                request = dht_pb2.PingRequest(peer=self.node_info)
                response = await self.get_stub(peer).rpc_ping(request, timeout=self.wait_timeout)
        except Exception:  # whatever the network, p2pd or the peer did
            logger.debug("no answer to a ping of %s", peer, exc_info=True)
            await self.update_routing_table(None, peer, responded=False)
            return None
        return await self._meet(response.peer, peer)

    async def call_find(
        self, peer: PeerID, keys: Collection[DHTID]
    ) -> dict[DHTID, tuple[ValueWithExpiration[Any] | None, dict[DHTID, PeerID]]] | None:
        """For each key what the peer has under it, and who it says is nearer; None where it gives no such answer."""
        request = dht_pb2.FindRequest(keys=[key.to_bytes() for key in keys], peer=self.node_info)
        try:
            async with self.rpc_semaphore:
                response = await self.get_stub(peer).rpc_find(request, timeout=self.wait_timeout)
            if len(response.results) != len(keys):
                raise RemoteError(f"{len(response.results)} answers where {len(keys)} were due")
            found = {
                key: (await self._checked(key, result), self._nearest(result))
                for key, result in zip(keys, response.results, strict=True)
            }
        except Exception:  # the same, or nothing that msgpack can read
            logger.debug("no answer of %s, or none that holds", peer, exc_info=True)
            await self.update_routing_table(None, peer, responded=False)
            return None
        await self._meet(response.peer, peer)
        return found

    async def _checked(self, key: DHTID, result: dht_pb2.FindResult) -> ValueWithExpiration[Any] | None:
        """The records that hold, until the last of them ends; None where there are none."""
        if result.type != dht_pb2.FOUND_DICTIONARY:  # nothing else is stored here
            return None
        kept, unfit = DictionaryDHTValue(), 0
        for number, (subkey, value, expiration) in enumerate(_entries(result.value), 1):
            if self._validate_record(key.to_bytes(), self.serializer.dumps(subkey), value, expiration):
                kept.store(subkey, value, expiration)
            elif (unfit := unfit + 1) > MOST_UNFIT:
                break
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        last = max((expiration for _, (_, expiration) in kept.items()), default=None)
        return None if last is None else ValueWithExpiration(kept, last)

    def _nearest(self, result: dht_pb2.FindResult) -> dict[DHTID, PeerID]:
        """Who the answer names, but us and those whose id is not their peer's."""
        nearest = {}
        for raw_id, raw_peer in zip(result.nearest_node_ids[:MAX_NEAREST], result.nearest_peer_ids, strict=False):
            if len(raw_peer) in PEER_ID_BYTES:
                bound = id_of(raw_peer)
                if bound.to_bytes() == raw_id and bound != self.node_id:
                    nearest[bound] = PeerID(raw_peer)
        return nearest

    # --- whom we know -----------------------------------------------------------------------------------------------

    async def _meet(self, info: dht_pb2.NodeInfo, peer: PeerID) -> DHTID | None:
        """Enter a node that spoke into the routing table; its id, None where it is not its peer's."""
        bound = id_of(peer.to_bytes())
        if info.node_id != bound.to_bytes():
            return None
        await self.update_routing_table(bound, peer)
        return bound

    async def update_routing_table(self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        """A node spoke, or did not answer. hivemind's would also hand records over to whoever is new."""
        bound, table = id_of(peer_id.to_bytes()), self.routing_table
        if not responded:
            if bound in table:
                del table[bound]
        elif node_id == bound != self.node_id:
            to_ping = table.add_or_update_node(bound, peer_id)
            bucket = table.buckets[table.get_bucket_index(bound)]
            for spare in list(bucket.replacement_nodes)[:-MAX_SPARES]:  # met long ago
                del table[spare]
            if to_ping is not None:  # the bucket is full: does the one of whom nothing was heard for longest live?
                task = asyncio.create_task(self.call_ping(to_ping[1]))
                self._pings.add(task)
                task.add_done_callback(self._pings.discard)


class _BookedStub:
    """hivemind's stub of a peer: what it is asked and what it answers are booked."""

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
        raise RemoteError(f"{keys} keys where {MAX_KEYS} are allowed")


def _entries(packed: bytes) -> list[tuple[str | int, bytes, float]]:
    """The records of a dictionary as hivemind's ``DictionaryDHTValue.packb`` writes it. Raises RemoteError, and what
    msgpack raises.

    hivemind would unpack what is packed in it, however deep: each level another copy of all that is left.
    """
    outer = msgpack.unpackb(packed, max_array_len=0, max_map_len=0)
    if type(outer) is msgpack.ExtType and outer.code == _DICTIONARY:
        match msgpack.unpackb(outer.data, max_array_len=MAX_ENTRIES, max_map_len=0, max_ext_len=0):
            case [_, _, [*entries]] if all(map(_is_entry, entries)):
                return entries
    raise RemoteError("a dictionary of records was due")


_DICTIONARY = 0x50
"""How hivemind marks it (``MSGPackSerializer.ext_serializable``)."""


def _is_entry(entry: Any) -> bool:
    match entry:
        case [str() | int(), bytes(), float()]:
            return True
    return False
