"""The Unix socket by which an owner speaks to the peer that lives in a home: one JSON line in, one JSON line out.

::

    HOME/control.sock    the socket, mode 0600: whoever may write into the home may give orders
    HOME/control.path    instead of it, where the home's path is too long for a socket or its disk takes none: a file
                         that says where the socket is, in a private folder of the temporary directory

Both are gone after the process, but for SIGKILL: what that leaves behind refuses connections, and the next start, which
holds the home's lock, removes it. Requests and answers are capped, and nobody waits for the other side for long.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from p2ptrain.base.errors import HomeError
from p2ptrain.net.p2pd.socket_folder import SocketFolder
from peer.home import check_no_other

SOCKET = "control.sock"
POINTER = "control.path"
LONGEST_PATH = 100
"""Bytes; macOS takes 103, Linux 107."""
MAX_REQUEST = 4 << 10
MAX_ANSWER = 64 << 10
REQUEST_DEADLINE_S = 2.0
"""For a client to say what it wants, and to take the answer: meanwhile others wait. A guess."""
ANSWER_DEADLINE_S = 10.0
"""For the peer to answer: it may be busy with others, each for ``REQUEST_DEADLINE_S`` at most. A guess."""

Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class NotRunningError(HomeError):
    """No peer runs in that home."""


class ControlServer:
    """The peer's side; it holds the home's lock. ``close`` leaves nothing behind."""

    def __init__(self, home: Path) -> None:
        """Raises OSError."""
        home = home.resolve()
        _remove(home)
        self._home = home
        self._folder: SocketFolder | None = None
        try:
            if len(os.fsencode(home / SOCKET)) > LONGEST_PATH:
                raise OSError("the path is too long")
            self.socket = _listen(home / SOCKET)
        except OSError:
            self._folder = SocketFolder.create()
            try:
                self.socket = _listen(self._folder.path / SOCKET)
                (home / POINTER).write_text(str(self._folder.path / SOCKET), encoding="utf-8")
            except OSError:
                self._folder.remove()
                raise

    def serve(self, answer: Answer) -> bool:
        """Take in one client that waits, and answer it. One that goes away or speaks nonsense gets none.

        What is no longer waited for is not done: its client has told the owner that it failed.

        False: it could not be taken in and may wait still, as where no file descriptor is left.
        """
        try:
            connection, _ = self.socket.accept()
        except OSError:
            return False
        with contextlib.suppress(OSError, ValueError), connection:
            request = _parse(_read_line(connection, MAX_REQUEST, REQUEST_DEADLINE_S))
            if isinstance(request, dict) and not _has_left(connection):
                line = json.dumps(answer(request), allow_nan=False).encode() + b"\n"
                connection.settimeout(REQUEST_DEADLINE_S)
                connection.sendall(line)
        return True

    def close(self) -> None:
        self.socket.close()
        _remove(self._home)
        if self._folder is not None:
            self._folder.remove()


def ask(home: Path, **request: Any) -> dict[str, Any]:
    """What the peer in that home answers. Raises HomeError: it is not ours, or does not; NotRunningError: none runs."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_DEADLINE_S)
            connection.connect(str(_where(home.resolve())))
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer = _parse(_read_line(connection, MAX_ANSWER, ANSWER_DEADLINE_S))
    except (FileNotFoundError, ConnectionRefusedError):
        try:
            check_no_other(home)
        except HomeError as error:
            raise NotRunningError(error.problem, error.remedy) from None
        raise NotRunningError(f"No peer runs in {home}.", f"Start it: p2ptrain peer --home {home}") from None
    except PermissionError:
        raise HomeError(
            f"The peer in {home} is another user's.", "Give this command as the user who started it."
        ) from None
    except (OSError, ValueError):
        answer = None
    if not isinstance(answer, dict):
        raise HomeError(
            f"The peer in {home} does not answer.",
            "It may be frozen, or ending just now. Try again; Ctrl+C in its own terminal stops it too.",
        )
    return answer


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        path.chmod(0o600)  # nobody can connect before we listen
        listener.listen(8)
        listener.setblocking(False)
    except OSError:
        listener.close()
        path.unlink(missing_ok=True)
        raise
    return listener


def _where(home: Path) -> Path:
    """Raises FileNotFoundError where it can be nowhere: nobody is there."""
    with contextlib.suppress(FileNotFoundError):
        return Path((home / POINTER).read_text(encoding="utf-8"))
    if len(os.fsencode(home / SOCKET)) > LONGEST_PATH:
        raise FileNotFoundError(home / POINTER)
    return home / SOCKET


def _read_line(connection: socket.socket, most: int, deadline_s: float) -> bytes:
    """Up to a newline. Raises OSError when that takes too long or they are gone, ValueError when it is too long."""
    line = bytearray()
    end = time.monotonic() + deadline_s
    while not line.endswith(b"\n"):
        connection.settimeout(max(end - time.monotonic(), 0.001))
        part = connection.recv(4096)
        if not part:
            raise ConnectionError("closed")
        line += part
        if len(line) > most:
            raise ValueError("too long")
    return bytes(line)


def _has_left(connection: socket.socket) -> bool:
    """Whether the other side has closed its socket, and not its writing end alone."""
    poller = select.poll()
    poller.register(connection, 0)  # POLLHUP and POLLERR are always told
    return bool(poller.poll(0))


def _parse(line: bytes) -> Any:
    """What a line of JSON says. Raises ValueError."""
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError("lists in lists in lists") from None


def _remove(home: Path) -> None:
    for name in (SOCKET, POINTER):
        (home / name).unlink(missing_ok=True)
