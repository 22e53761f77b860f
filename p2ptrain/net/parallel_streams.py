"""Lanes: several streams for one large payload, where one stream would leave a long fast line idle.

A stream of p2pd (yamux) begins with a window of 256 KiB, which grows only round trip by round trip, and an exchange
opens a new one. On a line of 100 Mbit/s with a round trip of 100 ms, 34 MB each way took 1.3 times as long over one
stream as over four, and over eight no less than over four (docs/RESULTS.md).

On the link of a conversation, before a payload of ``WIDE_FROM_BYTES`` or more, both sides at the same point::

    opener                          answerer
    ["lanes", token]    ->                       by LANE_PROTOCOL three more streams came before, with this token
    ["lanes", b""]      ->                       no more than this one

    on each of them:
    ["lane", token, number]  ->
                             <-  the same        it is held for the conversation that will name the token

Chunks are then dealt out to the lanes in turn, beginning with the link itself, and each lane carries its own as fast as
it can; the ends of parts, and all else that is said, go by the link (``net.payload``). Lanes are opened beside the
encoding. They go to partners that were measured to be fast: on a slow line four windows of bytes would be on their way
for seconds, before anything else that is to reach that partner.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.net.links import Limits, StreamLink
from p2ptrain.net.node import Node
from p2ptrain.net.payload import DirectLink
from p2ptrain.net.rpc import hear, say
from p2ptrain.net.throttle import Throttles
from p2ptrain.net.transport import P2PTransport
from p2ptrain.ports import Link
from p2ptrain.statements import is_blob, is_count

LANE_PROTOCOL = "/p2ptrain/lane/1"

LANES = 4
"""The link itself is one. Measured at 100 Mbit/s and 100 ms: with two an exchange was as fast in the mean and varied
more, with eight it was no faster."""
WIDE_FROM_BYTES = 2 << 20
"""Each way. Smaller payloads are over before a window has grown. A guess: eight first windows."""
WIDE_FROM_RATE = 2e6
"""Bytes per second that a partner's last large payload came with: four first windows are half a second of it."""
OPENING_S = 5.0
"""For all lanes together; then there is one. A guess: two round trips, and a busy machine at the other end."""
UNCLAIMED_S = 30.0
"""So long a lane may wait for its conversation. A guess: encoding takes part of it."""
LIMITS = Limits(inbound=24, inbound_per_peer=6)
"""Eight conversations with lanes at once, two of one peer."""
TOKEN_BYTES = 16
WORDS_BYTES = 64
"""The most that is said of lanes at once."""
MOST_REMEMBERED = 1024
"""Partners whose speed is remembered, those heard last."""


@dataclass(slots=True)
class _ParallelStream:
    """One that a partner opened: held until its conversation ends."""

    link: StreamLink
    patience: asyncio.Timeout
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def claim(self) -> None:
        """Its conversation has come."""
        self.patience.reschedule(None)


class ParallelStreams:
    """The lanes of one node, and how fast its partners were."""

    def __init__(self, node: Node, rates: Throttles | None = None) -> None:
        self._transport = P2PTransport(node, LANE_PROTOCOL, LIMITS, rates)
        self._waiting: dict[tuple[PeerId, bytes], dict[int, _ParallelStream]] = {}
        self._speeds: dict[PeerId, float] = {}
        """Bytes per second of the last large payload that came from each."""

    async def listen(self) -> None:
        """Take in others' lanes until ``close``. Raises NetworkError."""
        await self._transport.listen(self._take)

    async def close(self) -> None:
        await self._transport.close()

    def of(self, link: StreamLink, ours: bool) -> ParallelLink:
        """The same link, which can be widened.

        Args:
            ours: we opened it.
        """
        return ParallelLink(link, self, ours)

    def is_fast(self, peer: PeerId) -> bool:
        return self._speeds.get(peer, 0.0) >= WIDE_FROM_RATE

    def came(self, peer: PeerId, rate: float) -> None:
        """A large payload came from this peer, at so many bytes per second."""
        self._speeds.pop(peer, None)
        self._speeds[peer] = rate
        if len(self._speeds) > MOST_REMEMBERED:
            del self._speeds[next(iter(self._speeds))]

    async def open(self, peer: PeerId, token: bytes) -> list[StreamLink]:
        """All lanes but the first, each of which the other side holds; none where it does not work out."""
        opened: dict[int, StreamLink] = {}
        lanes = [self._open(peer, token, number, opened) for number in range(1, LANES)]
        opening = asyncio.gather(*lanes, return_exceptions=True)
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
        await say(link, purpose)
        if await hear(link, "a lane", WORDS_BYTES) != purpose:
            raise RemoteError("an echo was due of what a lane is for")

    def claim(self, peer: PeerId, token: bytes) -> list[_ParallelStream]:
        """What this peer opened under that token, all but the first, for one conversation.

        Raises NetworkError where some are missing: those that nobody named in time are given up, maybe just now.
        """
        waiting = self._waiting.get((peer, token), {})
        lanes = {number: lane for number, lane in waiting.items() if not lane.patience.expired()}
        if len(lanes) != LANES - 1:
            raise NetworkError(f"{short(peer)} names {LANES - 1} lanes, and {len(lanes)} are here")
        del self._waiting[peer, token]  # a second conversation would read what belongs to the first
        for lane in lanes.values():
            lane.claim()
        return [lanes[number] for number in sorted(lanes)]

    async def _take(self, link: StreamLink) -> None:
        """An inbound lane, until its conversation ends."""
        purpose = await hear(link, "a lane", WORDS_BYTES)
        match purpose:
            case ["lane", token, number] if is_blob(token, TOKEN_BYTES) and is_count(number, LANES - 1) and number:
                pass
            case _:
                raise RemoteError("what a lane is for was due")
        key = (link.peer, token)
        if number in self._waiting.get(key, {}):
            raise RemoteError(f"lane {number} of a conversation came twice")
        try:
            async with asyncio.timeout(UNCLAIMED_S) as patience:
                lane = _ParallelStream(link, patience)
                self._waiting.setdefault(key, {})[number] = lane
                try:
                    await say(link, purpose)
                    await lane.over.wait()
                finally:
                    self._forget(key, number, lane)
        except TimeoutError:
            raise NetworkError(f"{short(link.peer)} opened a lane and did not use it") from None

    def _forget(self, key: tuple[PeerId, bytes], number: int, lane: _ParallelStream) -> None:
        """It waits no more, if it still did."""
        waiting = self._waiting.get(key, {})
        if waiting.get(number) is lane:
            del waiting[number]
            if not waiting:
                del self._waiting[key]


class ParallelLink:
    """A conversation's link (``payload.WideLink``). Closing it ends its lanes too."""

    def __init__(self, link: StreamLink, lanes: ParallelStreams, ours: bool) -> None:
        self.peer = link.peer
        self._link = link
        self._lanes = lanes
        self._ours = ours
        self._opened: list[StreamLink] = []
        self._claimed: list[_ParallelStream] = []

    async def send(self, kind: int, body: bytes | memoryview) -> None:
        await self._link.send(kind, body)

    async def receive(self) -> tuple[int, bytes]:
        return await self._link.receive()

    async def begun(self) -> None:
        await self._link.begun()

    async def receive_into(self, buffer: memoryview) -> tuple[int, int]:
        return await self._link.receive_into(buffer)

    async def widened(self, size_bytes: int) -> Link:
        if size_bytes < WIDE_FROM_BYTES:
            return self
        others = await (self._offer() if self._ours else self._follow())
        return _OpenStreamGroup([self._link, *others], self._lanes)

    async def close(self) -> None:
        for lane in self._claimed:
            lane.over.set()
        await _close([*self._opened, self._link])

    async def _offer(self) -> Sequence[DirectLink]:
        token = secrets.token_bytes(TOKEN_BYTES)
        if self._lanes.is_fast(self.peer):
            self._opened = await self._lanes.open(self.peer, token)
        await say(self._link, ["lanes", token if self._opened else b""])
        return self._opened

    async def _follow(self) -> Sequence[DirectLink]:
        match await hear(self._link, "lanes", WORDS_BYTES):
            case ["lanes", b""]:
                return []
            case ["lanes", token] if is_blob(token, TOKEN_BYTES):
                self._claimed = self._lanes.claim(self.peer, token)
                return [lane.link for lane in self._claimed]
        raise RemoteError("how many lanes there are was due")


class _OpenStreamGroup:
    """What a large payload travels on (``payload.StreamGroup``). Its conversation's link ends it."""

    def __init__(self, lanes: Sequence[DirectLink], owner: ParallelStreams) -> None:
        self.peer = lanes[0].peer
        self.lanes = lanes
        self._owner = owner

    def came(self, size_bytes: int, seconds: float) -> None:
        self._owner.came(self.peer, size_bytes / max(seconds, 1e-9))

    async def send(self, kind: int, body: bytes | memoryview) -> None:
        await self.lanes[0].send(kind, body)

    async def receive(self) -> tuple[int, bytes]:
        return await self.lanes[0].receive()

    async def begun(self) -> None:
        await self.lanes[0].begun()  # it has the first chunk

    async def close(self) -> None:
        """That is the link's to do."""


async def _close(links: Iterable[Link]) -> None:
    for link in links:
        await link.close()
