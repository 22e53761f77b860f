"""A peer that is away declines every request."""

from __future__ import annotations

import asyncio

import pytest
import virtual_time
from memory_network import MemoryNetwork

from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PROTOCOL_VERSION, PeerId
from p2ptrain.framing import FrameKind
from p2ptrain.net.session import decline_while_away
from p2ptrain.ports import Link
from p2ptrain.swarm import DeclineReason, Offer, PeerState, Terms
from p2ptrain.swarm.messages import Acknowledge, Decline, Message, WeightsRequest
from p2ptrain.wire import decode_message, encode_message

AWAY, CALLER = PeerId("away"), PeerId("caller")
OFFER = Offer("ab" * 32, PROTOCOL_VERSION, (0,), Terms(1, 4.0, 1.0, float("inf"), True, PeerState.TRAINING))


def calling(*frames: tuple[int, bytes]) -> tuple[list[Message], list[Exception]]:
    """Return the answers to these frames until the link ends, and the errors of the handler."""
    raised: list[Exception] = []

    async def handler(link: Link) -> None:
        try:
            await decline_while_away(link, 7, 70.0)
        except Exception as error:
            raised.append(error)

    async def main() -> list[Message]:
        network = MemoryNetwork(0.01)
        await network.transport(AWAY).listen(handler)
        link = await network.transport(CALLER).open(AWAY)
        for kind, body in frames:
            await link.send(kind, body)
        told = []
        try:
            while True:
                told.append(decode_message((await link.receive())[1]))
        except NetworkError:
            return told

    async def bounded() -> list[Message]:
        async with asyncio.timeout(60):
            return await main()

    return virtual_time.run(bounded()), raised


@pytest.mark.parametrize("message", [OFFER, WeightsRequest("ab" * 32, PROTOCOL_VERSION, 1.0, 0.0)])
def test_offers_and_requests_are_declined_by_a_peer_that_is_leaving(message: Message) -> None:
    told, raised = calling((FrameKind.MESSAGE, encode_message(message)))
    assert told == [Decline(DeclineReason.LEAVING, PeerState.LEAVING, 7, 70.0, known=())]
    assert raised == []


def test_anything_else_and_silence_just_end() -> None:
    assert calling((FrameKind.MESSAGE, encode_message(Acknowledge()))) == ([], [])
    assert calling((FrameKind.CHUNK, b"x")) == ([], [])
    assert calling() == ([], [])
    for body in (b"nonsense", b"\x91" * 1000 + b"\xc0"):
        told, raised = calling((FrameKind.MESSAGE, body))
        assert told == []
        assert [type(error) for error in raised] == [RemoteError]
