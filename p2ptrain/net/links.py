"""Links: ``ports.Link`` over a binary stream of p2pd; ``net.transport`` opens and accepts them.

Failures of streams and their handling:

==============================================  ========================================================================
the remote is killed, its stream ends cleanly   NetworkError at the next receive: only a whole frame counts
the remote is frozen                            NetworkError when the frame's deadline passes
the remote sends very slowly                    NetworkError: a frame's deadline grows by its size at ``slowest_rate``
our p2pd is killed                              NetworkError: resets, and a check of the child before each dial
garbage, an oversized frame                     RemoteError before any byte of its body is read
the remote reads nothing                        its stream ends after a timeout (``StreamLink.part``)
==============================================  ========================================================================

**How a link ends.** About once in a thousand times p2pd loses bytes written just before a stream is closed: it closes
both directions one after the other, and if its reader wakes in between, it resets the stream, with everything that the
other side has not read yet. Therefore a side that has finished sends END and keeps reading until the other side closes,
or until a timeout; a side that reads END has received everything, and closes. If a remote reads nothing, our p2pd waits
for as long as their connection lasts, with one open file per stream; therefore the connection is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from p2ptrain import framing
from p2ptrain.base.errors import NetworkError, RemoteError, UnbegunError
from p2ptrain.base.ids import short
from p2ptrain.framing import FrameKind
from p2ptrain.net import address
from p2ptrain.net.p2pd.control import FarEnd
from p2ptrain.net.p2pd.streams import Stream
from p2ptrain.net.rate_limiter import origin
from p2ptrain.net.throttle import SMALL_BYTES, Throttles
from p2ptrain.ports import Link

MAX_UNHEARD = 8
"""Most frames that are read and dropped after we end a link; more, or a chunk, close it. Guess: the frames in flight at
the end of links would settle it."""
WINDOW_BYTES = 256 << 10
"""Bytes that p2pd sends before the remote reads any (yamux's first window)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Timeouts of a transport and limits on its inbound streams.

    Guess: stream timings and counts between real homes would settle all of these.
    """

    idle_s: float = 20.0
    """Timeout until a frame begins, and until a sent frame is taken."""
    slowest_rate: float = 4096.0
    """Bytes per second below which a stream counts as dead: a full chunk may take 64 s more."""
    dial_s: float = 20.0
    """Timeout for connecting, with retries over a peer's addresses, and opening the stream."""
    inbound: int = 32
    """Most concurrent inbound streams."""
    inbound_per_peer: int = 4
    """Most concurrent inbound streams of one peer."""

    @property
    def inbound_per_origin(self) -> int:
        """Most concurrent inbound streams from one IP address or through one relay: half, since peer ids are free."""
        return self.inbound // 2

    def frame_s(self, length: int) -> float:
        """Return the timeout of a frame of this length."""
        return self.idle_s + length / self.slowest_rate

    @property
    def parting_s(self) -> float:
        """Timeout until the other side ends a link that we have ended: a chunk may be on its way."""
        return self.frame_s(framing.MAX_CHUNK_BYTES)


class StreamLink(Link):
    """Link over one stream. A missed deadline, a reset or a malformed frame closes it.

    If the owner caps the rate, chunks, other large frames, and small frames beyond their share wait for their turn, and
    the partner's deadline is extended by that time. A buffer passed to ``send`` must not change afterwards, because the
    event loop may still hold it.

    Args:
        serves_others: whether the traffic serves the other side alone.
        on_end: called once, when the link ends; the called function must await ``part``.
    """

    def __init__(
        self,
        far_end: FarEnd,
        stream: Stream,
        limits: Limits,
        rates: Throttles,
        serves_others: bool = False,
        on_end: Callable[[StreamLink], None] | None = None,
    ) -> None:
        self.far_end = far_end
        self.peer = far_end.peer
        self._stream = stream
        self._limits = limits
        self._rates = rates
        self._serves_others = serves_others
        self._on_end = on_end
        self._closed = False
        self._is_partly_sent = self._is_partly_received = False  # whether a frame was sent or received in part
        self._is_stuck = False  # the other side reads nothing
        self._sent = 0
        self._is_hurried = False
        self._patience: asyncio.Timeout | None = None
        self._has_payload = self._has_heard_end = False
        self._ahead: tuple[int, int] | None = None  # header that ``wait_for_frame`` has read
        self.has_heard = False
        """True once a whole frame has come, until the link ends."""

    async def send(self, kind: int, body: bytes | memoryview) -> None:
        header, line = framing.encode_header(kind, len(body)), self._rates.up
        line.book(len(header))
        self._count(len(header) + len(body))
        book = line.book_small if _is_small(kind, len(body)) else line.book
        left = len(body)
        for piece in line.pieces(memoryview(body)):
            await line.wait(book(len(piece)), len(piece))
            left -= len(piece)
            self._is_partly_sent = left > 0
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
            self._is_stuck = True
            self.give_up()
            raise NetworkError(f"{short(self.peer)} read nothing for too long") from None
        except (OSError, EOFError) as error:
            self.give_up()
            raise NetworkError(f"the stream to {short(self.peer)} broke: {error}") from error

    async def receive(self) -> tuple[int, bytes]:
        async with self._receiving() as deadline:
            kind, length = await self._receive_header(deadline)
            body = bytearray(length)
            await self._receive_body(kind, memoryview(body), deadline)
            return kind, bytes(body)

    async def wait_for_frame(self) -> None:
        async with self._receiving() as deadline:
            self._ahead = await self._receive_header(deadline)

    async def receive_into(self, buffer: memoryview) -> tuple[int, int]:
        async with self._receiving() as deadline:
            kind, length = await self._receive_header(deadline)
            if length > len(buffer):
                raise RemoteError(f"expected a frame of at most {len(buffer)} bytes, got {length}")
            await self._receive_body(kind, buffer[:length], deadline)
            return kind, length

    async def _receive_header(self, deadline: asyncio.Timeout) -> tuple[int, int]:
        if self._ahead is not None:
            (kind, length), self._ahead = self._ahead, None
            deadline.reschedule(asyncio.get_running_loop().time() + self._limits.frame_s(length))
            return kind, length
        try:
            header = await self._stream.read_exactly(framing.HEADER_BYTES)
        except BaseException:
            self._is_partly_received = self._stream.lacking < framing.HEADER_BYTES
            raise
        kind, length = framing.decode_header(header)
        if kind == FrameKind.END:
            self._has_heard_end = True
            raise EOFError
        self._is_partly_received = True
        self._has_payload = self._has_payload or kind == FrameKind.CHUNK
        deadline.reschedule(asyncio.get_running_loop().time() + self._limits.frame_s(length))
        self._rates.down.book(framing.HEADER_BYTES)
        self._count(framing.HEADER_BYTES)
        return kind, length

    async def _receive_body(self, kind: int, body: memoryview, deadline: asyncio.Timeout) -> None:
        """Receive a frame's body at the capped rate; back-pressure reaches the sender through both p2pds.

        Bytes that do not come are not counted, whatever the header said.
        """
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
        self._is_partly_received = False
        self.has_heard = True

    @contextlib.asynccontextmanager
    async def _receiving(self) -> AsyncIterator[asyncio.Timeout]:
        """Apply the idle timeout; close the link on any failure and raise the matching error."""
        if self._closed:
            raise NetworkError("the link is closed")
        try:
            async with asyncio.timeout(self._limits.idle_s) as deadline:
                yield deadline
        except TimeoutError:
            self.give_up()
            raise NetworkError(f"{short(self.peer)} sent nothing for too long") from None
        except EOFError:
            self.give_up()
            words = f"the stream from {short(self.peer)} ended"
            if self._has_heard_end and not self._has_payload:
                raise UnbegunError(words) from None
            raise NetworkError(words) from None
        except OSError as error:
            self.give_up()
            raise NetworkError(f"the stream from {short(self.peer)} broke: {error}") from error
        except RemoteError:
            self.give_up()
            raise

    def _count(self, size_bytes: int) -> None:
        if self._serves_others:
            self._rates.give(size_bytes)

    async def close(self) -> None:
        """End both directions in the background, so that a partner that reads receives everything sent."""
        if self._is_partly_sent or self._is_partly_received or self._stream.is_closing:
            self.give_up()
        else:
            self._end()

    def give_up(self) -> None:
        """End the link at once, without END."""
        self._stream.abort()
        self._end()

    def _end(self) -> None:
        if not self._closed:
            self._closed, self.has_heard = True, False
            if self._on_end is not None:
                self._on_end(self)

    async def part(self) -> bool:
        """Send END after closing and wait until the other side ends.

        Returns False if the other side stopped reading with more unread than p2pd sends in advance.
        """
        try:
            if not (self._stream.is_closing or self._is_hurried):
                async with asyncio.timeout(self._limits.parting_s) as self._patience:
                    await self._await_end()
        except TimeoutError:
            self._is_stuck = not self._is_hurried
        except (RemoteError, OSError, EOFError):
            pass
        finally:
            self._patience = None
            self._stream.abort()
        return not (self._is_stuck and self._sent > WINDOW_BYTES)

    async def _await_end(self) -> None:
        await self._stream.write(framing.encode_header(FrameKind.END, 0))
        for _ in range(1 + MAX_UNHEARD):
            kind, length = framing.decode_header(await self._stream.read_exactly(framing.HEADER_BYTES))
            if kind in (FrameKind.END, FrameKind.CHUNK):
                return
            await self._stream.read_exactly(length)

    def hurry(self) -> None:
        """Stop waiting for the other side to end."""
        self._is_hurried = True
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(0.0)


def _is_small(kind: int, length: int) -> bool:
    return kind != FrameKind.CHUNK and length <= SMALL_BYTES


def origin_of(link: Link) -> str:
    """Return the link's origin (``rate_limiter.origin``) for limits; empty on this machine or in memory."""
    far_end = link.far_end if isinstance(link, StreamLink) else None
    return "" if far_end is None or is_local(far_end) else origin(far_end.place)


def is_local(far_end: FarEnd) -> bool:
    """Return whether the far end is on this machine, where all peers share one address."""
    return far_end.relay is None and address.is_loopback(far_end.place)
