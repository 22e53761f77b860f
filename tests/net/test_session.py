"""Start and early end of an exchange's payload. In virtual time, over streams in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import virtual_time
from memory_network import MemoryLink, _MemoryDirection

from p2ptrain.base.errors import NetworkError, UnbegunError
from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.framing import MAX_CHUNK_BYTES, FrameKind
from p2ptrain.net.session import Session, SessionEnvironment
from p2ptrain.ports import LearnerPayloads, Link
from p2ptrain.swarm.events import Swap

OPENER, ANSWERER = PeerId("opener"), PeerId("answerer")
CHUNK = bytes(MAX_CHUNK_BYTES)
NOTHING = cast(Any, None)


class Plain:
    """Payloads of two chunks, as of a codec without proposals (``host.payloads.Payloads``)."""

    def current(self, fragments: object) -> None:
        return None

    def proposal_sizes(self, fragments: object) -> list[int]:
        return []

    def encoded_sizes(self, fragments: object) -> list[int]:
        return [2 * len(CHUNK)]

    def encode(self, *question: object) -> Any:
        return SimpleNamespace(parts=[CHUNK + CHUNK])


class TwoStreams(MemoryLink):
    """A link with a second stream, which carries a payload's second chunk."""

    def __init__(self, first: MemoryLink, second: MemoryLink) -> None:
        super().__init__(first.peer, first._outgoing, first._incoming)
        self._second = second

    async def open_parallel(self, size_bytes: int) -> Sequence[Link]:
        return (self._second,)

    def record_transfer(self, size_bytes: int, seconds: float) -> None:
        raise AssertionError("no payload is complete here")


def stream() -> tuple[MemoryLink, MemoryLink]:
    """Return the initiator's end and the responder's end."""
    forth, back = _MemoryDirection(0.1, None), _MemoryDirection(0.1, None)
    return MemoryLink(ANSWERER, outgoing=forth, incoming=back), MemoryLink(OPENER, outgoing=back, incoming=forth)


async def work(function: Any, *arguments: object) -> Any:
    return function(*arguments)


async def answer(link: TwoStreams) -> None:
    """Exchange as a responder that has accepted an offer."""
    payloads = cast(LearnerPayloads, Plain())
    session = Session(
        LinkId(OPENER, 1, outbound=False),
        SessionEnvironment(payloads, work, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING),
    )
    await session._swap(link, Swap(session.link, (0,)))


def test_an_offer_that_is_taken_back_costs_no_byte_of_payload() -> None:
    async def main() -> None:
        (first, ours), (_, ours_too) = stream(), stream()
        answering = asyncio.create_task(answer(TwoStreams(ours, ours_too)))
        await asyncio.sleep(1.0)
        await first.close()
        with pytest.raises(UnbegunError):
            await answering
        for end in ours, ours_too:
            assert not end._outgoing._size

    virtual_time.run(main())


def test_an_offer_is_not_taken_back_amid_its_payload() -> None:
    """Check that closing a stream on which no payload has come is a failure too if the other stream had some."""

    async def main() -> None:
        (first, ours), (second, ours_too) = stream(), stream()
        answering = asyncio.create_task(answer(TwoStreams(ours, ours_too)))
        await first.send(FrameKind.CHUNK, CHUNK)
        assert await first.receive() == (FrameKind.CHUNK, CHUNK)
        assert await second.receive() == (FrameKind.CHUNK, CHUNK)
        await second.close()
        with pytest.raises(NetworkError) as caught:
            await answering
        assert not isinstance(caught.value, UnbegunError)

    virtual_time.run(main())
