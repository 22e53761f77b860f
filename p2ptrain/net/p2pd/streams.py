"""A byte stream to p2pd with few copies; asyncio's own reader copies each byte four times, which is slow at 300 MB/s.

Bytes are received directly into the buffer of the waiting reader. Bytes that arrive while no reader waits go into a
spare buffer. When it is full, reading from the socket pauses, and back-pressure reaches the sender through p2pd.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

SPARE_BYTES = 64 << 10
"""Spare buffer, large enough for most control messages. Guess: measure throughput at other sizes."""
WRITE_AHEAD_BYTES = 512 << 10
"""Two full frames: one is built while the other is written."""


class Stream(asyncio.BufferedProtocol):
    """One connection to p2pd, used by one reader and one writer at a time.

    Reading and writing raise EOFError after a clean end and OSError after any other; neither has a deadline.
    """

    def __init__(self, on_open: Callable[[Stream], None] | None = None) -> None:
        self._on_open = on_open
        self._transport: asyncio.Transport | None = None
        self._spare = memoryview(bytearray(SPARE_BYTES))
        self._spare_start = self._spare_end = 0
        self._target: memoryview | None = None  # the unfilled part of the waiting reader's buffer
        self.lacking = 0
        """Number of bytes missing from the last ``read_into`` when it failed."""
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._is_choked = False
        self._end: Exception | None = None

    @property
    def is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    async def read_exactly(self, length: int) -> bytes:
        buffer = bytearray(length)
        await self.read_into(memoryview(buffer))
        return bytes(buffer)

    async def read_into(self, buffer: memoryview) -> None:
        lacking = buffer[self._take_spare(buffer) :]
        self.lacking = len(lacking)
        if not lacking:
            return
        if self._end is not None:
            raise self._end
        self._target = lacking
        self._resume()
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self.lacking = len(self._target or b"")
            self._target = self._reader = None

    def widen(self, size_bytes: int) -> None:
        """Enlarge the spare buffer, and thus what ``read_some`` may return at once; fewer bytes then wait to be sent.

        No reader may be waiting.
        """
        if self._transport is not None:
            self._transport.set_write_buffer_limits(high=2 * size_bytes)
        unread = self._spare[self._spare_start : self._spare_end]
        self._spare = memoryview(bytearray(size_bytes))
        self._spare[: len(unread)] = unread
        self._spare_start, self._spare_end = 0, len(unread)

    def pause(self) -> None:
        """Receive nothing until the next read, so that bytes gather in the socket and come at once."""
        if self._transport is not None and not self._transport.is_closing() and self._transport.is_reading():
            self._transport.pause_reading()

    async def read_some(self) -> bytes:
        """Read the available bytes, at least one and at most the size of the spare buffer."""
        if self._spare_start == self._spare_end:
            if self._end is not None:
                raise self._end
            self._resume()
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        some = bytes(self._spare[self._spare_start : self._spare_end])
        self._spare_start = self._spare_end = 0
        return some

    async def write(self, *buffers: bytes | memoryview) -> None:
        """Queue these bytes, and return when few bytes wait to be sent. The buffers must not change afterwards."""
        if self._end is not None or self._transport is None:
            raise self._end or EOFError("not connected")
        self._transport.writelines(buffers)
        if self._is_choked:
            self._writer = asyncio.get_running_loop().create_future()
            try:
                await self._writer
            finally:
                self._writer = None

    def close(self) -> None:
        """Write queued bytes in the background, then close both directions."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio's callbacks -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports only have its interface
        self._transport.set_write_buffer_limits(high=WRITE_AHEAD_BYTES)
        if self._on_open is not None:
            self._on_open(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._target if self._target is not None else self._spare[self._spare_end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._target is None:
            self._spare_end += nbytes
            if self._spare_end == len(self._spare) and self._transport is not None and self._transport.is_reading():
                self._transport.pause_reading()
            _wake(self._reader)  # for read_some; read_into has a target
            return
        self._target = self._target[nbytes:]
        if not self._target:
            self._target = None
            _wake(self._reader)

    def eof_received(self) -> bool:
        self._finish(EOFError("the stream ended"))
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(exc or EOFError("the stream was closed"))

    def pause_writing(self) -> None:
        self._is_choked = True

    def resume_writing(self) -> None:
        self._is_choked = False
        _wake(self._writer)

    def _take_spare(self, buffer: memoryview) -> int:
        held = min(self._spare_end - self._spare_start, len(buffer))
        buffer[:held] = self._spare[self._spare_start : self._spare_start + held]
        self._spare_start += held
        if self._spare_start == self._spare_end:
            self._spare_start = self._spare_end = 0
            self._resume()
        return held

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing() and not self._transport.is_reading():
            self._transport.resume_reading()

    def _finish(self, end: Exception) -> None:
        self._end = self._end or end
        for waiter in (self._reader, self._writer):
            if waiter is not None and not waiter.done():
                waiter.set_exception(self._end)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
