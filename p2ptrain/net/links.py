"""``ports.Link`` and ``ports.Transport`` over p2pd's binary streams.

What goes wrong with such streams, and what becomes of it here:

==============================================  ========================================================================
the remote is killed, its stream ends cleanly   NetworkError at the next receive: only a whole frame counts
the remote is frozen                            NetworkError when the frame's deadline passes
the remote drips bytes                          the same: a frame's deadline grows with its size at ``slowest_rate``
our p2pd is killed                              NetworkError: resets, and a check of the child before each dial
garbage, an oversized frame                     RemoteError before a byte of its body is read
a flood of inbound streams                      closed unread beyond the caps and rates, overall, per peer and origin
silent streams that hold all places             the oldest ends where another needs its place
==============================================  ========================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from p2ptrain import framing
from p2ptrain.errors import NetworkError, RemoteError
from p2ptrain.framing import FrameKind
from p2ptrain.ids import PROTOCOL_VERSION, PeerId, short
from p2ptrain.net import address
from p2ptrain.net.allowance import origin
from p2ptrain.net.control import FarEnd, read_opener
from p2ptrain.net.node import Node
from p2ptrain.net.rate_limiter import PER_ORIGIN, RateLimiter
from p2ptrain.net.rates import SMALL_BYTES, Rates
from p2ptrain.net.streams import Stream
from p2ptrain.ports import Link

logger = logging.getLogger(__name__)

EXCHANGE_PROTOCOL = f"/p2ptrain/exchange/{PROTOCOL_VERSION}"

MOST_NAMELESS = 32
"""Inbound streams beyond all places of which p2pd has yet to say who opened them, or that are about to end. It says so
at once. A guess."""

Handler = Callable[["StreamLink"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Limits:
    """How patient a transport is, and how much it lets in. All are guesses."""

    idle_s: float = 20.0
    """A frame must begin this soon, and a frame that we send must be taken this soon."""
    slowest_rate: float = 4096.0
    """Bytes per second below which a stream counts as dead: a full chunk may take 64 s more."""
    dial_s: float = 20.0
    """Connecting, with its retries over a peer's addresses, and opening the stream."""
    inbound: int = 32
    inbound_per_peer: int = 4

    @property
    def inbound_per_origin(self) -> int:
        """Of one IP address, or through one relay: half, since names cost nothing. Who is behind relays has two."""
        return self.inbound // 2

    def frame_s(self, length: int) -> float:
        """How long a frame may take."""
        return self.idle_s + length / self.slowest_rate


class StreamLink:
    """One stream (``ports.Link``). A deadline that passes, a reset or a malformed frame closes it.

    Chunks of payload, other frames that are not small, and small ones beyond their share wait for their turn where the
    owner caps the rate; the partner is given that time on top. A buffer given to ``send`` must not change afterwards:
    the event loop may still hold it.

    Args:
        is_gift: what passes is for the other side's sake alone.
    """

    def __init__(self, far_end: FarEnd, stream: Stream, limits: Limits, rates: Rates, is_gift: bool = False) -> None:
        self.far_end = far_end
        self.peer = far_end.peer
        self._stream = stream
        self._limits = limits
        self._rates = rates
        self._is_gift = is_gift
        self._closed = False
        self.has_heard = False
        """A whole frame has come."""

    async def send(self, kind: int, body: bytes | memoryview) -> None:
        header, line = framing.encode_header(kind, len(body)), self._rates.up
        line.book(len(header))
        self._count(len(header) + len(body))
        book = line.book_small if _is_small(kind, len(body)) else line.book
        for piece in line.pieces(memoryview(body)):
            await line.wait(book(len(piece)), len(piece))
            await self._write(header, piece)
            header = b""

    async def _write(self, header: bytes, body: bytes | memoryview) -> None:
        if self._closed or self._stream.is_closing:
            raise NetworkError("the link is closed")
        try:
            async with asyncio.timeout(self._limits.frame_s(len(body))):
                await self._stream.write(header, body)
        except TimeoutError:
            self._abort()
            raise NetworkError(f"{short(self.peer)} took nothing for too long") from None
        except (OSError, EOFError) as error:
            self._abort()
            raise NetworkError(f"the stream to {short(self.peer)} broke: {error}") from error

    async def receive(self) -> tuple[int, bytes]:
        async with self._receiving() as deadline:
            kind, length = await self._receive_header(deadline)
            body = bytearray(length)
            await self._receive_body(kind, memoryview(body), deadline)
            self.has_heard = True
            return kind, bytes(body)

    async def receive_into(self, buffer: memoryview) -> tuple[int, int]:
        """``payload.DirectLink``: a frame's body received where it is wanted, without a copy."""
        async with self._receiving() as deadline:
            kind, length = await self._receive_header(deadline)
            if length > len(buffer):
                raise RemoteError(f"a frame of {length} bytes where {len(buffer)} were due")
            await self._receive_body(kind, buffer[:length], deadline)
            self.has_heard = True
            return kind, length

    async def _receive_header(self, deadline: asyncio.Timeout) -> tuple[int, int]:
        kind, length = framing.decode_header(await self._stream.read_exactly(framing.HEADER_BYTES))
        deadline.reschedule(asyncio.get_running_loop().time() + self._limits.frame_s(length))
        self._rates.down.book(framing.HEADER_BYTES)
        self._count(framing.HEADER_BYTES)
        return kind, length

    async def _receive_body(self, kind: int, body: memoryview, deadline: asyncio.Timeout) -> None:
        """What is not read yet waits at the sender: back-pressure reaches it through both p2pds. What does not come
        is not counted, whatever its header said."""
        line = self._rates.down
        book = line.book_small if _is_small(kind, len(body)) else line.book
        for piece in line.pieces(body):
            if (wait_s := book(len(piece))) > 0:
                deadline.reschedule((deadline.when() or 0.0) + wait_s)
                await line.wait(wait_s, len(piece))
            try:
                await self._stream.read_into(piece)
            except BaseException:
                line.take_back(self._stream.lacking)
                self._count(len(piece) - self._stream.lacking)
                raise
            self._count(len(piece))

    @contextlib.asynccontextmanager
    async def _receiving(self) -> AsyncIterator[asyncio.Timeout]:
        """A frame must begin within the deadline; whatever goes wrong closes the link and gets its name."""
        if self._closed:
            raise NetworkError("the link is closed")
        try:
            async with asyncio.timeout(self._limits.idle_s) as deadline:
                yield deadline
        except TimeoutError:
            self._abort()
            raise NetworkError(f"{short(self.peer)} sent nothing for too long") from None
        except EOFError:
            self._abort()
            raise NetworkError(f"the stream from {short(self.peer)} ended") from None
        except OSError as error:
            self._abort()
            raise NetworkError(f"the stream from {short(self.peer)} broke: {error}") from error
        except RemoteError:
            self._abort()
            raise

    def _count(self, size_bytes: int) -> None:
        if self._is_gift:
            self._rates.give(size_bytes)

    async def close(self) -> None:
        """Flush what was sent, in the background, and end both directions."""
        self._closed = True
        self._stream.close()

    def _abort(self) -> None:
        self._closed = True
        self._stream.abort()


def _is_small(kind: int, length: int) -> bool:
    return kind != FrameKind.CHUNK and length <= SMALL_BYTES


@dataclass(frozen=True, slots=True)
class _Place:
    """One of those that inbound streams have."""

    link: StreamLink
    origin: str


class P2PTransport:
    """Opens links to peers and takes in theirs (``ports.Transport``), under one protocol name.

    Owns the links it took in and the tasks that serve them; ``close`` ends both. A link that it opened is its opener's
    to close. A handler's NetworkError or RemoteError ends its link with a line in the log; any other exception is a bug
    and goes to the loop's exception handler.

    Args:
        is_gift: what others ask here is for their own sake, and counted so.
    """

    def __init__(
        self,
        node: Node,
        protocol: str = EXCHANGE_PROTOCOL,
        limits: Limits | None = None,
        rates: Rates | None = None,
        is_gift: bool = False,
    ) -> None:
        self._node = node
        self._protocol = protocol
        self._limits = limits or Limits()
        self._rates = rates or Rates()
        self._is_gift = is_gift
        self._handler: Handler | None = None
        self._server: asyncio.Server | None = None
        self._inbound: dict[asyncio.Task[None], _Place | None] = {}
        """One a stream, the oldest first; None: not known yet, or about to end."""
        self._floods: RateLimiter[PeerId] = RateLimiter()
        self._crowds: RateLimiter[str] = RateLimiter(PER_ORIGIN)

    async def open(self, peer: PeerId, addresses: Sequence[str] = ()) -> StreamLink:
        daemon = self._node.daemon
        others = [each for each in addresses if address.relay_of(each) != self._node.peer_id]  # not through ourselves
        try:
            async with asyncio.timeout(self._limits.dial_s):
                if others:
                    await daemon.connect(peer, others)
                far_end, stream = await daemon.open_stream(peer, self._protocol)
        except TimeoutError:
            raise NetworkError(f"dialing {short(peer)} took more than {self._limits.dial_s:.0f} s") from None
        return StreamLink(far_end, stream, self._limits, self._rates)

    async def listen(self, handler: Handler) -> None:
        """Serve inbound links until ``close``. Once."""
        if self._handler is not None:
            raise ValueError("this transport listens already")
        self._handler = handler
        try:
            async with asyncio.timeout(self._limits.dial_s):
                self._server = await self._node.daemon.serve_streams(self._protocol, self._take)
        except TimeoutError:
            raise NetworkError("p2pd does not take our handler") from None

    async def close(self) -> None:
        """Take in nothing more, and end what is under way."""
        self._handler = None
        server, self._server = self._server, None
        if server is not None:
            with contextlib.suppress(TimeoutError, NetworkError):
                async with asyncio.timeout(1.0):
                    await self._node.daemon.stop_serving(self._protocol, server)
        for task in self._inbound:
            task.cancel()
        if self._inbound:
            await asyncio.wait(self._inbound)

    def _take(self, stream: Stream) -> None:
        """An inbound stream: a task of ours, or the door."""
        if self._handler is None or len(self._inbound) >= self._limits.inbound + MOST_NAMELESS:
            logger.info("turned down a link: %d are open", len(self._inbound))
            stream.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(self._handler, stream))
        self._inbound[task] = None
        task.add_done_callback(self._ended)

    async def _serve(self, handler: Handler, stream: Stream) -> None:
        try:
            async with asyncio.timeout(self._limits.idle_s):
                far_end = await read_opener(stream)
            link = StreamLink(far_end, stream, self._limits, self._rates, self._is_gift)
            if self._admit(link):
                await handler(link)
        except (NetworkError, RemoteError, OSError, EOFError) as error:
            logger.info("an inbound link ended: %s", error)
        finally:
            stream.close()

    def _admit(self, link: StreamLink) -> bool:
        """Whether a stream gets a place. Only now is it known whose it is."""
        task = asyncio.current_task()
        assert task is not None
        peer, where, now = link.peer, origin(link.far_end.place), task.get_loop().time()
        if not (self._floods.admits_alone(peer, now) and self._crowds.admits(where, now)):
            logger.info("turned down a link from %s: there are too many calls", short(peer))
            return False
        held = {task: place for task, place in self._inbound.items() if place is not None}
        others = sum(place.link.peer == peer for place in held.values())
        if others >= self._limits.inbound_per_peer:
            logger.info("turned down a link from %s: it has %d", short(peer), others)
            return False
        there = {task: place for task, place in held.items() if place.origin == where}
        is_crowd = len(there) >= self._limits.inbound_per_origin and not _is_local(link.far_end)
        if (is_crowd or len(held) >= self._limits.inbound) and not self._make_room(there if is_crowd else held):
            logger.info("turned down a link from %s: %d are open, %d from there", short(peer), len(held), len(there))
            return False
        self._inbound[task] = _Place(link, where)
        return True

    def _make_room(self, held: Mapping[asyncio.Task[None], _Place]) -> bool:
        """End a stream on which no frame has come, if there is one: the oldest of the origin that has most of them."""
        silent = {task: place.origin for task, place in held.items() if not place.link.has_heard}
        if not silent:
            return False
        crowds = Counter(silent.values())
        oldest = max(silent, key=lambda task: crowds[silent[task]])
        logger.info("a link ends that has said nothing, for another's sake")
        self._inbound[oldest] = None
        oldest.cancel()
        return True

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._inbound[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            context = {"message": "the handler of an inbound link failed", "exception": error, "task": task}
            task.get_loop().call_exception_handler(context)


def origin_of(link: Link) -> str:
    """Whom a link counts for beside its peer (``allowance.origin``); empty: nobody, as on this machine."""
    far_end = link.far_end if isinstance(link, StreamLink) else None
    return "" if far_end is None or _is_local(far_end) else origin(far_end.place)


def _is_local(far_end: FarEnd) -> bool:
    """Of this machine, whose peers all have one address: a swarm for trying things out."""
    return far_end.relay is None and address.is_loopback(far_end.place)
