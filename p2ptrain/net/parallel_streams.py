"""Parallel streams: several streams for one large payload, for links with a large bandwidth-delay product.

A stream of p2pd (yamux) begins with a window of 256 KiB that grows only round trip by round trip, and each exchange
opens a new stream. ``docs/PROTOCOL.md`` ("lanes") has the messages, ``docs/results/FIGURES.md`` the measurements.

Before a large payload both sides agree on the streams. Chunks are distributed to them in turn, beginning with the link
itself; the ends of parts and all other messages use the link (``net.payload``). The streams are opened while the
payload is encoded, and only to partners that were measured to be fast: on a slow connection four windows would delay
all other traffic to that partner by seconds.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.net.links import Limits, StreamLink
from p2ptrain.net.node import Node
from p2ptrain.net.rpc import receive_message, send_message
from p2ptrain.net.throttle import Throttles
from p2ptrain.net.transport import P2PTransport
from p2ptrain.ports import Link
from p2ptrain.statements import is_blob, is_count

LANE_PROTOCOL = "/p2ptrain/lane/1"

STREAMS = 4
"""Streams per payload, the link included. Measured at 100 Mbit/s and 100 ms: two had the same mean and more variance,
eight were no faster."""
PARALLEL_FROM_BYTES = 2 << 20
"""Least payload in bytes each way, eight initial windows; smaller ones end before a window has grown. Guess: exchange
times by payload size would settle it."""
PARALLEL_FROM_RATE = 2e6
"""Least rate of a partner's last large payload in bytes per second; four initial windows take half a second at it."""
OPENING_S = 5.0
"""Timeout to open all streams, after which the link carries the payload alone; two round trips and a busy remote.
Guess: opening times between real homes would settle it."""
UNCLAIMED_S = 30.0
"""Longest time that a stream waits for its conversation, including the encoding. Guess: encoding times on slow machines
would settle it."""
LIMITS = Limits(inbound=24, inbound_per_peer=6)
"""Enough for eight conversations with parallel streams at once, two of one peer."""
TOKEN_BYTES = 16
"""Length of the random token that names a conversation."""
WORDS_BYTES = 64
"""Longest message about parallel streams."""
MAX_REMEMBERED = 1024
"""Most partners whose rate is remembered, the latest ones."""


@dataclass(slots=True)
class _ParallelStream:
    """Inbound parallel stream, held until its conversation ends."""

    link: StreamLink
    patience: asyncio.Timeout
    over: asyncio.Event = field(default_factory=asyncio.Event)


class ParallelStreams:
    """Parallel streams of one node, and the measured rates of its partners."""

    def __init__(self, node: Node, rates: Throttles | None = None) -> None:
        self._transport = P2PTransport(node, LANE_PROTOCOL, LIMITS, rates)
        self._waiting: dict[tuple[PeerId, bytes], dict[int, _ParallelStream]] = {}
        self._speeds: BoundedDict[PeerId, float] = BoundedDict(MAX_REMEMBERED)
        """Bytes per second of each partner's last large payload."""

    async def listen(self) -> None:
        """Accept inbound streams until ``close``. Raises NetworkError."""
        await self._transport.listen(self._take)

    async def close(self) -> None:
        await self._transport.close()

    def of(self, link: StreamLink, ours: bool) -> ParallelLink:
        """Wrap a link so that it can use parallel streams.

        Args:
            ours: whether we opened it.
        """
        return ParallelLink(link, self, ours)

    def is_fast(self, peer: PeerId) -> bool:
        return self._speeds.get(peer, 0.0) >= PARALLEL_FROM_RATE

    def record_rate(self, peer: PeerId, rate: float) -> None:
        """Record the rate in bytes per second of a large payload from this peer."""
        self._speeds[peer] = rate

    async def open(self, peer: PeerId, token: bytes) -> list[StreamLink]:
        """Open all streams but the first and return them; empty if any of them fails."""
        opened: dict[int, StreamLink] = {}
        streams = [self._open(peer, token, number, opened) for number in range(1, STREAMS)]
        opening = asyncio.gather(*streams, return_exceptions=True)
        try:
            async with asyncio.timeout(OPENING_S):
                failures = [each for each in await opening if each is not None]
        except BaseException as error:
            await _close(opened.values())
            if isinstance(error, TimeoutError):
                return []
            raise
        if not failures:
            return [opened[number] for number in sorted(opened)]
        await _close(opened.values())
        for failure in failures:
            if not isinstance(failure, NetworkError | RemoteError):
                raise failure
        return []

    async def _open(self, peer: PeerId, token: bytes, number: int, opened: dict[int, StreamLink]) -> None:
        link = await self._transport.open(peer)
        opened[number] = link
        purpose = ["lane", token, number]
        await send_message(link, purpose)
        if await receive_message(link, "a parallel stream", WORDS_BYTES) != purpose:
            raise RemoteError("expected an echo of the purpose of a parallel stream, got something else")

    def claim(self, peer: PeerId, token: bytes) -> list[_ParallelStream]:
        """Return the inbound streams with this token, all but the first, for one conversation.

        Raises NetworkError if some are missing, for example because they have just timed out.
        """
        waiting = self._waiting.get((peer, token), {})
        streams = {number: stream for number, stream in waiting.items() if not stream.patience.expired()}
        if len(streams) != STREAMS - 1:
            raise NetworkError(f"{short(peer)} announced {STREAMS - 1} parallel streams, but {len(streams)} are open")
        del self._waiting[peer, token]  # a second conversation would read the first one's data
        for stream in streams.values():
            stream.patience.reschedule(None)
        return [streams[number] for number in sorted(streams)]

    async def _take(self, link: StreamLink) -> None:
        purpose = await receive_message(link, "a parallel stream", WORDS_BYTES)
        match purpose:
            case ["lane", token, number] if is_blob(token, TOKEN_BYTES) and is_count(number, STREAMS - 1) and number:
                pass
            case _:
                raise RemoteError("expected the purpose of a parallel stream, got something else")
        key = (link.peer, token)
        if number in self._waiting.get(key, {}):
            raise RemoteError(f"parallel stream {number} of a conversation was opened twice")
        try:
            async with asyncio.timeout(UNCLAIMED_S) as patience:
                stream = _ParallelStream(link, patience)
                self._waiting.setdefault(key, {})[number] = stream
                try:
                    await send_message(link, purpose)
                    await stream.over.wait()
                finally:
                    self._forget(key, number, stream)
        except TimeoutError:
            raise NetworkError(f"{short(link.peer)} opened a parallel stream and did not use it") from None

    def _forget(self, key: tuple[PeerId, bytes], number: int, stream: _ParallelStream) -> None:
        waiting = self._waiting.get(key, {})
        if waiting.get(number) is stream:
            del waiting[number]
            if not waiting:
                del self._waiting[key]


class ParallelLink(Link):
    """Link of a conversation that can add parallel streams."""

    def __init__(self, link: StreamLink, owner: ParallelStreams, ours: bool) -> None:
        self.peer = link.peer
        self._link = link
        self._owner = owner
        self._ours = ours
        self._is_large = False  # a payload whose rate counts
        self._opened: list[StreamLink] = []
        self._claimed: list[_ParallelStream] = []

    async def send(self, kind: int, body: bytes | memoryview) -> None:
        await self._link.send(kind, body)

    async def receive(self) -> tuple[int, bytes]:
        return await self._link.receive()

    async def wait_for_frame(self) -> None:
        await self._link.wait_for_frame()

    async def receive_into(self, buffer: memoryview) -> tuple[int, int]:
        return await self._link.receive_into(buffer)

    async def open_parallel(self, size_bytes: int) -> Sequence[Link]:
        self._is_large = size_bytes >= PARALLEL_FROM_BYTES
        if not self._is_large:
            return ()
        return await (self._offer() if self._ours else self._follow())

    def record_transfer(self, size_bytes: int, seconds: float) -> None:
        if self._is_large:
            self._owner.record_rate(self.peer, size_bytes / max(seconds, 1e-9))

    async def close(self) -> None:
        for stream in self._claimed:
            stream.over.set()
        await _close([*self._opened, self._link])

    async def _offer(self) -> Sequence[Link]:
        token = secrets.token_bytes(TOKEN_BYTES)
        if self._owner.is_fast(self.peer):
            self._opened = await self._owner.open(self.peer, token)
        await send_message(self._link, ["lanes", token if self._opened else b""])
        return self._opened

    async def _follow(self) -> Sequence[Link]:
        match await receive_message(self._link, "parallel streams", WORDS_BYTES):
            case ["lanes", b""]:
                return []
            case ["lanes", token] if is_blob(token, TOKEN_BYTES):
                self._claimed = self._owner.claim(self.peer, token)
                return [stream.link for stream in self._claimed]
        raise RemoteError("expected the number of parallel streams, got something else")


async def _close(links: Iterable[Link]) -> None:
    for link in links:
        await link.close()
