"""Targets for frames, messages, payloads and codecs, and for addresses, join links and manifests."""

from __future__ import annotations

import contextlib
import dataclasses

import torch

from fuzz_targets.common import (
    KEEPER,
    MANIFEST,
    MESSAGES,
    PEER,
    PLACE,
    RECORD,
    RUN,
    SIGNED,
    BytesLink,
    BytesStream,
    Target,
    frames,
    part,
    refusing,
    resigned,
    run,
)
from p2ptrain import codec, framing, wire
from p2ptrain.base.errors import JoinLinkError, ManifestError, NetworkError, RemoteError
from p2ptrain.framing import FrameKind, PartEnd
from p2ptrain.manifest.document import parse_toml, render_toml
from p2ptrain.manifest.link import JoinLink
from p2ptrain.manifest.signing import SignedManifest
from p2ptrain.net import address, identity, payload
from p2ptrain.net.links import Limits, StreamLink
from p2ptrain.net.p2pd.control import FarEnd
from p2ptrain.net.session import message_in
from p2ptrain.net.throttle import Throttles

# --- frames and messages ------------------------------------------------------------------------------------------


@refusing(RemoteError)
def header(data: bytes) -> None:
    kind, length = framing.decode_header(data)
    ours = framing.encode_header(kind, length)
    assert ours[1:] == data[1:]
    assert ours[0] == data[0] or (kind in framing.OF_EVERY_VERSION and data[0] >> 4 == 0xA)
    assert length <= framing.MAX_CHUNK_BYTES


def stream_frames(data: bytes) -> bool:
    """Read frame after frame, alternately at the length that each names and into a buffer of ours."""
    link = StreamLink(FarEnd(PEER, PLACE), BytesStream(data), Limits(), Throttles())
    lengths: list[int] = []

    async def receive() -> None:
        while True:
            lengths.append(len((await link.receive())[1]))
            lengths.append((await link.receive_into(memoryview(bytearray(64))))[1])

    with contextlib.suppress(RemoteError, NetworkError):
        run(receive())
    assert sum(lengths) + len(lengths) * framing.HEADER_BYTES <= len(data)
    return len(lengths) > 1


@refusing(RemoteError)
def part_end(data: bytes) -> None:
    assert framing.encode_part_end(framing.decode_part_end(data)) == data


@refusing(RemoteError)
def message(data: bytes) -> None:
    found = message_in(data)
    assert message_in(wire.encode_message(found)) == found


@refusing(RemoteError)
def presence(data: bytes) -> None:
    found = wire.decode_presence(data)
    assert wire.decode_presence(wire.encode_presence(found)) == found
    assert len(wire.encode_presence(dataclasses.replace(wire.trimmed(found), signature=bytes(64)))) <= 1000
    identity.verify(found)
    assert identity.verify(wire.decode_presence(resigned(data)))


@refusing(RemoteError, NetworkError)
def received_payload(data: bytes) -> None:
    """Check a payload; its first two bytes give the expected lengths of the parts."""
    lengths = [each + 1 for each in data[:2]]
    parts = run(payload.receive_payload(BytesLink(data[2:]), lengths))
    assert [len(each) for each in parts] == lengths


# --- addresses, links, manifests ----------------------------------------------------------------------------------


@refusing(ValueError)
def packed_address(data: bytes) -> None:
    text = address.unpacked(data)
    assert address.unpacked(address.packed(text)) == text


@refusing(ValueError)
def written_address(data: bytes) -> None:
    raw = address.packed(data.decode("utf-8", "replace"))
    assert address.packed(address.unpacked(raw)) == raw


@refusing(JoinLinkError)
def join_link(data: bytes) -> None:
    link = JoinLink.parse(data.decode("utf-8", "replace"))
    assert JoinLink.parse(str(link)) == link
    for each in link.addresses:
        assert address.is_dialable(each)


@refusing(ManifestError)
def signed_manifest(data: bytes) -> None:
    assert SignedManifest.from_bytes(data).to_bytes() == data


@refusing(ManifestError)
def written_manifest(data: bytes) -> None:
    parse_toml(data.decode("utf-8", "replace"))


# --- payloads -----------------------------------------------------------------------------------------------------

ELEMENTS = 2_100
"""Number of elements: more than two blocks of the block-wise codecs, and half a chunk of topk's."""
SNAPSHOT = torch.linspace(-1.0, 1.0, ELEMENTS)


def codec_target(name: str) -> Target:
    """Return a target for a partner's message to this codec, of any length."""
    each = codec.get(name)
    terms = codec.CodecTerms(ELEMENTS)
    if isinstance(each, codec.ModularCodec):
        proposal = codec.proposal_for(each, codec.first_shape(each, SNAPSHOT), SNAPSHOT)
        terms = codec.agree(each, ELEMENTS, proposal, proposal)
    mine = each.encode(SNAPSHOT, terms)

    @refusing(RemoteError)
    def is_mixed(message: bytes) -> None:
        difference = each.difference(mine, message, terms)
        assert difference.shape == (ELEMENTS,)
        assert bool(torch.isfinite(difference).all())
        assert torch.equal(each.difference(message, mine, terms), -difference)

    def check(data: bytes) -> bool:
        # A fuzzer mostly makes other lengths, which one comparison rejects, so the length is corrected.
        is_mixed((data + mine[len(data) :])[: len(mine)])
        return is_mixed(data)

    return Target(check, (mine, each.encode(-SNAPSHOT, terms)), runs=20)


def proposals_target() -> Target:
    """Return a target for a partner's proposal to a modular codec, of any length."""
    each = codec.get("modular4")
    mine = codec.proposal_for(each, codec.first_shape(each, SNAPSHOT), SNAPSHOT)

    @refusing(RemoteError)
    def is_agreed(theirs: bytes) -> None:
        assert codec.agree(each, ELEMENTS, mine, theirs) == codec.agree(each, ELEMENTS, theirs, mine)

    def check(data: bytes) -> bool:
        is_agreed((data + mine[len(data) :])[: len(mine)])
        return is_agreed(data)

    return Target(check, (mine,), runs=5)


def targets() -> dict[str, Target]:
    """Return the targets of this module by name."""
    addresses = (PLACE, f"/dns4/a.example/tcp/80/p2p/{PEER}/p2p-circuit/p2p/{PEER}")
    digest = framing.encode_part_end(PartEnd(0, 1, payload.blake3(b"x").digest()))
    second = framing.encode_part_end(PartEnd(1, 1, payload.blake3(b"y").digest()))
    both = b"\0\0" + part(b"x") + frames((FrameKind.CHUNK, b"y"), (FrameKind.PART, second))
    return {
        "header": Target(header, (framing.encode_header(FrameKind.MESSAGE, 9),)),
        "stream_frames": Target(stream_frames, (frames((FrameKind.CHUNK, b"x" * 99), (FrameKind.CHUNK, b"x" * 9)),), 5),
        "part_end": Target(part_end, (digest,)),
        "message": Target(message, tuple(map(wire.encode_message, MESSAGES))),
        "presence": Target(presence, (RECORD, wire.encode_presence(KEEPER))),
        "payload": Target(received_payload, (both,), 5),
        "packed_address": Target(packed_address, tuple(map(address.packed, addresses))),
        "written_address": Target(written_address, tuple(each.encode() for each in addresses)),
        "join_link": Target(join_link, (str(JoinLink(RUN, (f"{PLACE}/p2p/{PEER}",))).encode(),)),
        "signed_manifest": Target(signed_manifest, (SIGNED.to_bytes(),), 5),
        "written_manifest": Target(written_manifest, (render_toml(MANIFEST).encode(),), 5),
        "proposals": proposals_target(),
        **{f"codec_{name}": codec_target(name) for name in codec.CODECS},
    }
