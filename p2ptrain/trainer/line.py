"""The line between a node and its trainer: a stream socket with one JSON object a line, and files beside them.

Both ends belong to one user on one machine, and the node has started the trainer: lengths are capped against mistakes,
not against attacks.
"""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Mapping
from multiprocessing.connection import wait
from threading import Lock
from typing import Any

MOST_BYTES = 1 << 22
"""Longest line: names and shapes of the parameters of the largest models take some hundred kB."""
BLOCK_BYTES = 1 << 16
FILES = 1
"""Files that may accompany a block."""


class LineClosedError(Exception):
    """The other side has closed the line or died."""


class Line:
    """One end of a line. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()
        self._files: deque[int] = deque()
        self._sending = Lock()

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
                raise LineClosedError
            try:
                if not wait([self._socket], timeout_s):
                    return None
                data, files, _, _ = socket.recv_fds(self._socket, BLOCK_BYTES, FILES)
            except OSError as error:
                raise LineClosedError from error
            self._files.extend(files)
            if not data:
                raise LineClosedError
            self._received += data
        message = self._received[:end]
        del self._received[: end + 1]
        try:
            found: dict[str, Any] = json.loads(message)
        except ValueError as error:
            raise LineClosedError from error
        return found

    def take_file(self) -> int:
        """Return the descriptor that came with a message. Raises LineClosedError."""
        if not self._files:
            raise LineClosedError
        return self._files.popleft()

    def close(self) -> None:
        """Close this end; the other side's next ``receive`` raises LineClosedError. Safe to call twice."""
        self._socket.close()
