"""The wire format: our messages are decoded unchanged, and everything else is rejected."""

import contextlib
import math
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from p2ptrain import wire
from p2ptrain.base.errors import RemoteError
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.swarm.messages import (
    Accept,
    Acknowledge,
    Decline,
    DeclineReason,
    Offer,
    PeerState,
    Presence,
    Terms,
    WeightsReply,
    WeightsRequest,
)

few = settings(max_examples=50)

amounts = some.floats(min_value=0, allow_infinity=False, allow_nan=False)
counts = some.integers(0, wire.MAX_COUNT)
states = some.sampled_from(PeerState)
identifiers = some.text("0123456789abcdefXYZ", min_size=1, max_size=64)
addresses = some.lists(some.text("/ip4.0123456789tcp", min_size=1, max_size=60), max_size=4).map(tuple)
nicknames = some.text(max_size=32).filter(str.isprintable)
fragments = some.sets(some.integers(0, wire.MAX_FRAGMENT_INDEX), min_size=1, max_size=20).map(
    lambda s: tuple(sorted(s))
)
presences = some.builds(
    Presence,
    peer=identifiers,
    run=identifiers,
    addresses=addresses,
    state=states,
    step=counts,
    progress=amounts,
    settled=some.booleans(),
    nickname=nicknames,
    issued_at=amounts,
    lifetime_s=some.floats(1.0, 3600.0),
    signature=some.binary(max_size=64),
    since=amounts,
).map(lambda presence: replace(presence, keeps=((0, 3), (5, 5)) if presence.state is PeerState.KEEPING else ()))
known = some.lists(presences, max_size=3).map(tuple)
terms = some.builds(
    Terms,
    step=counts,
    progress=amounts,
    weight=some.floats(1e-6, 1e6),
    clip_radius=amounts | some.just(math.inf),
    settled=some.booleans(),
    state=states,
)
protocols = some.integers(0, 65535)
messages = some.one_of(
    some.builds(Offer, run=identifiers, protocol=protocols, fragments=fragments, terms=terms, known=known),
    some.builds(Accept, fragments=fragments, terms=terms, known=known),
    some.builds(
        Decline, reason=some.sampled_from(DeclineReason), state=states, step=counts, progress=amounts, known=known
    ),
    some.just(Acknowledge()),
    some.builds(WeightsRequest, run=identifiers, protocol=protocols, progress=amounts),
    some.builds(WeightsReply, step=counts, progress=amounts, known=known),
)

PRESENCE = Presence(
    peer=PeerId("12D3KooWpeer"),
    run=RunId("ab" * 32),
    addresses=("/ip4/203.0.113.7/tcp/31337",),
    state=PeerState.TRAINING,
    step=3,
    progress=1024.0,
    settled=True,
    nickname="amber fox",
    issued_at=1.7e9,
    lifetime_s=60.0,
    signature=b"s" * 64,
)
TERMS = Terms(step=1, progress=2.0, weight=1.0, clip_radius=math.inf, settled=True, state=PeerState.TRAINING)
OFFER = Offer(run=RunId("ab" * 32), protocol=1, fragments=(0, 2, 5), terms=TERMS, known=(PRESENCE,))


@few
@given(messages)
def test_a_message_comes_back_as_it_was(message):
    assert wire.decode_message(wire.encode_message(message)) == message


@few
@given(presences)
def test_a_presence_comes_back_as_it_was(presence):
    assert wire.decode_presence(wire.encode_presence(presence)) == presence


@few
@given(some.binary(max_size=300))
def test_any_bytes_are_a_message_or_a_remote_error(body):
    for decode in (wire.decode_message, wire.decode_presence):
        with contextlib.suppress(RemoteError):
            decode(body)


@few
@given(messages, some.data())
def test_a_damaged_message_is_a_message_or_a_remote_error(message, data):
    body = bytearray(wire.encode_message(message))
    position = data.draw(some.integers(0, len(body) - 1))
    body[position] = data.draw(some.integers(0, 255))
    with contextlib.suppress(RemoteError):
        wire.decode_message(bytes(body))


anything = some.recursive(
    some.none() | some.booleans() | some.integers(-(2**63), 2**64 - 1) | some.floats() | some.text() | some.binary(),
    lambda inner: some.lists(inner, max_size=8) | some.dictionaries(some.text(), inner, max_size=3),
    max_leaves=20,
)


@few
@given(some.integers(0, 7), anything)
def test_any_msgpack_is_a_message_or_a_remote_error(tag, fields):
    with contextlib.suppress(RemoteError):
        wire.decode_message(msgpack.packb([tag, fields]))


@few
@given(messages, some.integers(min_value=1))
def test_a_truncated_message_is_refused(message, cut):
    body = wire.encode_message(message)
    with pytest.raises(RemoteError):
        wire.decode_message(body[: -1 - cut % len(body)])
    with pytest.raises(RemoteError):
        wire.decode_message(body + b"\0")


@pytest.mark.parametrize(
    "changed",
    [
        {"step": -1},
        {"step": 2**53 + 1},
        {"progress": math.nan},
        {"progress": math.inf},
        {"progress": -1.0},
        {"weight": 0.0},
        {"weight": 2e6},
        {"weight": math.nan},
        {"clip_radius": math.nan},
        {"clip_radius": -1.0},
    ],
)
def test_terms_out_of_range_are_refused(changed):
    body = wire.encode_message(replace(OFFER, terms=replace(TERMS, **changed)))
    with pytest.raises(RemoteError):
        wire.decode_message(body)


@pytest.mark.parametrize(
    "changed",
    [
        {"fragments": ()},
        {"fragments": (1, 1)},
        {"fragments": (2, 1)},
        {"fragments": (70000,)},
        {"fragments": tuple(range(4097))},
        {"known": (PRESENCE,) * 17},
        {"run": RunId("")},
        {"run": RunId("a" * 65)},
        {"run": RunId("a\nb")},
        {"protocol": 65536},
    ],
)
def test_offers_out_of_range_are_refused(changed):
    body = wire.encode_message(replace(OFFER, **changed))
    with pytest.raises(RemoteError):
        wire.decode_message(body)


@pytest.mark.parametrize(
    "changed",
    [
        {"peer": PeerId("")},
        {"addresses": ("/ip4/1.2.3.4/tcp/1",) * 9},
        {"addresses": ("/" * 257,)},
        {"addresses": ("/ip4/1.2.3.4/tcp/1,/ip4/1.2.3.4/tcp/2",)},
        {"addresses": ("/ip4/1.2.3.4/tcp/1 ",)},
        {"nickname": "x" * 33},
        {"nickname": "\x1b[31mred"},
        {"nickname": "\u202eevil"},
        {"lifetime_s": 0.0},
        {"lifetime_s": 3601.0},
        {"issued_at": math.nan},
        {"signature": b"s" * 65},
    ],
)
def test_presences_out_of_range_are_refused(changed):
    with pytest.raises(RemoteError):
        wire.decode_message(wire.encode_message(replace(OFFER, known=(replace(PRESENCE, **changed),))))


def test_another_type_is_not_taken_for_a_number():
    tag, fields = msgpack.unpackb(wire.encode_message(WeightsRequest(RunId("a"), 1, 2.0)))
    for wrong in ([*fields[:2], 2], [*fields[:2], True], [fields[0], True, 2.0], [*fields, 0], fields[:2]):
        with pytest.raises(RemoteError):
            wire.decode_message(msgpack.packb([tag, wrong]))


def test_a_presence_over_the_cap_is_refused_by_both_sides():
    large = replace(PRESENCE, addresses=("/dns/" + "a" * 240,) * 8)
    with pytest.raises(ValueError, match="1000"):
        wire.encode_presence(large)
    with pytest.raises(RemoteError):
        wire.decode_presence(b"\0" * 1001)


def test_trimming_keeps_the_best_addresses_and_a_printable_nickname():
    places = tuple(f"/dns/{letter * 240}/tcp/1" for letter in "abcdefgh")
    large = replace(PRESENCE, addresses=places, nickname="\x1bamber\nfox" + "x" * 40, signature=b"")
    small = wire.trimmed(large)
    assert small.addresses == places[: len(small.addresses)]
    assert small.addresses
    assert small.nickname.startswith("amberfoxx")
    signed = replace(small, signature=b"s" * 64)
    assert wire.decode_presence(wire.encode_presence(signed)) == signed


def test_the_signed_bytes_cover_every_field_but_the_signature():
    changes = {
        "peer": PeerId("x"),
        "run": RunId("x"),
        "addresses": (),
        "state": PeerState.LEAVING,
        "step": 4,
        "progress": 1.0,
        "settled": False,
        "nickname": "",
        "issued_at": 1.0,
        "lifetime_s": 1.0,
        "since": 1.0,
    }
    originals = [wire.presence_bytes(replace(PRESENCE, **{name: value})) for name, value in changes.items()]
    assert len({wire.presence_bytes(PRESENCE), *originals}) == len(changes) + 1
    assert wire.presence_bytes(replace(PRESENCE, signature=b"")) == wire.presence_bytes(PRESENCE)
    assert len(changes) + 2 == len(Presence.__dataclass_fields__)
    assert wire.presence_bytes(KEEPER) != wire.presence_bytes(replace(KEEPER, keeps=((0, 4),)))


KEEPER = replace(PRESENCE, state=PeerState.KEEPING, keeps=((0, 3), (5, 5)))


def test_only_a_keepers_record_names_fragments():
    assert wire.decode_presence(wire.encode_presence(KEEPER)) == KEEPER
    for record in (replace(KEEPER, keeps=()), replace(PRESENCE, keeps=((0, 3),))):
        with pytest.raises(RemoteError):
            wire.decode_presence(wire.encode_presence(record))
    plain = msgpack.unpackb(wire.encode_presence(PRESENCE))
    assert len(plain) == len(Presence.__dataclass_fields__) - 1  # as before there were keepers


@pytest.mark.parametrize(
    "keeps",
    [
        [],
        [[0]],
        [[0, 1, 2]],
        [[3, 1]],
        [[0, 3], [4, 5]],  # one range
        [[5, 6], [0, 3]],
        [[0, 3], [2, 5]],
        [[0, wire.MAX_FRAGMENT_INDEX + 1]],
        [[-1, 2]],
        [[0, True]],
        [[0.0, 1.0]],
        [[2 * each, 2 * each] for each in range(9)],
        None,
        "0-3",
    ],
)
def test_fragments_that_no_keeper_writes_are_refused(keeps: object):
    fields = msgpack.unpackb(wire.encode_presence(KEEPER))
    with pytest.raises(RemoteError):
        wire.decode_presence(msgpack.packb([*fields[:-1], keeps]))


def test_a_keepers_record_fits_the_directory():
    places = tuple(f"/dns/{letter * 240}/tcp/1" for letter in "abcdefgh")
    ranges = tuple((65_000 + 3 * each, 65_001 + 3 * each) for each in range(8))
    large = wire.trimmed(replace(KEEPER, addresses=places, keeps=ranges, nickname="x" * 32, signature=b""))
    assert len(wire.encode_presence(replace(large, signature=b"s" * 64))) <= wire.MAX_PRESENCE_BYTES


def test_the_wire_format_is_frozen():
    """Check frozen bytes: changing them requires a new protocol version."""
    assert wire.encode_message(Acknowledge()).hex() == "920490"
    terms = (
        "9c01cb4000000000000000cb3ff0000000000000cb7ff0000000000000c3a8"
        + b"training".hex()
        + "01"
        + "cb"
        + "00" * 8
        + 2 * "cb7ff0000000000000"
        + "cb"
        + "00" * 8
        + "cb3ff0000000000000"
    )
    assert wire.encode_message(Accept((0, 3), TERMS)).hex() == "920293920003" + terms + "90"
