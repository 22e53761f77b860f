"""The line between a node and its trainer: a stream socket with one JSON object a line, and files beside them.

Both ends belong to one user on one machine, and the node has started the trainer: lengths are capped against mistakes,
not against attacks.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from multiprocessing.connection import wait
from threading import Lock
from typing import Any, Self

from p2ptrain.trainer.host_vector import MOST_RANKS

MOST_BYTES = 1 << 22
"""Longest line: names and shapes of the parameters of the largest models take some hundred kB."""
BLOCK_BYTES = 1 << 16
FILES = 1
"""Files that may accompany a block."""


class LineClosedError(Exception):
    """The other side has closed the line or died, or sent what is no message; the error then says so."""


class LineServer:
    """Accepts the lines of the ranks of one trainer: a socket in memory on Linux, a file elsewhere."""

    def __init__(self) -> None:
        self._folder = None if sys.platform == "linux" else tempfile.TemporaryDirectory(prefix="p2ptrain-")
        name = secrets.token_hex(16)
        self.address = f"@p2ptrain-{name}" if self._folder is None else f"{self._folder.name}/node"
        """For ``Line.to``."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(_place(self.address))
        self._socket.listen(MOST_RANKS)

    def accept(self, timeout_s: float) -> Line | None:
        """Return the line to the next rank; None after the timeout, and where another thread has closed this.

        Programs of other users are refused.
        """
        try:
            if not wait([self._socket], timeout_s):
                return None
            end, _ = self._socket.accept()
        except (OSError, ValueError):
            return None
        if sys.platform == "linux":  # a file's folder is this user's alone
            data = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(data)[1] != os.getuid():
                end.close()
                return None
        return Line(end)

    def close(self) -> None:
        """Accept nobody any more. Safe to call twice."""
        self._socket.close()
        if self._folder is not None:
            self._folder.cleanup()


_CREDENTIALS = struct.Struct("3i")
"""Process, user and group at the other end of a Unix socket (unix(7))."""


def _place(address: str) -> str:
    return f"\0{address[1:]}" if address.startswith("@") else address


class Line:
    """One end of a line. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()
        self._files: deque[int] = deque()
        self._sending = Lock()

    @classmethod
    def to(cls, address: str) -> Self:
        """Return the line to a node. Raises LineClosedError."""
        end = socket.socket(socket.AF_UNIX)
        try:
            end.connect(_place(address))
        except OSError as error:
            end.close()
            raise LineClosedError from error
        return cls(end)

    def send(self, message: Mapping[str, Any], file: int | None = None) -> None:
        """Send a message, perhaps with the descriptor of a file. Raises LineClosedError."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                sent = 0 if file is None else socket.send_fds(self._socket, [data], [file])
                self._socket.sendall(data[sent:])
        except OSError as error:
            raise LineClosedError from error

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Return the next message, or None after the timeout. Raises LineClosedError."""
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > MOST_BYTES:
                raise LineClosedError(f"sent a line of more than {MOST_BYTES:,} bytes")
            try:
                if not wait([self._socket], timeout_s):
                    return None
                data, files, _, _ = socket.recv_fds(self._socket, BLOCK_BYTES, FILES)
            except (OSError, ValueError) as error:  # ValueError: this end has closed it
                raise LineClosedError from error
            self._files.extend(files)
            if not data:
                raise LineClosedError
            self._received += data
        message = self._received[:end]
        del self._received[: end + 1]
        try:
            found = json.loads(message)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise LineClosedError("sent a line that is not a JSON object")
        return found

    def take_file(self) -> int:
        """Return the descriptor that came with a message. Raises LineClosedError."""
        if not self._files:
            raise LineClosedError
        return self._files.popleft()

    def close(self) -> None:
        """Close this end; the other side's next ``receive`` raises LineClosedError. Safe to call twice."""
        self._socket.close()
