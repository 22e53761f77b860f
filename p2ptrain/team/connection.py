"""Framed connection between the leader and another rank's shard server, over a stream socket.

::

    u8 0xA5 | u8 version | u16 number of blobs | u32 length of the JSON | JSON | blobs, each u64 length and bytes

All integers are big-endian. A header beyond the limits is refused before its body is read, and every frame has a
deadline. After any error the two sides no longer agree where a frame begins, so the connection is closed.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from p2ptrain.base.errors import NetworkError, RemoteError

MAGIC, VERSION = 0xA5, 1
MOST_NUMBERS = 8192
"""Two streams of 4096 fragments."""
MOST_JSON_BYTES = 4096 + 256 * MOST_NUMBERS
"""Room for a fit and a norm, or a pending exchange and a number, of each fragment."""
MOST_BLOBS = 2 * MOST_NUMBERS
"""Both sides' proposals."""

_HEADER = struct.Struct(">BBHI")
_LENGTH = struct.Struct(">Q")

Blob = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class TeamFrame:
    body: bytes  # JSON
    blobs: Sequence[Blob] = ()


@dataclass(frozen=True, slots=True)
class ReceivedFrame(TeamFrame):
    blobs: Sequence[bytearray] = ()


def write_frame(frame: TeamFrame, send: Callable[[Blob], None]) -> None:
    """Send a frame. Raises ValueError (a bug) if it is beyond the limits."""
    if len(frame.body) > MOST_JSON_BYTES or len(frame.blobs) > MOST_BLOBS:
        raise ValueError(f"a frame of {len(frame.body)} bytes and {len(frame.blobs)} blobs is beyond the limits")
    send(_HEADER.pack(MAGIC, VERSION, len(frame.blobs), len(frame.body)) + frame.body)
    for blob in frame.blobs:
        view = memoryview(blob).cast("B")
        send(_LENGTH.pack(len(view)))
        send(view)


def read_frame(receive: Callable[[int], bytearray], most_bytes: int) -> ReceivedFrame:
    """Receive a frame.

    Args:
        receive: returns exactly so many bytes.
        most_bytes: maximum of all blobs together.

    Raises RemoteError if the frame is invalid.
    """
    magic, version, count, length = _HEADER.unpack(receive(_HEADER.size))
    if (magic, version) != (MAGIC, VERSION):
        raise RemoteError("a rank of the team runs another version of p2ptrain")
    if length > MOST_JSON_BYTES or count > MOST_BLOBS:
        raise RemoteError(f"a frame of {length} bytes and {count} blobs is beyond the limits")
    body, blobs, left = bytes(receive(length)), [], most_bytes
    for _ in range(count):
        (size,) = _LENGTH.unpack(receive(_LENGTH.size))
        if size > left:
            raise RemoteError(f"a blob of {size} bytes, but at most {left} may follow")
        left -= size
        blobs.append(receive(size))
    return ReceivedFrame(body, blobs)


class ByteLine(Protocol):
    """Stream of bytes in both directions. Every method raises NetworkError; deadlines are of ``time.monotonic``."""

    def send(self, data: Blob, until: float) -> None:
        """Send all bytes before a deadline."""

    def receive(self, size: int, until: float) -> bytearray:
        """Return exactly so many bytes before a deadline."""

    def wait(self) -> None:
        """Wait for the next byte, or for the end."""

    def close(self) -> None:
        """End the stream, also for a thread that waits for it. Safe to call twice."""


class SocketLine:
    """``ByteLine`` over a stream socket, which it owns."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, data: Blob, until: float) -> None:
        send_all(self._connection, data, until)

    def receive(self, size: int, until: float) -> bytearray:
        return receive_all(self._connection, size, until)

    def wait(self) -> None:
        wait_for_byte(self._connection)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class RankConnection:
    """Framed connection, one frame at a time in each direction. Owns its line.

    Args:
        most_bytes: maximum of a received frame's blobs.

    Raises NetworkError where the connection fails or a deadline passes, RemoteError for an invalid frame.
    """

    def __init__(self, line: ByteLine, most_bytes: int) -> None:
        self._line = line
        self._most_bytes = most_bytes

    def send(self, frame: TeamFrame, deadline_s: float) -> None:
        """Send one frame within so many seconds."""
        until = time.monotonic() + deadline_s
        with self._closed_on_error():
            write_frame(frame, lambda data: self._line.send(data, until))

    def receive(self, deadline_s: float, begins_any_time: bool = False) -> ReceivedFrame:
        """Return the next frame, which arrives within so many seconds, or within so many of its first byte."""
        with self._closed_on_error():
            if begins_any_time:
                self._line.wait()
            until = time.monotonic() + deadline_s
            return read_frame(lambda size: self._line.receive(size, until), self._most_bytes)

    def close(self) -> None:
        """Close the connection, which ends a call in another thread. Safe to call twice."""
        self._line.close()

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


def wait_for_byte(connection: socket.socket) -> None:
    """Wait for the next byte, or for the end. Raises NetworkError."""
    try:
        connection.settimeout(None)
        connection.recv(1, socket.MSG_PEEK)
    except OSError as error:
        raise NetworkError(f"a rank of the team has ended its connection: {error}") from error


def send_all(connection: socket.socket, data: Blob, until: float) -> None:
    """Send all bytes before a time on the monotonic clock. Raises NetworkError."""
    try:
        connection.settimeout(max(until - time.monotonic(), 1e-3))
        connection.sendall(data)
    except OSError as error:
        raise NetworkError(f"a rank of the team does not read: {error}") from error


def receive_all(connection: socket.socket, size: int, until: float) -> bytearray:
    """Receive exactly so many bytes before a time on the monotonic clock. Raises NetworkError."""
    data = bytearray(size)
    view = memoryview(data)
    try:
        while view:
            connection.settimeout(max(until - time.monotonic(), 1e-3))
            count = connection.recv_into(view)
            if not count:
                raise NetworkError("a rank of the team has ended its connection")
            view = view[count:]
    except OSError as error:
        raise NetworkError(f"a rank of the team does not answer: {error}") from error
    return data
