"""How ranks reach the leader: a Unix socket in a folder that only the owner can enter, and a key that both know.

::

    rank                                             leader
    "p2ptrain team 1" | u16 rank | nonce  -->
                                          <--        nonce | HMAC(key, "leader" | hello | nonce)
    HMAC(key, "rank" | hello | nonce)     -->

HMAC is HMAC-SHA-256, a nonce 32 random bytes. The key itself is never sent.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from p2ptrain.base.errors import NetworkError, TeamError
from p2ptrain.team.connection import receive_all, send_all

HELLO_S = 5.0
"""Deadline of each handshake."""
STOP_POLL_S = 0.2
"""Seconds between two looks at whether to give up waiting for ranks."""
KEY_BYTES = 32
LONGEST_PATH = 100
"""Bytes of a Unix socket's path that every system takes."""

_GREETING = b"p2ptrain team 1"
_HELLO = struct.Struct(f">{len(_GREETING)}sH32s")


def new_key() -> bytes:
    """Return a random key for one generation of a team."""
    return secrets.token_bytes(KEY_BYTES)


class RankListener:
    """The leader's listening socket. Owns it and its file.

    Args:
        path: of the socket, in a folder that only the owner can enter.
        key: shared with the ranks.

    Raises TeamError if the folder is open to others, or the path too long or taken.
    """

    def __init__(self, path: Path, key: bytes) -> None:
        _check(path)
        self._path = path
        self._key = key
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _remove_stale(path)
            self._listener.bind(str(path))
            self._listener.listen()
        except OSError as error:
            self._listener.close()
            raise TeamError("connecting the ranks", f"{path}: {error}") from error

    def connect(
        self, ranks: int, timeout_s: float, is_stopping: Callable[[], bool] = lambda: False
    ) -> list[socket.socket]:
        """Return the connections of ranks 1 to ``ranks`` - 1, in order.

        Raises TeamError if one is missing in time, or ``is_stopping``.
        """
        until, found = time.monotonic() + timeout_s, dict[int, socket.socket]()
        try:
            while len(found) < ranks - 1:
                left_s = until - time.monotonic()
                self._listener.settimeout(min(max(left_s, 1e-3), STOP_POLL_S))
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError:
                    if left_s > STOP_POLL_S and not is_stopping():
                        continue
                    raise
                rank = self._greet(connection)
                if rank is None or not 0 < rank < ranks or rank in found:
                    connection.close()
                else:
                    found[rank] = connection
        except OSError as error:
            for connection in found.values():
                connection.close()
            missing = [rank for rank in range(1, ranks) if rank not in found]
            raise TeamError("connecting the ranks", f"ranks {missing} did not come: {error}") from error
        return [found[rank] for rank in range(1, ranks)]

    def close(self) -> None:
        """Stop listening and remove the socket's file. Safe to call twice."""
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _greet(self, connection: socket.socket) -> int | None:
        """Return the rank at the other end, or None if it does not know the key."""
        until = time.monotonic() + HELLO_S
        with suppress(NetworkError):
            hello = bytes(receive_all(connection, _HELLO.size, until))
            greeting, rank, _ = _HELLO.unpack(hello)
            if greeting != _GREETING:
                return None
            nonce = secrets.token_bytes(32)
            send_all(connection, nonce + _proof(self._key, b"leader", hello, nonce), until)
            theirs = receive_all(connection, 32, until)
            if hmac.compare_digest(theirs, _proof(self._key, b"rank", hello, nonce)):
                return int(rank)
        return None


def dial(path: Path, key: bytes, rank: int, timeout_s: float = HELLO_S) -> socket.socket:
    """Connect a rank to its leader. Raises TeamError."""
    _check(path)
    until = time.monotonic() + timeout_s
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        hello = _HELLO.pack(_GREETING, rank, secrets.token_bytes(32))
        send_all(connection, hello, until)
        answer = bytes(receive_all(connection, 64, until))
        nonce, theirs = answer[:32], answer[32:]
        if not hmac.compare_digest(theirs, _proof(key, b"leader", hello, nonce)):
            raise NetworkError("the leader does not know the key")
        send_all(connection, _proof(key, b"rank", hello, nonce), until)
    except (OSError, NetworkError) as error:
        connection.close()
        raise TeamError("connecting the ranks", str(error)) from error
    return connection


def _remove_stale(path: Path) -> None:
    """Remove the socket of a leader that was killed: nobody answers there. Raises OSError."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(HELLO_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)


def _proof(key: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.new(key, role + hello + nonce, hashlib.sha256).digest()


def _check(path: Path) -> None:
    status = path.parent.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise TeamError("connecting the ranks", f"others may enter the folder {path.parent}")
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise TeamError("connecting the ranks", f"the path {path} is longer than {LONGEST_PATH} bytes")
