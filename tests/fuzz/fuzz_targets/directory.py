"""Targets for the DHT (records, requests, answers), relays and libp2p handshakes."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgpack
import people
from google.protobuf.message import DecodeError, Message
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from fuzz_targets.common import (
    KEY,
    NOW,
    OWNER,
    PEER,
    RECORD,
    RUN,
    UNTIL,
    BytesStream,
    Target,
    in_the_seeds_days,
    refusing,
    resigned,
    run,
)
from p2ptrain import statements
from p2ptrain.admission import Gate
from p2ptrain.base.errors import RemoteError
from p2ptrain.net import access_list_store, dht_protocol, directory
from p2ptrain.net.directory import PresenceValidator, presence_key
from p2ptrain.net.p2pd import control
from p2ptrain.net.relay import circuit_v2, noise
from p2ptrain.swarm.presence_buckets import home

PLACE_IN_DHT = DHTID.generate(source=presence_key(RUN, home(RUN, PEER, 0)))
SUBKEY = MSGPackSerializer.dumps(PEER)
CERTIFICATE = people.certificate(OWNER, at=int(NOW)).encode()
ACCESS_LIST = people.access_list(2, admitted=(people.GUEST.peer,), revoked=("ab" * 8,))
STATIC = bytes(range(32))
"""A static Noise key."""
MOST_ANSWER_BYTES = 4 << 20
"""Largest answer that p2pd transmits."""


def gate() -> Gate:
    return Gate("invite", RUN, people.PUBLIC)


# --- records ------------------------------------------------------------------------------------------------------


def dht_record(data: bytes) -> bool:
    values = (data, msgpack.packb(data), msgpack.packb(resigned(data)))
    stored = [_is_stored(PresenceValidator(RUN), value) for value in values]
    return any(stored)


def sealed_record(data: bytes) -> bool:
    """Check a record with a membership certificate, as in the DHT of a run that requires admission."""
    values = [data, msgpack.packb(data)]
    with contextlib.suppress(RemoteError):
        match statements.unpacked(data, directory.MAX_SEALED_BYTES):
            case [bytes(encoded), shown]:
                values.append(msgpack.packb(statements.packed([resigned(encoded), shown])))
    found = directory._decoded(data, gate())
    assert found is None or found.peer == PEER, "nobody else has a badge here"
    stored = [_is_stored(PresenceValidator(RUN, gate()), value) for value in values]
    return any(stored)


def _is_stored(validator: PresenceValidator, value: bytes) -> bool:
    with in_the_seeds_days():
        is_stored = validator.validate(DHTRecord(PLACE_IN_DHT.to_bytes(), SUBKEY, value, UNTIL))
    assert is_stored in (True, False)
    return is_stored


def access_list_record(data: bytes) -> bool:
    """Check an access list, also as if the author had signed it."""
    signed, serials = [data], {ACCESS_LIST.serial}
    with contextlib.suppress(RemoteError):
        match statements.unpacked(data, access_list_store.MAX_ACCESS_LIST_BYTES):
            case [serial, *_, _] as fields:
                signature = statements.signature(people.AUTHOR, b"p2ptrain rulings 1", [RUN, *fields[:-1]])
                signed.append(statements.packed([*fields[:-1], signature]))
                if type(serial) is int:
                    serials.add(serial)
    records = [
        DHTRecord(
            access_list_store.key_bytes(RUN), MSGPackSerializer.dumps(serial), value, NOW + access_list_store.LIFETIME_S
        )
        for serial in serials
        for each in signed
        for value in (each, msgpack.packb(each))
    ]
    with in_the_seeds_days():
        stored = [PresenceValidator(RUN, gate()).validate(record) for record in records]
    assert set(stored) <= {True, False}
    return any(stored)


# --- requests and answers -----------------------------------------------------------------------------------------


async def a_node() -> dht_protocol.Protocol:
    return await dht_protocol.Protocol.create(
        None, dht_protocol.id_of(b"asker"), 20, 5, 5, 3.0, client_mode=True, record_validator=PresenceValidator(RUN)
    )


ASKER = SimpleNamespace(remote_id=PeerID.from_base58(people.GUEST.peer))
STORE = dht_pb2.StoreRequest(
    keys=[PLACE_IN_DHT.to_bytes()],
    subkeys=[SUBKEY],
    values=[msgpack.packb(RECORD)],
    expiration_time=[UNTIL],
    in_cache=[False],
    peer=dht_pb2.NodeInfo(node_id=dht_protocol.id_of(ASKER.remote_id.to_bytes()).to_bytes()),
)
FIND = dht_pb2.FindRequest(keys=[PLACE_IN_DHT.to_bytes(), bytes(20)], peer=STORE.peer)
NEVER_READ = DecodeError, RemoteError
"""Errors of hivemind's server for undecodable requests and of our handler for others; both end the stream."""


@refusing(*NEVER_READ)
def dht_find(data: bytes) -> bool:
    """Check a lookup at a node that has a record."""
    request = dht_pb2.FindRequest.FromString(data)

    async def ask() -> dht_pb2.FindResponse:
        node = await a_node()
        await node.rpc_store(STORE, ASKER)
        return await node.rpc_find(request, ASKER)

    with in_the_seeds_days():
        response = run(ask())
    assert len(response.results) == len(request.keys) <= dht_protocol.MAX_KEYS
    assert response.ByteSize() <= MOST_ANSWER_BYTES
    return any(each.type == dht_pb2.FOUND_DICTIONARY for each in response.results)


@refusing(*NEVER_READ)
def dht_store(data: bytes) -> bool:
    """Check requests to store, also with valid signatures, and look up what was stored."""
    request = dht_pb2.StoreRequest.FromString(data)
    genuine = dht_pb2.StoreRequest.FromString(data)
    for number, value in enumerate(request.values):
        with contextlib.suppress(ValueError):
            encoded = msgpack.unpackb(value, max_array_len=0, max_map_len=0)
            if type(encoded) is bytes:
                genuine.values[number] = msgpack.packb(resigned(encoded))

    async def ask() -> list[bool]:
        node = await a_node()
        stored: list[bool] = []
        for each in (request, genuine):
            answer = (await node.rpc_store(each, ASKER)).store_ok
            assert len(answer) == len(each.keys) <= dht_protocol.MAX_KEYS
            stored += answer
        keys = list(dict.fromkeys(key for key in request.keys if len(key) == DHTID.HASH_NBYTES))
        found = await node.rpc_find(dht_pb2.FindRequest(keys=keys), ASKER)
        for result in found.results:
            if result.type == dht_pb2.FOUND_DICTIONARY:
                [(_, value, expiration)] = dht_protocol._entries(result.value)
                assert directory._unwrapped(value, None).peer == PEER, "nobody else has signed anything here"
                assert expiration <= NOW + 1000
        return stored

    with in_the_seeds_days():
        return any(run(ask()))


def dht_answer(data: bytes) -> bool:
    """Check a node's answer to a lookup, as bytes from p2pd, and its records alone."""
    records = dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=data, expiration_time=math.inf)

    async def ask(answer: Callable[[], dht_pb2.FindResponse]) -> bool:
        node = await _asking("find", answer)
        is_found = False
        for value, nearest in (await node.call_find(PeerID(bytes(38)), [PLACE_IN_DHT]) or {}).values():
            assert value is None or value.expiration_time < NOW + 1000
            assert all(dht_protocol.id_of(peer.to_bytes()) == each != node.node_id for each, peer in nearest.items())
            is_found |= value is not None
        return is_found

    answers = (lambda: dht_pb2.FindResponse.FromString(data), lambda: dht_pb2.FindResponse(results=[records]))
    with in_the_seeds_days():
        found = [run(ask(answer)) for answer in answers]
    return any(found)


def dht_ping(data: bytes) -> bool:
    """Check a ping, the answer to one, and the answer to a request to store."""

    async def ask() -> bool:
        node = await a_node()
        with contextlib.suppress(DecodeError):
            await node.rpc_ping(dht_pb2.PingRequest.FromString(data), ASKER)
        node = await _asking("ping", lambda: dht_pb2.PingResponse.FromString(data))
        met = await node.call_ping(ASKER.remote_id)
        assert met in (None, dht_protocol.id_of(ASKER.remote_id.to_bytes()))
        node = await _asking("store", lambda: dht_pb2.StoreResponse.FromString(data))
        stored = await node.call_store(ASKER.remote_id, [PLACE_IN_DHT], [msgpack.packb(RECORD)], UNTIL, [PEER])
        assert stored is None or set(stored) <= {True, False}
        await asyncio.sleep(0)  # a task enters the sender
        assert len(node.routing_table.uid_to_peer_id) <= 1
        return met is not None or bool(stored)

    return run(ask())


async def _asking(about: str, answer: Callable[[], Message]) -> dht_protocol.Protocol:
    """Return a node for which every other node has this answer."""

    async def rpc(*_: Any, **__: Any) -> Message:
        return answer()

    node = await a_node()
    node.get_stub = lambda peer: SimpleNamespace(**{f"rpc_{about}": rpc})
    return node


def _answers() -> tuple[bytes, bytes]:
    records = DictionaryDHTValue()
    with in_the_seeds_days():
        records.store(PEER, msgpack.packb(RECORD), UNTIL)
        value = MSGPackSerializer.dumps(records)
    peer = PeerID.from_base58(PEER).to_bytes()
    result = dht_pb2.FindResult(
        type=dht_pb2.FOUND_DICTIONARY,
        value=value,
        expiration_time=UNTIL,
        nearest_node_ids=[dht_protocol.id_of(peer).to_bytes()],
        nearest_peer_ids=[peer],
    )
    return dht_pb2.FindResponse(results=[result]).SerializeToString(), value


# --- relays and handshakes ----------------------------------------------------------------------------------------


def relay_messages(data: bytes) -> bool:
    read = 0
    for parse in (circuit_v2.question, circuit_v2.status, circuit_v2.stop_status):
        with contextlib.suppress(ValueError):
            found = parse(data)
            if isinstance(found, circuit_v2.CircuitRequest):
                assert len(found.target) <= len(data)
            read += 1
    return read > 0


@refusing(OSError, EOFError)
def framed_message(data: bytes) -> None:
    """Check a message on a relay's stream, with its length ahead, which is bounded."""
    stream = BytesStream(data)
    try:
        message = run(control.read_message(stream, circuit_v2.MAX_MESSAGE_BYTES))
        assert len(message) <= circuit_v2.MAX_MESSAGE_BYTES
    finally:
        assert len(data) - len(stream.rest) <= control.MAX_LENGTH_BYTES + circuit_v2.MAX_MESSAGE_BYTES


@refusing(ValueError)
def noise_payload(data: bytes) -> None:
    """Check the payload in which a node proves its peer id."""
    assert noise.owner(data, STATIC) == PEER, "nobody else has signed anything here"


def targets() -> dict[str, Target]:
    """Return the targets of this module by name."""
    sealed = statements.packed([RECORD, CERTIFICATE])
    pong = dht_pb2.PingResponse(peer=STORE.peer, dht_time=NOW)
    stored = dht_pb2.StoreResponse(store_ok=[True], peer=STORE.peer)
    twice = dht_pb2.StoreRequest()
    for _ in range(2):
        twice.MergeFrom(STORE)
    return {
        "dht_record": Target(dht_record, (RECORD, msgpack.packb(RECORD)), 5),
        "sealed_record": Target(sealed_record, (sealed, msgpack.packb(sealed)), 5),
        "access_list_record": Target(access_list_record, (ACCESS_LIST.encode(), msgpack.packb(ACCESS_LIST.encode()))),
        "dht_answer": Target(dht_answer, _answers(), 5),
        "dht_find": Target(dht_find, (FIND.SerializeToString(),), 5),
        "dht_store": Target(dht_store, (STORE.SerializeToString(), twice.SerializeToString()), 5),
        "dht_ping": Target(dht_ping, (pong.SerializeToString(), stored.SerializeToString()), 5),
        "relay_messages": Target(
            relay_messages,
            (
                circuit_v2.reserve(),
                circuit_v2.answer(circuit_v2.CircuitStatus.OK, 1_700_000_000),
                circuit_v2.lead(b"peer"),
            ),
        ),
        "framed_message": Target(framed_message, (circuit_v2.framed(circuit_v2.reserve()),), 5),
        "noise_payload": Target(noise_payload, (noise.proof(KEY, STATIC),)),
    }
