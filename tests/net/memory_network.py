"""In-memory network for tests: links, transport and directory on timers of the running event loop.

A frame sent at time t arrives at exactly ``t + latency(sender, receiver)``, plus its size over ``bandwidth`` if one is
set, and never before an earlier frame. Opening and closing travel like frames: the listener's handler starts one
latency after ``open``, which returns at once. Sending never waits; the bytes in flight per direction are bounded. Tests
cause failures by ``fail`` (failing dials), ``cut`` (open links break at once on both sides with NetworkError, frames in
flight are lost) and ``MemoryDirectory.down``.

Simultaneous events keep the order of sending and nothing is random: under ``virtual_time`` tests are deterministic.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from p2ptrain import framing
from p2ptrain.base.errors import NetworkError, RemoteError, UnbegunError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.base.logging_setup import reporting
from p2ptrain.ports import Clock, Link
from p2ptrain.swarm.messages import Presence

logger = logging.getLogger(__name__)

Handler = Callable[[Link], Awaitable[None]]
Latency = Callable[[PeerId, PeerId], float]

CLOSED = "the other side closed the link"

MAX_UNDERWAY_BYTES = 256 << 20
"""Most bytes in flight in one direction of a link, twice the largest exchange in tests. Guess: their peak of bytes in
flight would settle it."""


class _Frame(NamedTuple):
    kind: int
    body: bytes


class _MemoryDirection:
    """One direction of a link: frames in flight and frames that arrived."""

    def __init__(self, delay: float, bandwidth: float | None) -> None:
        self._delay = delay
        self._bandwidth = bandwidth
        self._underway: deque[_Frame | None] = deque()  # None: the sender closed
        self._arrived: deque[_Frame] = deque()
        self._size = 0
        self._last_arrival = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self._has_payload = False  # part of it was read
        self.ended = ""
        """Reason why nothing more will arrive; empty while something may."""

    def put(self, frame: _Frame | None) -> None:
        """Send a frame, or None to close. Raises NetworkError when too many bytes are in flight."""
        size = len(frame.body) if frame else 0
        if self._size + size > MAX_UNDERWAY_BYTES:
            raise NetworkError("too many bytes are in flight")
        self._size += size
        self._underway.append(frame)
        self.after(self._arrive, size)

    def after(self, callback: Callable[[], None], size: int = 0) -> None:
        """Call back when ``size`` bytes sent now would have arrived."""
        loop = asyncio.get_running_loop()
        arrival = loop.time() + self._delay
        if self._bandwidth is not None:
            arrival += size / self._bandwidth
        self._last_arrival = max(self._last_arrival, arrival)
        loop.call_at(self._last_arrival, callback)

    async def wait_for_frame(self) -> None:
        """Wait until a whole frame has arrived; one reader at a time. Raises NetworkError at the end."""
        while not self._arrived:
            self.check()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._has_payload = self._has_payload or self._arrived[0].kind == framing.FrameKind.CHUNK

    async def get(self) -> _Frame:
        """Receive the next frame; one reader at a time. Raises NetworkError at the end."""
        await self.wait_for_frame()
        frame = self._arrived.popleft()
        self._size -= len(frame.body)
        return frame

    def check(self) -> None:
        """Raise NetworkError if nothing more will arrive."""
        if self.ended == CLOSED and not self._has_payload:
            raise UnbegunError(self.ended)
        if self.ended:
            raise NetworkError(self.ended)

    def end(self, why: str) -> None:
        """Drop the frames in flight and all later ones; frames that arrived can still be read."""
        self.ended = self.ended or why
        self._underway.clear()
        self._wake()

    def _arrive(self) -> None:
        if self.ended:
            return
        frame = self._underway.popleft()
        if frame is None:
            self.end(CLOSED)
            return
        self._arrived.append(frame)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class MemoryLink(Link):
    """One end of an in-memory link."""

    def __init__(self, peer: PeerId, outgoing: _MemoryDirection, incoming: _MemoryDirection) -> None:
        self.peer = peer
        self._outgoing = outgoing
        self._incoming = incoming
        self._closed = False

    async def send(self, kind: int, body: bytes | memoryview) -> None:
        frame = _Frame(kind, bytes(body))
        framing.decode_header(framing.encode_header(kind, len(frame.body)))
        self._incoming.check()
        if self._closed:
            raise NetworkError("we closed the link")
        self._outgoing.put(frame)

    async def receive(self) -> tuple[int, bytes]:
        return await self._incoming.get()

    async def wait_for_frame(self) -> None:
        await self._incoming.wait_for_frame()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._incoming.end("we closed the link")
        if not self._outgoing.ended:
            self._outgoing.put(None)

    def cut(self) -> None:
        """Break both directions now."""
        self._incoming.end("the link was cut")
        self._outgoing.end("the link was cut")


class MemoryNetwork:
    """Peers of a test, their links and their directory.

    Args:
        latency: seconds from one peer to another; a number if equal for all.
        bandwidth: bytes per second and link direction; None: unlimited.
        fail: returns whether a dial (from, to) raises NetworkError.
    """

    def __init__(
        self,
        latency: Latency | float = 0.0,
        bandwidth: float | None = None,
        fail: Callable[[PeerId, PeerId], bool] = lambda dialer, dialed: False,
    ) -> None:
        self.latency: Latency = latency if callable(latency) else lambda sender, receiver: latency
        self.bandwidth = bandwidth
        self.fail = fail
        self.records: dict[PeerId, Presence] = {}
        self.finished: dict[PeerId, Presence] = {}
        self._listeners: dict[PeerId, MemoryTransport] = {}
        self._links: dict[MemoryLink, tuple[PeerId, PeerId]] = {}

    def transport(self, peer: PeerId) -> MemoryTransport:
        return MemoryTransport(self, peer)

    def directory(self, latency: float = 0.0, clock: Clock | None = None) -> MemoryDirectory:
        return MemoryDirectory(self, latency, clock)

    def cut(self, one: PeerId, other: PeerId | None = None) -> None:
        """Break the links between two peers, or all of one peer's."""
        for link, ends in list(self._links.items()):
            if one in ends and (other is None or other in ends):
                link.cut()

    def connect(self, dialer: PeerId, dialed: PeerId) -> MemoryLink:
        """Open a link and return the dialer's end; the other end reaches the listener's handler one latency later."""
        listener = self._listeners.get(dialed)
        if listener is None or self.fail(dialer, dialed):
            raise NetworkError(f"could not dial {short(dialed)}")
        forth = _MemoryDirection(self.latency(dialer, dialed), self.bandwidth)
        back = _MemoryDirection(self.latency(dialed, dialer), self.bandwidth)
        near = MemoryLink(dialed, outgoing=forth, incoming=back)
        far = MemoryLink(dialer, outgoing=back, incoming=forth)
        self._links = {link: ends for link, ends in self._links.items() if not link._closed}
        self._links[near] = (dialer, dialed)
        forth.after(lambda: listener.take(far))
        return near


class MemoryTransport:
    """One peer's transport in memory (``ports.Transport``).

    Owns the tasks of its inbound links; ``close`` ends them. A handler's NetworkError or RemoteError ends its link; any
    other exception is a bug and goes to the loop's exception handler.
    """

    def __init__(self, network: MemoryNetwork, peer: PeerId) -> None:
        self._network = network
        self._peer = peer
        self._handler: Handler | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, peer: PeerId, addresses: Sequence[str] = ()) -> MemoryLink:
        return self._network.connect(self._peer, peer)

    async def listen(self, handler: Handler) -> None:
        self._handler = handler
        self._network._listeners[self._peer] = self

    def take(self, link: MemoryLink) -> None:
        """Start the handler for an inbound link."""
        if self._handler is None:
            link.cut()
            return
        task = asyncio.get_running_loop().create_task(self._serve(self._handler, link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(reporting("the handler of an inbound link"))

    async def close(self) -> None:
        """Break all links, as when a process is killed."""
        self._handler = None
        self._network._listeners.pop(self._peer, None)
        self._network.cut(self._peer)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _serve(self, handler: Handler, link: MemoryLink) -> None:
        try:
            await handler(link)
        except (NetworkError, RemoteError) as error:
            logger.info("link from %s ended: %s", short(link.peer), error)
        finally:
            await link.close()


class MemoryDirectory:
    """Directory in memory (``ports.Directory``): stores at once and answers after one latency.

    A lookup returns the unexpired records at the time of its answer, ordered by peer id.
    """

    def __init__(self, network: MemoryNetwork, latency: float = 0.0, clock: Clock | None = None) -> None:
        self._network = network
        self._latency = latency
        self._clock = clock
        self.down = False
        """While True, announcements and lookups raise NetworkError."""

    @property
    def size(self) -> int:
        return len(self._network.records)

    async def announce(self, presence: Presence) -> None:
        if self.down:
            raise NetworkError("the directory is down")
        self._network.records[presence.peer] = presence

    async def lookup(self) -> list[Presence]:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._latency)
        if self.down:
            raise NetworkError("the directory is down")
        now = (self._clock or loop.time)()
        alive = (record for record in self._network.records.values() if record.issued_at + record.lifetime_s > now)
        return sorted(alive, key=lambda record: record.peer)

    async def keep_finished(self, presence: Presence) -> None:
        if self.down:
            raise NetworkError("the directory is down")
        self._network.finished[presence.peer] = presence

    async def finished(self) -> list[Presence]:
        await asyncio.sleep(self._latency)
        return list(self._network.finished.values())
