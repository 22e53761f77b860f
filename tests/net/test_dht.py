"""DHT nodes against strangers that request too much, answer falsely, or impersonate others.

No p2pd: the part of hivemind's P2P that its DHT uses, on one loop, with requests and answers as bytes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import MagicMock

import base58
import msgpack
import pytest
import virtual_time
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.dht.node import Blacklist, DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import TimedStorage, get_dht_time

from p2ptrain import wire
from p2ptrain.base.clock import WallClock
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import RunId, peer_of
from p2ptrain.net import dht, dht_protocol
from p2ptrain.net.dht_protocol import (
    DHT_PROTOCOL,
    EACH,
    MAX_ENTRIES,
    MAX_KEYS,
    MAX_NEAREST,
    MAX_SPARES,
    MAX_UNFIT,
    RECORDS_A_TOKEN,
    RESTING_COST,
    Protocol,
    id_of,
)
from p2ptrain.net.directory import MAX_STORED_PEERS, DhtDirectory, PresenceValidator, presence_key
from p2ptrain.net.identity import Identity
from p2ptrain.net.throttle import MIN_RATE, UNWAITED_S, UNWAITED_SHARE, Throttles
from p2ptrain.swarm.messages import PeerState, Presence
from p2ptrain.swarm.presence_buckets import PresenceBucket

RUN = RunId("ab" * 32)
ROOT = presence_key(RUN, PresenceBucket(0, 0))
ROOT_ID = DHTID.generate(source=ROOT)

Handler = Callable[[Any, P2PContext], Awaitable[Any]]


@dataclass
class Wires:
    """The connections between the nodes."""

    ends: dict[PeerID, FakeP2P] = field(default_factory=dict)
    calls: list[tuple[PeerID, str]] = field(default_factory=list)
    carried_bytes: int = 0

    async def call(self, caller: PeerID, peer: PeerID, name: str, request: bytes) -> bytes:
        if peer not in self.ends:
            raise ConnectionError("nobody is there")
        self.calls.append((peer, name.rpartition("/")[2]))
        handler, kind = self.ends[peer].handlers[name]
        body: bytes = (await handler(kind.FromString(request), P2PContext(name, peer, caller))).SerializeToString()
        self.carried_bytes += len(request) + len(body)
        return body


class FakeP2P:
    """One node's end of the connections."""

    def __init__(self, wires: Wires, peer: PeerID) -> None:
        self.peer_id = peer
        self.handlers: dict[str, tuple[Handler, Any]] = {}
        self._wires = wires
        wires.ends[peer] = self

    async def add_protobuf_handler(self, name: str, handler: Handler, kind: Any, **_: Any) -> None:
        assert name not in self.handlers
        self.handlers[name] = handler, kind

    async def remove_protobuf_handler(self, name: str, **_: Any) -> None:
        del self.handlers[name]

    async def call_protobuf_handler(self, peer: PeerID, name: str, request: Any, kind: Any) -> Any:
        return kind.FromString(await self._wires.call(self.peer_id, peer, name, request.SerializeToString()))

    def lie(self, question: str, answer: Callable[[Any], Any]) -> None:
        """Answer one kind of request with these bytes from now on."""
        name = f"{DHT_PROTOCOL}/{question}"

        async def lying(request: Any, context: P2PContext) -> Any:
            return answer(request)

        self.handlers[name] = lying, self.handlers[name][1]


def somebody(number: int) -> Identity:
    """Return the identity of this number, which is always the same."""
    key = Ed25519PrivateKey.from_private_bytes(number.to_bytes(32))
    return Identity(Path(), peer_of(key.public_key().public_bytes_raw()), key)


def peer_id(number: int) -> PeerID:
    return PeerID.from_base58(somebody(number).peer_id)


def presence_of(number: int, **more: Any) -> Presence:
    identity = somebody(number)
    record = Presence(identity.peer_id, RUN, (), PeerState.TRAINING, 1, 2.0, True, "", get_dht_time(), 60.0)
    return identity.sign(replace(record, **more))


def entry(number: int, **more: Any) -> tuple[str, bytes, float]:
    """Return subkey, value and expiration of a peer's record, as the DHT stores them."""
    presence = presence_of(number, **more)
    return presence.peer, msgpack.packb(wire.encode_presence(presence)), presence.issued_at + presence.lifetime_s


def packed(entries: Sequence[Any], last: float = 0.0) -> bytes:
    """Pack a dictionary as hivemind does."""
    return msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([math.inf, last, list(entries)])))


async def a_node(wires: Wires, number: int, rates: Throttles | None = None) -> DHTNode:
    p2p: Any = FakeP2P(wires, peer_id(number))
    return await dht.start_node(p2p, PresenceValidator(RUN), rates or Throttles())


async def some_nodes(wires: Wires, count: int) -> list[DHTNode]:
    """Return nodes that know each other."""
    nodes = [await a_node(wires, number) for number in range(count)]
    for node in nodes[1:]:
        assert await node.protocol.call_ping(nodes[0].peer_id) == nodes[0].node_id
        await node.find_nearest_nodes([node.node_id])
    return nodes


def asked_by(number: int) -> P2PContext:
    return P2PContext("", peer_id(0), peer_id(number))


def found_in(value: bytes, expiration: float = math.inf) -> Callable[[Any], dht_pb2.FindResponse]:
    """Return an answer with this dictionary under each key."""

    def answer(request: dht_pb2.FindRequest) -> dht_pb2.FindResponse:
        result = dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=value, expiration_time=expiration)
        return dht_pb2.FindResponse(results=[result for _ in request.keys])

    return answer


def neighbours(*pairs: tuple[bytes, bytes]) -> Callable[[Any], dht_pb2.FindResponse]:
    """Return an answer without values that names these nodes, ids and peers."""

    def answer(request: dht_pb2.FindRequest) -> dht_pb2.FindResponse:
        ids, peers = [each for each, _ in pairs], [peer for _, peer in pairs]
        result = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND, nearest_node_ids=ids, nearest_peer_ids=peers)
        return dht_pb2.FindResponse(results=[result for _ in request.keys])

    return answer


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(300.0):
            await scene()

    virtual_time.run(bounded())


# --- honest nodes -------------------------------------------------------------------------------------------------


def test_peers_find_each_other_and_one_that_comes_late() -> None:
    async def scene() -> None:
        wires = Wires()
        nodes = await some_nodes(wires, 12)
        directories = [DhtDirectory(node, RUN, Random(1)) for node in nodes]
        for number, directory in enumerate(directories):
            await directory.announce(presence_of(number))
        for directory in directories:
            assert {record.peer for record in await directory.lookup()} == {somebody(n).peer_id for n in range(12)}
        assert not any(node.protocol.cache.data for node in nodes)
        late = await a_node(wires, 12)
        await late.protocol.call_ping(nodes[3].peer_id)
        assert len(await DhtDirectory(late, RUN, Random(1)).lookup()) == 12
        for node in (*nodes, late):
            await node.shutdown()
        assert not any(end.handlers for end in wires.ends.values())

    play(scene)


def test_records_outlive_half_of_the_nodes() -> None:
    async def scene() -> None:
        wires = Wires()
        nodes = await some_nodes(wires, 16)
        for number, node in enumerate(nodes):
            await DhtDirectory(node, RUN, Random(1)).announce(presence_of(number))
        for node in nodes[1::2]:
            del wires.ends[node.peer_id]
        for node in nodes[::2]:
            assert len(await DhtDirectory(node, RUN, Random(1)).lookup()) >= 15

    play(scene)


def test_a_lookup_sends_nobody_what_it_found() -> None:
    async def scene() -> None:
        wires = Wires()
        nodes = await some_nodes(wires, 8)
        for number, node in enumerate(nodes):
            await DhtDirectory(node, RUN, Random(1)).announce(presence_of(number))
        wires.calls.clear()
        assert await DhtDirectory(nodes[5], RUN, Random(1)).lookup()
        assert {question for _, question in wires.calls} == {"find"}

    play(scene)


# --- false answers ------------------------------------------------------------------------------------------------


async def victim_and_liar(wires: Wires) -> tuple[DHTNode, FakeP2P]:
    """Return a node, and the adversarial one that is the only one it knows."""
    victim, liar = await some_nodes(wires, 2)
    return victim, wires.ends[liar.peer_id]


def test_an_answer_that_names_the_asker_ends_nothing() -> None:
    async def scene() -> None:
        wires = Wires()
        victim, liar = await victim_and_liar(wires)
        liar.lie("find", neighbours((victim.node_id.to_bytes(), victim.peer_id.to_bytes())))
        directory = DhtDirectory(victim, RUN, Random(1))
        await directory.announce(presence_of(0))
        await directory.lookup()

    play(scene)


def test_an_answer_that_is_good_for_ever_blinds_nobody() -> None:
    async def scene() -> None:
        wires = Wires()
        nodes = sorted(await some_nodes(wires, 12), key=lambda node: ROOT_ID.xor_distance(node.node_id))
        *honest, liar, victim = nodes  # the victim is far from the key, so that it stores no record itself
        wires.ends[liar.peer_id].lie("find", found_in(packed([], math.inf)))
        directory = DhtDirectory(victim, RUN, Random(1))
        assert await directory.lookup() == []
        for number, node in enumerate(honest, 100):
            await DhtDirectory(node, RUN, Random(1)).announce(presence_of(number))
        assert len(await directory.lookup()) == len(honest)

    play(scene)


def test_records_count_for_as_long_as_they_say_themselves() -> None:
    async def scene() -> None:
        wires = Wires()
        victim, liar = await victim_and_liar(wires)
        good, late = entry(7), entry(8, issued_at=get_dht_time() - 100.0)
        liar.lie("find", found_in(packed([good, late], math.inf), math.inf))
        [(value, _)] = (await victim.protocol.call_find(liar.peer_id, [ROOT_ID])).values()
        assert list(value.value.data) == [good[0]]
        assert value.expiration_time == value.value.latest_expiration_time == good[2]
        liar.lie("find", found_in(packed([late], math.inf), math.inf))
        assert await victim.protocol.call_find(liar.peer_id, [ROOT_ID]) == {ROOT_ID: (None, {})}

    play(scene)


def test_a_record_that_does_not_hold_costs_no_other_its_place() -> None:
    """Check invalid records among valid ones: honest nodes pass some on, since clocks and access lists differ."""

    async def scene() -> None:
        wires = Wires()
        victim, liar = await victim_and_liar(wires)
        unfit = [entry(number, issued_at=get_dht_time() + 400.0) for number in range(100, 101 + MAX_UNFIT)]
        liar.lie("find", found_in(packed([unfit[0], entry(7)])))
        [(value, _)] = (await victim.protocol.call_find(liar.peer_id, [ROOT_ID])).values()
        assert list(value.value.data) == [somebody(7).peer_id]
        liar.lie("find", found_in(packed([*unfit, entry(7)])))  # too many invalid ones: the rest is not read
        assert await victim.protocol.call_find(liar.peer_id, [ROOT_ID]) == {ROOT_ID: (None, {})}

    play(scene)


def matryoshka(levels: int) -> bytes:
    """Return nested packed values, which hivemind's decoder follows."""
    value = b"\xc0"
    for _ in range(levels):
        value = msgpack.packb(msgpack.ExtType(0x40, value))
    return value


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xc1",
        b"\x91" * 1000 + b"\xc0",
        msgpack.packb(msgpack.ExtType(0x50, b"\x91" * 1000 + b"\xc0")),
        msgpack.packb(msgpack.ExtType(0x50, b"\x93\xc0\xc0" + b"\x91" * 1000 + b"\xc0")),
        msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([math.inf, 0.0, {"a": 1}]))),
        matryoshka(900),
        packed([matryoshka(10)]),
        packed([["one", b"two"]]),
        packed([[["a list"], b"two", 3.0]]),
        packed([["one", "two", 3.0]]),
        packed([["one", b"two", 3]]),
        packed([["one", b"two", 3.0]] * (MAX_ENTRIES + 1)),
        msgpack.packb({"a": 1}),
    ],
)
def test_an_answer_that_is_none_is_a_node_that_does_not_answer(value: bytes) -> None:
    async def scene() -> None:
        wires = Wires()
        victim, liar = await victim_and_liar(wires)
        liar.lie("find", found_in(value))
        assert await victim.protocol.call_find(liar.peer_id, [ROOT_ID]) is None
        assert not victim.protocol.routing_table.uid_to_peer_id

    play(scene)


def test_another_number_of_answers_than_questions_is_none() -> None:
    async def scene() -> None:
        wires = Wires()
        victim, liar = await victim_and_liar(wires)
        for count in (0, 1, 3):
            liar.lie("find", lambda _, count=count: dht_pb2.FindResponse(results=[dht_pb2.FindResult()] * count))
            assert await victim.protocol.call_find(liar.peer_id, [ROOT_ID, DHTID(7)]) is None

    play(scene)


def test_of_the_nodes_that_an_answer_names_few_count_and_only_under_their_own_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode = base58.b58encode

    def encode_short(raw: bytes) -> bytes:
        assert len(raw) <= 200, "encoding the huge id takes over a minute"
        return encode(raw)

    async def scene() -> None:
        wires = Wires()
        victim, liar = await victim_and_liar(wires)
        good, other = peer_id(50).to_bytes(), peer_id(51).to_bytes()
        huge = b"\x01" * 1_000_000
        named = [
            (id_of(good).to_bytes(), good),
            (DHTID(7).to_bytes(), other),
            (b"\xff" * 100, other),
            (id_of(huge).to_bytes(), huge),
            (id_of(b"").to_bytes(), b""),
            (victim.node_id.to_bytes(), victim.peer_id.to_bytes()),
        ]
        liar.lie("find", neighbours(*named))
        monkeypatch.setattr(base58, "b58encode", encode_short)
        found = await victim.protocol.call_find(liar.peer_id, [ROOT_ID])
        assert found == {ROOT_ID: (None, {id_of(good): PeerID(good)})}
        many = [peer_id(number).to_bytes() for number in range(100, 200)]
        liar.lie("find", neighbours(*((id_of(each).to_bytes(), each) for each in many)))
        [(_, nearest)] = (await victim.protocol.call_find(liar.peer_id, [ROOT_ID])).values()
        assert len(nearest) == MAX_NEAREST

    play(scene)


def test_a_pong_with_another_id_is_none() -> None:
    async def scene() -> None:
        wires = Wires()
        victim, liar = await some_nodes(wires, 2)
        for raw in (b"", b"\x01" * 20, b"\x01" * 1000, victim.node_id.to_bytes()):
            info = dht_pb2.NodeInfo(node_id=raw)
            wires.ends[liar.peer_id].lie("ping", lambda _, info=info: dht_pb2.PingResponse(peer=info))
            assert await victim.protocol.call_ping(liar.peer_id) is None

    play(scene)


def test_an_answer_to_a_store_may_be_of_any_length() -> None:
    async def scene() -> None:
        wires = Wires()
        victim, liar = await victim_and_liar(wires)
        info = dht_pb2.NodeInfo(node_id=b"\x01" * 99)
        for stored in ([], [True] * 1000):
            liar.lie("store", lambda _, stored=stored: dht_pb2.StoreResponse(store_ok=stored, peer=info))
            await DhtDirectory(victim, RUN, Random(1)).announce(presence_of(0))

    play(scene)


def test_nodes_that_are_not_there_are_forgotten_some_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht, "MAX_BLAMED", 10)

    async def scene() -> None:
        victim = await a_node(Wires(), 0)
        for number in range(100, 150):
            victim.blacklist.register_failure(peer_id(number))
            assert peer_id(number) in victim.blacklist
            assert len(victim.blacklist.ban_counter) <= 10

    play(scene)


# --- requests that ask for too much -------------------------------------------------------------------------------


def a_find(keys: int) -> dht_pb2.FindRequest:
    return dht_pb2.FindRequest(keys=[ROOT_ID.to_bytes()] * keys)


def a_store(entries: Sequence[tuple[Any, bytes, float]], **more: Any) -> dht_pb2.StoreRequest:
    columns = {
        "keys": [ROOT_ID.to_bytes()] * len(entries),
        "subkeys": [MSGPackSerializer.dumps(subkey) for subkey, _, _ in entries],
        "values": [value for _, value, _ in entries],
        "expiration_time": [expiration for _, _, expiration in entries],
        "in_cache": [False] * len(entries),
    }
    return dht_pb2.StoreRequest(**(columns | more))


def test_too_many_keys_are_refused_before_they_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        node = await a_node(Wires(), 0)
        looked = MagicMock(wraps=DHTID.from_bytes)
        monkeypatch.setattr(DHTID, "from_bytes", looked)
        for request in (a_find(190_000), a_find(MAX_KEYS + 1)):
            with pytest.raises(RemoteError, match=f"expected at most {MAX_KEYS} keys"):
                await node.protocol.rpc_find(request, asked_by(1))
        with pytest.raises(RemoteError, match=f"expected at most {MAX_KEYS} keys"):
            await node.protocol.rpc_store(a_store([entry(7)] * 5000), asked_by(1))
        assert not looked.called
        assert len((await node.protocol.rpc_find(a_find(MAX_KEYS), asked_by(1))).results) == MAX_KEYS

    play(scene)


def test_requests_that_do_not_fit_together_are_refused() -> None:
    async def scene() -> None:
        protocol = (await a_node(Wires(), 0)).protocol
        for key in (b"", b"short", b"x" * 21):
            with pytest.raises(RemoteError, match="keys of 20 bytes"):
                await protocol.rpc_find(dht_pb2.FindRequest(keys=[key]), asked_by(1))
        for column in ("keys", "subkeys", "values", "expiration_time", "in_cache"):
            with pytest.raises(RemoteError, match="expected complete records"):
                await protocol.rpc_store(a_store([entry(7)], **{column: []}), asked_by(1))
        assert not (await protocol.rpc_store(a_store([]), asked_by(1))).store_ok

    play(scene)


def test_who_asks_too_often_finds_nothing_for_a_while_and_nobody_else_suffers() -> None:
    async def scene() -> None:
        wires = Wires()
        nodes = await some_nodes(wires, 3)
        protocol = nodes[0].protocol
        await DhtDirectory(nodes[1], RUN, Random(1)).announce(presence_of(1))
        kinds = []
        for _ in range(int(EACH.burst)):
            [result] = (await protocol.rpc_find(a_find(1), asked_by(9))).results
            kinds.append(result.type)
        assert kinds[0] == dht_pb2.FOUND_DICTIONARY
        assert kinds[-1] == dht_pb2.NOT_FOUND
        refused = await protocol.rpc_find(a_find(5), asked_by(9))
        assert [list(each.nearest_peer_ids) for each in refused.results] == [[]] * 5
        assert list((await protocol.rpc_store(a_store([entry(9)]), asked_by(9))).store_ok) == [False]
        assert (await protocol.rpc_find(a_find(1), asked_by(8))).results[0].type == dht_pb2.FOUND_DICTIONARY
        await asyncio.sleep(1.0)
        assert (await protocol.rpc_find(a_find(1), asked_by(9))).results[0].type == dht_pb2.FOUND_DICTIONARY
        assert list((await protocol.rpc_store(a_store([entry(9)]), asked_by(9))).store_ok) == [True]

    play(scene)


def test_what_is_asked_and_answered_is_booked_and_is_nobodys_share() -> None:
    async def scene() -> None:
        wires, mine, theirs = Wires(), Throttles(), Throttles()
        here, there = await a_node(wires, 0, mine), await a_node(wires, 1, theirs)
        await here.protocol.call_ping(there.peer_id)
        await DhtDirectory(here, RUN, Random(1)).announce(presence_of(0))
        await DhtDirectory(here, RUN, Random(1)).lookup()
        asked = {name for _, name in wires.calls}
        assert {"ping", "store", "find"} <= asked
        assert mine.up.total_bytes + mine.down.total_bytes == wires.carried_bytes > 0
        assert mine.up.total_bytes == theirs.down.total_bytes
        assert mine.down.total_bytes == theirs.up.total_bytes
        # DHT traffic is not a service, and must not use up the services' budget.
        assert (mine.given_bytes, theirs.given_bytes) == (0, 0)

    play(scene)


def test_while_it_rests_honest_askers_are_still_answered_and_floods_earlier_refused() -> None:
    async def scene() -> None:
        rates = Throttles()
        protocol = (await a_node(Wires(), 0, rates)).protocol
        assert list((await protocol.rpc_store(a_store([entry(1)]), asked_by(1))).store_ok) == [True]
        rates.rests = True
        kinds = [(await protocol.rpc_find(a_find(1), asked_by(9))).results[0].type for _ in range(30)]
        assert kinds.count(dht_pb2.FOUND_DICTIONARY) == int(EACH.burst / (RESTING_COST * (1 + 1 / RECORDS_A_TOKEN)))
        for _ in range(10):
            await asyncio.sleep(20.0)  # the lookup period of an honest peer
            kinds = [(await protocol.rpc_find(a_find(1), asked_by(9))).results[0].type for _ in range(4)]
            assert kinds == [dht_pb2.FOUND_DICTIONARY] * 4

    play(scene)


def test_beyond_its_share_of_a_cap_nothing_is_answered_until_it_is_not() -> None:
    async def scene() -> None:
        rates = Throttles(asyncio.get_running_loop().time)
        protocol = (await a_node(Wires(), 0, rates)).protocol
        await protocol.rpc_store(a_store([entry(1)]), asked_by(1))
        for line in (rates.up, rates.down):
            line.rate = MIN_RATE
            line.book_unwaited(int((UNWAITED_S + 5.0) * UNWAITED_SHARE * MIN_RATE))
            assert (await protocol.rpc_find(a_find(1), asked_by(2))).results[0].type == dht_pb2.NOT_FOUND
            await asyncio.sleep(6.0)
            assert (await protocol.rpc_find(a_find(1), asked_by(2))).results[0].type == dht_pb2.FOUND_DICTIONARY
            line.rate = math.inf

    play(scene)


def test_full_keys_cost_more_and_fit_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        protocol = (await a_node(Wires(), 0)).protocol
        until = get_dht_time() + 60.0
        for key in range(4):
            for number in range(MAX_ENTRIES):
                protocol.storage.store_subkey(DHTID(key), str(number), b"x" * 700, until)
        request = dht_pb2.FindRequest(keys=[DHTID(key).to_bytes() for key in range(4)])
        answer = await protocol.rpc_find(request, asked_by(1))
        assert answer.ByteSize() < 4 << 20  # p2pd rejects larger answers, and the sender of the request would time out
        assert [each.type for each in answer.results].count(dht_pb2.FOUND_DICTIONARY) == 2
        answers = [await protocol.rpc_find(request, asked_by(1)) for _ in range(3)]
        assert answers[-1].ByteSize() < 100

    assert MAX_ENTRIES == MAX_STORED_PEERS
    play(scene)


def test_what_is_stored_is_one_record_that_holds() -> None:
    async def scene() -> None:
        protocol = (await a_node(Wires(), 0)).protocol
        good = entry(7)
        subkey = MSGPackSerializer.dumps(good[0])
        dictionary = packed([good], good[2])
        requests = {
            "another's subkey": a_store([(somebody(8).peer_id, *good[1:])]),
            "for longer than it says": a_store([(*good[:2], good[2] + 100.0)]),
            "for ever": a_store([(*good[:2], math.inf)]),
            "no expiration": a_store([(*good[:2], math.nan)]),
            "in a cache": a_store([good], in_cache=[True]),
            "without a subkey": a_store([(None, *good[1:])]),
            "a whole dictionary": a_store([good], subkeys=[b""], values=[dictionary]),
            "under another key": a_store([good], keys=[b"x" * 20]),
            "under a key of another length": a_store([good], keys=[subkey]),
            "a bottomless one": a_store([(good[0], b"\x91" * 1000 + b"\xc0", good[2])]),
            "a bottomless presence": a_store([(good[0], msgpack.packb(b"\x91" * 999 + b"\xc0"), good[2])]),
            "a bottomless subkey": a_store([good], subkeys=[b"\x91" * 1000 + b"\xc0"]),
        }
        for what, request in requests.items():
            assert list((await protocol.rpc_store(request, asked_by(7))).store_ok) == [False], what
        assert not protocol.storage.data
        assert not protocol.cache.data
        assert list((await protocol.rpc_store(a_store([good]), asked_by(3))).store_ok) == [True]
        # It has that one already.
        assert list((await protocol.rpc_store(a_store([good]), asked_by(7))).store_ok) == [False]
        assert list((await protocol.rpc_store(a_store([entry(7, step=2)]), asked_by(7))).store_ok) == [True]

    play(scene)


def test_a_record_that_is_stored_again_and_again_takes_no_room() -> None:
    async def scene() -> None:
        protocol = (await a_node(Wires(), 0)).protocol
        good = entry(7)
        for number in range(1000):
            later = (*good[:2], good[2] + number / 1000)
            await protocol.rpc_store(a_store([good, later] * 5), asked_by(number % 100))
        [held] = protocol.storage.data.values()
        assert len(protocol.storage.expiration_heap) == len(held.value.expiration_heap) == 1

    play(scene)


def test_an_end_that_is_no_number_is_stored_whatever_the_validator_says_nowhere() -> None:
    """Check NaN and infinity: hivemind would keep such a record forever, and list its expiration again each time."""

    async def scene() -> None:
        protocol = (await a_node(Wires(), 0)).protocol
        protocol.record_validator = None
        for end in (math.nan, math.inf):
            assert list((await protocol.rpc_store(a_store([(*entry(7)[:2], end)]), asked_by(7))).store_ok) == [False]
        assert not protocol.storage.expiration_heap

    play(scene)


# --- identities ---------------------------------------------------------------------------------------------------


def test_a_node_that_starts_anew_is_the_node_that_it_was() -> None:
    async def scene() -> None:
        wires = Wires()
        nodes = await some_nodes(wires, 4)
        again = await a_node(wires, 3)
        assert again.node_id == nodes[3].node_id == id_of(peer_id(3).to_bytes())
        await again.protocol.call_ping(nodes[0].peer_id)
        assert len(nodes[0].protocol.routing_table.uid_to_peer_id) == 3

    play(scene)


def test_nobody_takes_anothers_place() -> None:
    """Check also requests, which enter their sender into the routing table."""

    async def scene() -> None:
        protocol = (await a_node(Wires(), 0)).protocol
        own = dht_pb2.NodeInfo(node_id=id_of(peer_id(1).to_bytes()).to_bytes())
        wrong = [b"", b"\x01" * 20, b"\x01" * 1000, protocol.node_id.to_bytes(), id_of(b"another").to_bytes()]
        requests = [
            (protocol.rpc_ping, lambda info: dht_pb2.PingRequest(peer=info)),
            (protocol.rpc_ping, lambda info: dht_pb2.PingRequest(peer=info, validate=True)),
            (protocol.rpc_find, lambda info: dht_pb2.FindRequest(peer=info)),
            (protocol.rpc_store, lambda info: dht_pb2.StoreRequest(peer=info)),
        ]
        for answer, request in requests:
            for raw in wrong:
                await answer(request(dht_pb2.NodeInfo(node_id=raw)), asked_by(1))
            assert not protocol.routing_table.uid_to_peer_id
            await answer(request(own), asked_by(1))
            await asyncio.sleep(0.0)
            assert list(protocol.routing_table.uid_to_peer_id.values()) == [peer_id(1)]
            await protocol.update_routing_table(None, peer_id(1), responded=False)
        await protocol.rpc_ping(dht_pb2.PingRequest(peer=protocol.node_info), asked_by(0))
        assert not protocol.routing_table.uid_to_peer_id  # nor our own id

    play(scene)


def test_a_routing_table_is_bounded() -> None:
    async def scene() -> None:
        wires = Wires()
        protocol = (await a_node(wires, 0)).protocol
        for number in range(6000):
            peer = PeerID(number.to_bytes(38))
            await protocol.update_routing_table(id_of(peer.to_bytes()), peer)
        table = protocol.routing_table
        known = sum(len(each.nodes_to_peer_id) + len(each.replacement_nodes) for each in table.buckets)
        assert max(len(each.replacement_nodes) for each in table.buckets) <= MAX_SPARES
        assert len(table.uid_to_peer_id) == len(table.peer_id_to_uid) == known < 3000
        await asyncio.sleep(1.0)
        assert not protocol._pings  # none of the pings that it sent is still pending

    play(scene)


def test_our_dictionaries_are_read_as_hivemind_writes_them() -> None:
    held = DictionaryDHTValue()
    for number in range(3):
        held.store(*entry(number))
    assert [tuple(each) for each in dht_protocol._entries(MSGPackSerializer.dumps(held))] == [
        (key, value, until) for key, (value, until) in held.items()
    ]


# --- errors of hivemind -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [AssertionError(), KeyError("x"), RecursionError("deep")])
def test_what_hivemind_raises_is_a_network_error(error: Exception) -> None:
    async def scene() -> None:
        with pytest.raises(NetworkError, match=rf"^the lookup failed in hivemind: {type(error).__name__}"):
            async with dht.network_errors("the lookup"):
                raise error

    play(scene)


@pytest.mark.parametrize("error", [NetworkError("that"), TimeoutError("that"), asyncio.CancelledError("that")])
def test_what_says_enough_already_passes(error: BaseException) -> None:
    async def scene() -> None:
        with pytest.raises(type(error), match=r"^that$"):
            async with dht.network_errors("the lookup"):
                raise error

    play(scene)


def test_the_protocol_is_the_one_that_serves() -> None:
    async def scene() -> None:
        node = await a_node(Wires(), 0)
        assert isinstance(node.protocol, Protocol)
        assert set(node.p2p.handlers) == {f"{DHT_PROTOCOL}/{question}" for question in ("ping", "store", "find")}
        assert not await node.get(ROOT, latest=True)

    play(scene)


def test_a_jump_of_the_systems_clock_ends_no_entry_and_keeps_no_ban(monkeypatch: pytest.MonkeyPatch) -> None:
    off_s = [0.0]
    clock = WallClock(lambda: 1e9 + off_s[0], lambda: 0.0)
    monkeypatch.setattr(dht, "wall", clock)
    dht.use_wall_clock()
    try:
        entries, bans = TimedStorage[str, str](), Blacklist(base_time=5.0, backoff_rate=2.0)
        entries.store("key", "value", 1e9 + 60.0)
        off_s[0] = 86_400.0
        assert entries.get("key") is not None
        bans.register_failure(PeerID(b"peer"))
        off_s[0] = -86_400.0
        assert bans.banned_peers.get(PeerID(b"peer")).expiration_time == 1e9 + 5.0
    finally:
        monkeypatch.undo()
        dht.use_wall_clock()
