"""The simulator counts the bytes of the wire format."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from p2ptrain import framing, wire
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.net.payload import send_payload
from p2ptrain.ports import Link
from p2ptrain.swarm import DeclineReason, PeerState, Presence, Terms
from p2ptrain.swarm.messages import Accept, Acknowledge, Decline, Offer, WeightsReply, WeightsRequest
from sim.sizes import message_bytes, payload_bytes, presence_bytes

RUN = RunId("ab" * 32)
counts = st.one_of(st.integers(0, 200), st.integers(0, 70_000), st.integers(0, 2**40))
amounts = st.floats(0, 1e15)
states = st.sampled_from(PeerState)
protocols = st.integers(0, 2**16 - 1)
fragments = st.sets(st.integers(0, 2**16 - 1), min_size=1, max_size=40).map(lambda each: tuple(sorted(each)))
presences = st.builds(
    Presence,
    peer=st.integers(1, 64).map(lambda length: PeerId("p" * length)),
    run=st.just(RUN),
    addresses=st.lists(st.integers(1, 256).map(lambda length: "a" * length), max_size=3).map(tuple),
    state=states,
    step=counts,
    progress=amounts,
    settled=st.booleans(),
    nickname=st.sampled_from(["", "Ada", "Zoë", "n" * 32]),
    issued_at=amounts,
    lifetime_s=st.floats(1.0, 3600.0),
    signature=st.sampled_from([b"", bytes(64)]),
    since=amounts,
).map(wire.trimmed)  # a peer trims its presence before it signs it
known = st.lists(presences, max_size=15).map(tuple)
terms = st.builds(
    Terms,
    step=counts,
    progress=amounts,
    weight=st.floats(1e-3, 1e6),
    clip_radius=st.floats(0, 10),
    settled=st.booleans(),
    state=states,
    partners=st.integers(1, 64),
)
messages = st.one_of(
    st.builds(
        Offer,
        run=st.just(RUN),
        protocol=protocols,
        fragments=fragments,
        terms=terms,
        round=counts,
        known=known,
    ),
    st.builds(Accept, fragments=fragments, terms=terms, known=known),
    st.builds(Decline, reason=st.sampled_from(DeclineReason), state=states, step=counts, progress=amounts, known=known),
    st.builds(WeightsReply, step=counts, progress=amounts, known=known),
    st.builds(WeightsRequest, run=st.just(RUN), protocol=protocols, progress=amounts),
    st.just(Acknowledge()),
)


@given(messages)
def test_messages_are_as_long_as_their_frames(message):
    assert message_bytes(message) == framing.HEADER_BYTES + len(wire.encode_message(message))


@given(presences)
def test_presence_records_are_as_long_as_they_are_stored(presence):
    assert presence_bytes(presence) == len(wire.encode_presence(presence))


class CountingLink(Link):
    """A link that counts the bytes sent."""

    def __init__(self) -> None:
        self.bytes = 0

    async def receive(self) -> tuple[int, bytes]:
        raise AssertionError("this link only sends")

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""

    async def send(self, kind: int, body: bytes | memoryview) -> None:
        self.bytes += framing.HEADER_BYTES + len(body)


def test_payloads_are_as_long_as_what_is_sent():
    lengths = [
        1,
        framing.MAX_CHUNK_BYTES - 1,
        framing.MAX_CHUNK_BYTES,
        framing.MAX_CHUNK_BYTES + 1,
        3 * framing.MAX_CHUNK_BYTES + 7,
    ]
    link = CountingLink()
    asyncio.run(send_payload(link, [bytes(length) for length in lengths]))
    assert payload_bytes(lengths) == link.bytes
