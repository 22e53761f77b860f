"""How the payload of an exchange begins, and how it ends early. In virtual time, over streams in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2ptrain.base.errors import NetworkError, UnbegunError
from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.framing import MAX_CHUNK_BYTES, FrameKind
from p2ptrain.net import virtual_time
from p2ptrain.net.memory import MemoryLink, _MemoryDirection
from p2ptrain.net.payload import Buffers
from p2ptrain.net.session import Session, SessionEnvironment
from p2ptrain.ports import Link
from p2ptrain.swarm.events import Swap
from p2ptrain.train.payloads import Payloads

OPENER, ANSWERER = PeerId("opener"), PeerId("answerer")
CHUNK = bytes(MAX_CHUNK_BYTES)
NOTHING = cast(Any, None)


class Plain:
    """Two chunks of a codec without wishes (``train.payloads.Payloads``)."""

    published = None

    def wish_sizes(self, fragments: object) -> list[int]:
        return []

    def encoded_sizes(self, fragments: object) -> list[int]:
        return [2 * len(CHUNK)]

    def encode(self, *question: object) -> Any:
        return SimpleNamespace(parts=[CHUNK + CHUNK])


class TwoStreams(MemoryLink):
    """A link with a second stream: a payload's first chunk uses the one, its second the other."""

    def __init__(self, first: MemoryLink, second: MemoryLink) -> None:
        super().__init__(first.peer, first._outgoing, first._incoming)
        self._second = second

    async def open_parallel(self, size_bytes: int) -> Sequence[Link]:
        return (self._second,)

    def record_transfer(self, size_bytes: int, seconds: float) -> None:
        raise AssertionError("no payload is complete here")


def stream() -> tuple[MemoryLink, MemoryLink]:
    """The opener's end, and the answerer's."""
    forth, back = _MemoryDirection(0.1, None), _MemoryDirection(0.1, None)
    return MemoryLink(ANSWERER, outgoing=forth, incoming=back), MemoryLink(OPENER, outgoing=back, incoming=forth)


async def work(function: Any, *arguments: object) -> Any:
    return function(*arguments)


async def answer(link: TwoStreams) -> None:
    """We have accepted an offer: exchange."""
    payloads = cast(Payloads, Plain())
    session = Session(
        LinkId(OPENER, 1, outbound=False),
        SessionEnvironment(payloads, Buffers(), work, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING),
    )
    await session._swap(link, Swap(session.link, (0,), NOTHING, NOTHING))


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
    """Not by ending a stream that had none of it yet, either: who does that lets us down like any other."""

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
