"""Every decoder of what strangers send, as one function each: bytes in; nothing out, or an error that is a bug.

A target knows which errors its decoder may raise, and checks what must hold of whatever it lets pass. The same targets
serve the tests (saved findings, mutated seeds) and ``fuzz_campaign``, which searches by coverage.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import math
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import msgpack
import people
import torch
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from p2ptrain import codec, framing, wire
from p2ptrain.admission import Badge, Rulings, Ticket
from p2ptrain.errors import JoinLinkError, ManifestError, NetworkError, RemoteError
from p2ptrain.framing import FrameKind, PartEnd
from p2ptrain.ids import PROTOCOL_VERSION, PeerId, RunId
from p2ptrain.manifest import presets
from p2ptrain.manifest.document import parse_toml, render_toml
from p2ptrain.manifest.link import JoinLink
from p2ptrain.manifest.signing import SignedManifest, public_key_of, sign
from p2ptrain.net import address, dht_protocol, hop, identity, payload, probe, reach
from p2ptrain.net.directory import PresenceValidator, presence_key
from p2ptrain.net.session import message_in
from p2ptrain.receipts import Receipt
from p2ptrain.swarm import PeerState, Presence
from p2ptrain.swarm.buckets import home
from p2ptrain.swarm.messages import (
    Accept,
    Acknowledge,
    Decline,
    DeclineReason,
    Offer,
    Terms,
    WeightsReply,
    WeightsRequest,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One decoder."""

    check: Callable[[bytes], None]
    """Raises nothing, whatever the bytes are."""
    seeds: tuple[bytes, ...]
    """What it takes, to begin with."""
    runs: int = 1
    """Share of a campaign's runs, as a divisor: one of these takes so many times as long."""


# --- what there is to send ----------------------------------------------------------------------------------------

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PEER = identity._peer_id(KEY.public_key())
RUN = RunId("ab" * 32)
_UNSIGNED = Presence(
    peer=PEER,
    run=RUN,
    addresses=("/ip4/203.0.113.7/tcp/31337",),
    state=PeerState.TRAINING,
    step=3,
    progress=1024.0,
    settled=True,
    nickname="amber fox",
    issued_at=1.7e9,
    lifetime_s=60.0,
    signature=b"",
)
PRESENCE = dataclasses.replace(_UNSIGNED, signature=KEY.sign(wire.presence_bytes(_UNSIGNED)))
TERMS = Terms(step=1, progress=2.0, weight=1.0, clip_radius=math.inf, settled=True, state=PeerState.TRAINING)
MESSAGES = (
    Offer(run=RUN, protocol=PROTOCOL_VERSION, fragments=(0, 2, 5), terms=TERMS, known=(PRESENCE,)),
    Accept(fragments=(0, 2), terms=TERMS, known=()),
    Decline(reason=DeclineReason.BUSY, state=PeerState.TRAINING, step=1, progress=2.0, known=()),
    Acknowledge(),
    WeightsRequest(run=RUN, protocol=PROTOCOL_VERSION, progress=1.0),
    WeightsReply(step=1, progress=2.0, known=()),
)
MANIFEST = presets.preset("demo", public_key_of(KEY))


def certificate() -> bytes:
    """A libp2p certificate in DER."""
    public = KEY.public_key()
    signed = KEY.sign(b"libp2p-tls-handshake:" + public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
    key = bytes.fromhex("08011220") + public.public_bytes_raw()
    proof = b"\x04" + bytes([len(key)]) + key + b"\x04" + bytes([len(signed)]) + signed
    name = x509.Name([])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(1)
        .not_valid_before(datetime.datetime(2026, 1, 1))
        .not_valid_after(datetime.datetime(2126, 1, 1))
        .add_extension(x509.UnrecognizedExtension(probe._EXTENSION, b"\x30" + bytes([len(proof)]) + proof), False)
    )
    return made.sign(KEY, None).public_bytes(Encoding.DER)


# --- the wire -----------------------------------------------------------------------------------------------------


def header(data: bytes) -> None:
    with contextlib.suppress(RemoteError):
        kind, length = framing.decode_header(data)
        assert framing.encode_header(kind, length) == data
        assert length <= framing.MAX_CHUNK_BYTES


def part_end(data: bytes) -> None:
    with contextlib.suppress(RemoteError):
        assert framing.encode_part_end(framing.decode_part_end(data)) == data


def message(data: bytes) -> None:
    with contextlib.suppress(RemoteError):
        found = message_in(data)
        assert message_in(wire.encode_message(found)) == found


def presence(data: bytes) -> None:
    with contextlib.suppress(RemoteError):
        found = wire.decode_presence(data)
        assert wire.decode_presence(wire.encode_presence(found)) == found
        assert len(wire.encode_presence(dataclasses.replace(wire.trimmed(found), signature=bytes(64)))) <= 1000
        identity.verify(found)


class BytesLink:
    """A link on which these bytes arrive, and then the end. What is sent is checked by the frame it would make."""

    peer = PEER

    def __init__(self, data: bytes) -> None:
        self._rest = data

    async def send(self, kind: int, body: bytes | memoryview) -> None:
        framing.encode_header(kind, len(body))

    async def receive(self) -> tuple[int, bytes]:
        kind, length = framing.decode_header(self._take(framing.HEADER_BYTES))
        return kind, self._take(length)

    async def close(self) -> None:
        """Nothing is open."""

    def _take(self, length: int) -> bytes:
        if len(self._rest) < length:
            raise NetworkError("the stream ended")
        taken, self._rest = self._rest[:length], self._rest[length:]
        return taken


def frames(*bodies: tuple[int, bytes]) -> bytes:
    return b"".join(framing.encode_header(kind, len(body)) + body for kind, body in bodies)


def run(conversation: Awaitable[Any]) -> None:
    """To its end, which never waits: what arrives is there already."""

    async def all_of_it() -> None:
        with contextlib.suppress(RemoteError, NetworkError):
            await asyncio.wait_for(conversation, timeout=5)

    asyncio.run(all_of_it())


def received_payload(data: bytes) -> None:
    """The first two bytes say how long the parts are that we expect."""
    lengths = [each + 1 for each in data[:2]]

    async def receive() -> None:
        parts = await payload.receive_payload(BytesLink(data[2:]), lengths)
        assert [len(each) for each in parts] == lengths

    run(receive())


def asked_about_reach(data: bytes) -> None:
    async def dial(host: str, port: int) -> PeerId:
        raise NetworkError("nobody is dialed")

    place = "/ip4/203.0.113.7/tcp/31337"
    run(reach.answer(BytesLink(data), place, reach.Allowances(), dial, clock=lambda: 0.0, wall=lambda: 0.0))


def told_about_reach(data: bytes) -> None:
    class Transport:
        async def open(self, peer: PeerId, addresses: Any = ()) -> BytesLink:
            return BytesLink(data)

        async def listen(self, handler: Any) -> None:
            raise AssertionError

    async def ask() -> None:
        sight = await reach.ask_to_look(Transport(), PEER, (), 31337)
        assert sight.place == "" or address.is_dialable(sight.place)
        assert sight.why.isprintable()
        assert len(sight.why) < 1000

    run(ask())


# --- the directory, the relay, certificates, addresses --------------------------------------------------------------


def dht_record(data: bytes) -> None:
    key = DHTID.generate(source=presence_key(RUN, home(RUN, PEER, 0))).to_bytes()
    for value in (data, msgpack.packb(data)):
        record = DHTRecord(key, MSGPackSerializer.dumps(PEER), value, 1.7e9 + 60)
        assert PresenceValidator(RUN).validate(record) in (True, False)


def dht_answer(data: bytes) -> None:
    """What a node answers to a lookup, as bytes from p2pd, and its records alone."""
    key = DHTID.generate(source=presence_key(RUN, home(RUN, PEER, 0)))
    asker, answerer = dht_protocol.id_of(b"asker"), PeerID(bytes(38))

    async def ask(answer: Callable[[], dht_pb2.FindResponse]) -> None:
        async def rpc_find(*_: Any, **__: Any) -> dht_pb2.FindResponse:
            return answer()

        protocol = await dht_protocol.Protocol.create(
            None, asker, 20, 5, 5, 3.0, client_mode=True, record_validator=PresenceValidator(RUN)
        )
        protocol.get_stub = lambda peer: SimpleNamespace(rpc_find=rpc_find)
        for value, nearest in (await protocol.call_find(answerer, [key]) or {}).values():
            assert value is None or value.expiration_time < time.time() + 1000
            assert all(dht_protocol.id_of(peer.to_bytes()) == each != asker for each, peer in nearest.items())

    records = dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=data, expiration_time=math.inf)
    asyncio.run(ask(lambda: dht_pb2.FindResponse.FromString(data)))
    asyncio.run(ask(lambda: dht_pb2.FindResponse(results=[records])))


def _dht_answers() -> tuple[bytes, bytes]:
    records = DictionaryDHTValue()
    presence = dataclasses.replace(_UNSIGNED, issued_at=time.time() + 200.0)
    presence = dataclasses.replace(presence, signature=KEY.sign(wire.presence_bytes(presence)))
    records.store(PEER, msgpack.packb(wire.encode_presence(presence)), presence.issued_at + presence.lifetime_s)
    value = MSGPackSerializer.dumps(records)
    peer = PeerID.from_base58(PEER).to_bytes()
    result = dht_pb2.FindResult(
        type=dht_pb2.FOUND_DICTIONARY,
        value=value,
        expiration_time=records.latest_expiration_time,
        nearest_node_ids=[dht_protocol.id_of(peer).to_bytes()],
        nearest_peer_ids=[peer],
    )
    return dht_pb2.FindResponse(results=[result]).SerializeToString(), value


def relay_messages(data: bytes) -> None:
    for parse in (hop.question, hop.status, hop.stop_status):
        with contextlib.suppress(ValueError):
            found = parse(data)
            if isinstance(found, hop.Question):
                assert len(found.target) <= len(data)


def tls_certificate(data: bytes) -> None:
    assert probe.owner(data) in (None, PEER), "nobody else has signed anything here"


def packed_address(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        text = address.unpacked(data)
        assert address.unpacked(address.packed(text)) == text


def written_address(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    with contextlib.suppress(ValueError):
        raw = address.packed(text)
        assert address.packed(address.unpacked(raw)) == raw


def join_link(data: bytes) -> None:
    with contextlib.suppress(JoinLinkError):
        link = JoinLink.parse(data.decode("utf-8", "replace"))
        assert JoinLink.parse(str(link)) == link
        for each in link.addresses:
            assert address.is_dialable(each)


# --- admission and contributions ------------------------------------------------------------------------------------


def badge(data: bytes) -> None:
    with contextlib.suppress(RemoteError):
        found = Badge.decode(data, RUN, people.PUBLIC)
        assert found == people.badge(), "nobody else has signed anything here"
        assert found.encode() == data


def ticket(data: bytes) -> None:
    with contextlib.suppress(JoinLinkError):
        found = Ticket.parse(data.decode("utf-8", "replace"), RUN, people.PUBLIC)
        assert found == people.ticket()


def rulings(data: bytes) -> None:
    with contextlib.suppress(RemoteError):
        assert Rulings.decode(data, RUN, people.PUBLIC).encode() == data


def receipt(data: bytes) -> None:
    with contextlib.suppress(RemoteError):
        found = Receipt.decode(data)
        assert found.encode() == data
        assert not found.is_agreed(RUN), "nobody has countersigned anything"
        found.is_claimed(RUN)


def _receipt() -> bytes:
    blank = Receipt(people.GUEST.peer, people.WITNESS.peer, 1, 2, 3, 4, 5, 6, 7, 8)
    return blank.signed(RUN, people.GUEST.state).encode()


# --- manifests ----------------------------------------------------------------------------------------------------


def signed_manifest(data: bytes) -> None:
    with contextlib.suppress(ManifestError):
        assert SignedManifest.from_bytes(data).to_bytes() == data


def written_manifest(data: bytes) -> None:
    with contextlib.suppress(ManifestError):
        parse_toml(data.decode("utf-8", "replace"))


# --- payloads -----------------------------------------------------------------------------------------------------

ELEMENTS = 2_100
"""More than two blocks of the block-wise codecs, and half a chunk of topk's."""
SNAPSHOT = torch.linspace(-1.0, 1.0, ELEMENTS)


def codec_target(name: str) -> Target:
    """A partner's message, of whatever length."""
    each = codec.get(name)
    terms = codec.CodecTerms(ELEMENTS)
    if isinstance(each, codec.ModularCodec):
        wish = codec.wish_for(each, codec.first_shape(each, SNAPSHOT), SNAPSHOT)
        terms = codec.agree(each, ELEMENTS, wish, wish)
    mine = each.encode(SNAPSHOT, terms)

    def check(data: bytes) -> None:
        # Most of what a fuzzer makes has another length, which one comparison finds; so that is put right.
        theirs = (data + mine[len(data) :])[: len(mine)]
        for message in (data, theirs):
            with contextlib.suppress(RemoteError):
                difference = each.difference(mine, message, terms)
                assert difference.shape == (ELEMENTS,)
                assert bool(torch.isfinite(difference).all())
                assert torch.equal(each.difference(message, mine, terms), -difference)

    return Target(check, (mine, each.encode(-SNAPSHOT, terms)), runs=20)


def wishes(data: bytes) -> None:
    """What a modular codec's partner wishes for, of whatever length."""
    each = codec.get("modular4")
    mine = codec.wish_for(each, codec.first_shape(each, SNAPSHOT), SNAPSHOT)
    theirs = (data + mine[len(data) :])[: len(mine)]
    for wish in (data, theirs):
        with contextlib.suppress(RemoteError):
            assert codec.agree(each, ELEMENTS, mine, wish) == codec.agree(each, ELEMENTS, wish, mine)


def _wish() -> bytes:
    each = codec.get("modular4")
    return codec.wish_for(each, codec.first_shape(each, SNAPSHOT), SNAPSHOT)


# --- all of them --------------------------------------------------------------------------------------------------


def targets() -> dict[str, Target]:
    """By name."""
    addresses = ("/ip4/203.0.113.7/tcp/31337", f"/dns4/a.example/tcp/80/p2p/{PEER}/p2p-circuit/p2p/{PEER}")
    digest = framing.encode_part_end(PartEnd(0, 1, payload.blake3(b"x").digest()))
    answer = [addresses[0], reach.Dialed.NO.value, "nobody answers", 1.7e9]
    return {
        "header": Target(header, (framing.encode_header(FrameKind.MESSAGE, 9),)),
        "part_end": Target(part_end, (digest,)),
        "message": Target(message, tuple(map(wire.encode_message, MESSAGES))),
        "presence": Target(presence, (wire.encode_presence(PRESENCE),)),
        "payload": Target(received_payload, (b"\0\0" + frames((FrameKind.CHUNK, b"x"), (FrameKind.PART, digest)),), 5),
        "asked_about_reach": Target(
            asked_about_reach,
            tuple(frames((FrameKind.MESSAGE, msgpack.packb(each))) for each in (["look", 1], ["give", 9], ["take", 9])),
            5,
        ),
        "told_about_reach": Target(told_about_reach, (frames((FrameKind.MESSAGE, msgpack.packb(answer))),), 5),
        "dht_record": Target(
            dht_record, (wire.encode_presence(PRESENCE), msgpack.packb(wire.encode_presence(PRESENCE)))
        ),
        "dht_answer": Target(dht_answer, _dht_answers(), 5),
        "relay_messages": Target(
            relay_messages, (hop.reserve(), hop.answer(hop.Status.OK, 1_700_000_000), hop.lead(b"peer"))
        ),
        "tls_certificate": Target(tls_certificate, (certificate(),)),
        "packed_address": Target(packed_address, tuple(map(address.packed, addresses))),
        "written_address": Target(written_address, tuple(each.encode() for each in addresses)),
        "join_link": Target(join_link, (str(JoinLink(RUN, (f"{addresses[0]}/p2p/{PEER}",))).encode(),)),
        "signed_manifest": Target(signed_manifest, (sign(MANIFEST, KEY).to_bytes(),), 5),
        "written_manifest": Target(written_manifest, (render_toml(MANIFEST).encode(),), 5),
        "badge": Target(badge, (people.badge().encode(),)),
        "ticket": Target(ticket, (str(people.ticket()).encode(),)),
        "rulings": Target(
            rulings, (people.rulings().encode(), people.rulings(2, admitted=(PEER,), revoked=("ab" * 8,)).encode())
        ),
        "receipt": Target(receipt, (_receipt(),)),
        "wishes": Target(wishes, (_wish(),), 5),
        **{f"codec_{name}": codec_target(name) for name in dict.fromkeys(codec.WEIGHT_CODECS + codec.GRADIENT_CODECS)},
    }
