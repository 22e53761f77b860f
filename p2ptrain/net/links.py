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
a remote that reads nothing                     its stream ends in time; after some, p2pd's connection to it, too
==============================================  ========================================================================

**How a link ends.** p2pd loses what was written right before its end of a stream is closed, once in some thousand
times: it closes both directions one after the other, and where its reader wakes in between, it resets the stream, with
all that the other side has not read yet. So nobody closes first. Who is through says END, and reads on until the other
side ends, too, but not for long; who reads END has heard everything, and closes. Where somebody just does not read, our
p2pd waits to write to it for as long as their connection lasts, with an open file a stream: hence the connection goes.
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

MOST_UNHEARD = 8
"""Frames that are read and dropped once we have ended a link. More than that, or a chunk, is no last word. A guess."""
WINDOW_BYTES = 256 << 10
"""What p2pd sends of a stream that nobody reads (yamux's first window). Behind more of it, it waits."""
MOST_HANGING = 4
"""Streams of one peer on which p2pd may wait for ever, until its connection is closed. A guess: honest ones are frozen,
or so slow that we gave them up amid a payload, and are not cut off each time."""
MOST_REMEMBERED = 1024
"""Peers of whom streams hang."""
FAREWELL_S = 0.5
"""For all that is being said when a transport closes. A guess: a round trip."""

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

    @property
    def parting_s(self) -> float:
        """How long the other side may take to end a link that we have ended: a chunk may be on its way."""
        return self.frame_s(framing.MAX_CHUNK_BYTES)


class StreamLink:
    """One stream (``ports.Link``). A deadline that passes, a reset or a malformed frame closes it.

    Chunks of payload, other frames that are not small, and small ones beyond their share wait for their turn where the
    owner caps the rate; the partner is given that time on top. A buffer given to ``send`` must not change afterwards:
    the event loop may still hold it.

    Args:
        is_gift: what passes is for the other side's sake alone.
        see_off: called once, when the link ends: ``part`` is to be awaited.
    """

    def __init__(
        self,
        far_end: FarEnd,
        stream: Stream,
        limits: Limits,
        rates: Rates,
        is_gift: bool = False,
        see_off: Callable[[StreamLink], None] | None = None,
    ) -> None:
        self.far_end = far_end
        self.peer = far_end.peer
        self._stream = stream
        self._limits = limits
        self._rates = rates
        self._is_gift = is_gift
        self._see_off = see_off
        self._closed = False
        self._is_half_sent = self._is_half_heard = False  # a frame
        self._has_it_ended = False  # the other side
        self._sent = 0
        self._is_hurried = False
        self._patience: asyncio.Timeout | None = None
        self.has_heard = False
        """A whole frame has come, and more may."""

    async def send(self, kind: int, body: bytes | memoryview) -> None:
        header, line = framing.encode_header(kind, len(body)), self._rates.up
        line.book(len(header))
        self._count(len(header) + len(body))
        book = line.book_small if _is_small(kind, len(body)) else line.book
        left = len(body)
        for piece in line.pieces(memoryview(body)):
            await line.wait(book(len(piece)), len(piece))
            left -= len(piece)
            self._is_half_sent = left > 0
            await self._write(header, piece)
            header = b""

    async def _write(self, header: bytes, body: bytes | memoryview) -> None:
        if self._closed or self._stream.is_closing:
            raise NetworkError("the link is closed")
        self._sent += len(header) + len(body)
        try:
            async with asyncio.timeout(self._limits.frame_s(len(body))):
                await self._stream.write(header, body)
        except TimeoutError:
            self._abort()
            raise NetworkError(f"{short(self.peer)} took nothing for too long") from None
        except (OSError, EOFError) as error:
            self._has_it_ended = True
            self._abort()
            raise NetworkError(f"the stream to {short(self.peer)} broke: {error}") from error

    async def receive(self) -> tuple[int, bytes]:
        async with self._receiving() as deadline:
            kind, length = await self._receive_header(deadline)
            body = bytearray(length)
            await self._receive_body(kind, memoryview(body), deadline)
            return kind, bytes(body)

    async def receive_into(self, buffer: memoryview) -> tuple[int, int]:
        """``payload.DirectLink``: a frame's body received where it is wanted, without a copy."""
        async with self._receiving() as deadline:
            kind, length = await self._receive_header(deadline)
            if length > len(buffer):
                raise RemoteError(f"a frame of {length} bytes where {len(buffer)} were due")
            await self._receive_body(kind, buffer[:length], deadline)
            return kind, length

    async def _receive_header(self, deadline: asyncio.Timeout) -> tuple[int, int]:
        try:
            header = await self._stream.read_exactly(framing.HEADER_BYTES)
        except BaseException:
            self._is_half_heard = self._stream.lacking < framing.HEADER_BYTES
            raise
        kind, length = framing.decode_header(header)
        if kind == FrameKind.END:
            raise EOFError
        self._is_half_heard = True
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
        self._is_half_heard = False
        self.has_heard = True

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
            self._has_it_ended = True
            self._abort()
            raise NetworkError(f"the stream from {short(self.peer)} ended") from None
        except OSError as error:
            self._has_it_ended = True
            self._abort()
            raise NetworkError(f"the stream from {short(self.peer)} broke: {error}") from error
        except RemoteError:
            self._abort()
            raise

    def _count(self, size_bytes: int) -> None:
        if self._is_gift:
            self._rates.give(size_bytes)

    async def close(self) -> None:
        """End both directions, in the background: what was said reaches whoever reads it."""
        if self._is_half_sent or self._is_half_heard or self._stream.is_closing:
            self._abort()
        else:
            self._end()

    def _abort(self) -> None:
        self._stream.abort()
        self._end()

    def _end(self) -> None:
        if not self._closed:
            self._closed, self.has_heard = True, False
            if self._see_off is not None:
                self._see_off(self)

    async def part(self) -> bool:
        """Once it is closed: say so, and wait until the other side has ended, too. False where p2pd may hang on it."""
        try:
            if not (self._stream.is_closing or self._is_hurried):
                async with asyncio.timeout(self._limits.parting_s) as self._patience:
                    self._has_it_ended = await self._hear_it_end()
        except TimeoutError:
            pass
        except (OSError, EOFError):
            self._has_it_ended = True
        finally:
            self._stream.abort()
        return self._has_it_ended or self._sent <= WINDOW_BYTES

    async def _hear_it_end(self) -> bool:
        await self._stream.write(framing.encode_header(FrameKind.END, 0))
        for _ in range(MOST_UNHEARD):
            try:
                kind, length = framing.decode_header(await self._stream.read_exactly(framing.HEADER_BYTES))
            except RemoteError:
                return False
            if kind in (FrameKind.END, FrameKind.CHUNK):
                return kind == FrameKind.END
            await self._stream.read_exactly(length)
        return False

    def hurry(self) -> None:
        """Wait no longer for the other side to end."""
        self._is_hurried = True
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(0.0)


def _is_small(kind: int, length: int) -> bool:
    return kind != FrameKind.CHUNK and length <= SMALL_BYTES


@dataclass(frozen=True, slots=True)
class _Place:
    """One of those that inbound streams have."""

    link: StreamLink
    origin: str


class P2PTransport:
    """Opens links to peers and takes in theirs (``ports.Transport``), under one protocol name.

    Owns the links it took in, the tasks that serve them and those that part from links; ``close`` ends all these. A link
    that it opened is its opener's to close. A handler's NetworkError or RemoteError ends its link with a line in the log;
    any other exception is a bug and goes to the loop's exception handler.

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
        self._partings: dict[StreamLink, asyncio.Task[None]] = {}
        self._hanging: Counter[PeerId] = Counter()
        """Streams on which p2pd may wait for a peer, since we last closed its connection."""
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
        return StreamLink(far_end, stream, self._limits, self._rates, see_off=self._see_off)

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
        if self._partings:
            await asyncio.wait(self._partings.values(), timeout=FAREWELL_S)
        tasks = [*self._inbound, *self._partings.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

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
            link = StreamLink(far_end, stream, self._limits, self._rates, self._is_gift, self._see_off)
            if self._admit(link):
                await handler(link)
                await link.close()
                if (parting := self._partings.get(link)) is not None:  # it has its place until then
                    await asyncio.wait([parting])
        except (NetworkError, RemoteError, OSError, EOFError) as error:
            logger.info("an inbound link ended: %s", error)
        finally:
            stream.abort()

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

    def _see_off(self, link: StreamLink) -> None:
        """A link of ours has ended: let the other side hear so, and end."""
        task = self._partings[link] = asyncio.get_running_loop().create_task(self._part(link))
        task.add_done_callback(lambda _: self._partings.pop(link))

    async def _part(self, link: StreamLink) -> None:
        if await link.part():
            return
        self._hanging[link.peer] += 1
        if self._hanging[link.peer] >= MOST_HANGING:
            logger.info("the connection to %s is closed: it reads nothing", short(link.peer))
            with contextlib.suppress(NetworkError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._node.daemon.disconnect(link.peer)
            del self._hanging[link.peer]
        elif len(self._hanging) > MOST_REMEMBERED:
            del self._hanging[next(iter(self._hanging))]

    def _make_room(self, held: Mapping[asyncio.Task[None], _Place]) -> bool:
        """End a stream on which no frame has come, or that we have ended, if there is one: the oldest of the origin that
        has most of them."""
        silent = {task: place.origin for task, place in held.items() if not place.link.has_heard}
        if not silent:
            return False
        crowds = Counter(silent.values())
        oldest = max(silent, key=lambda task: crowds[silent[task]])
        logger.info("a link ends that has nothing to say, for another's sake")
        link = held[oldest].link
        self._inbound[oldest] = None
        if link in self._partings:
            link.hurry()
        else:
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
