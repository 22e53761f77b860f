"""The control socket of a running peer, a Unix socket: one JSON line per request, one per answer.

::

    HOME/control.sock    the socket, mode 0600
    HOME/control.path    used instead if the home's path is too long for a socket or its disk supports none: a file
                         with the path of the socket, which is in a private folder of the temporary directory

The peer removes both when it ends. After SIGKILL a leftover socket refuses connections, and the next start, which holds
the home's lock, removes it. Requests and answers have maximum sizes and deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from p2ptrain.base import files
from p2ptrain.base.errors import HomeError
from p2ptrain.base.text import command_line
from p2ptrain.manifest import SIGNED_FILE
from p2ptrain.net.p2pd.socket_folder import SocketFolder
from peer.home import check_no_other

SOCKET = "control.sock"
POINTER = "control.path"
LONGEST_PATH = 100
"""Maximum bytes of a socket's path; macOS accepts 103, Linux 107."""
MAX_REQUEST = 4 << 10
MAX_ANSWER = 64 << 10
REQUEST_DEADLINE_S = 2.0
"""Seconds for a client to send its request, and to read the answer. Guess: the delays of clients on a loaded
machine."""
ANSWER_DEADLINE_S = 10.0
"""Seconds for the peer to begin to answer. Guess: the answer times of a peer on a loaded machine."""

Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class NotRunningError(HomeError):
    """No peer runs in the home."""


class ControlServer:
    """The peer's side of the control socket, in its loop; requires the home's lock. ``close`` removes all files.

    Args:
        answer: carries out a request. A request whose client has gone is not carried out, because that client has
            reported a failure to the owner; an invalid one is ignored.
    """

    def __init__(self, home: Path, answer: Answer) -> None:
        self._home = home.resolve()
        self._answer = answer
        self._folder: SocketFolder | None = None
        self._server: asyncio.Server | None = None
        self.path = self._home / SOCKET

    async def start(self) -> None:
        """Create the socket and serve it. Raises OSError, or DeviceError if nothing on this machine takes sockets."""
        _remove(self._home)
        try:
            if len(os.fsencode(self.path)) > LONGEST_PATH:
                raise OSError("the path is too long")
            listener = _listen(self.path)
        except OSError:
            self._folder = SocketFolder.create()
            self.path = self._folder.path / SOCKET
            try:
                listener = _listen(self.path)
                (self._home / POINTER).write_text(str(self.path), encoding="utf-8")
            except OSError:
                self._folder.remove()
                raise
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=MAX_REQUEST)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_DEADLINE_S):
                request = json.loads(await reader.readuntil(b"\n"))
            if isinstance(request, dict) and not _has_left(writer.get_extra_info("socket")):
                writer.write(json.dumps(self._answer(request), allow_nan=False).encode() + b"\n")
                async with asyncio.timeout(REQUEST_DEADLINE_S):
                    await writer.drain()
        except (OSError, EOFError, asyncio.LimitOverrunError, ValueError, RecursionError):
            writer.transport.abort()
        finally:
            writer.close()

    def exists(self) -> bool:
        """Return whether clients still find the socket, and mark it as used, for cleaners of temporary directories."""
        try:
            os.utime(self.path)
            return self._folder is None or files.exists(self._home / POINTER)
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        _remove(self._home)
        if self._folder is not None:
            self._folder.remove()


def ask(home: Path, **request: Any) -> dict[str, Any]:
    """Send a request to the peer in a home; return its answer.

    Raises:
        NotRunningError: no peer runs there.
        HomeError: the peer belongs to another user, or does not answer.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_DEADLINE_S)
            connection.connect(str(_where(home.resolve())))
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer = json.loads(connection.makefile("rb").readline(MAX_ANSWER))
    except (FileNotFoundError, ConnectionRefusedError):
        try:
            check_no_other(home)
        except HomeError as error:
            raise NotRunningError(error.problem, error.remedy) from None
        if not (home / SIGNED_FILE).exists():
            raise NotRunningError(
                f"There is no peer in {home} yet.", "Name the peer's home directory, as with --home."
            ) from None
        raise NotRunningError(
            f"No peer runs in {home}.", f"Start it: {command_line('p2ptrain', 'peer', '--home', home)}"
        ) from None
    except PermissionError:
        raise HomeError(
            f"The peer in {home} belongs to another user.", "Run this command as the user who started it."
        ) from None
    except (OSError, ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise HomeError(
            f"The peer in {home} does not answer.",
            "Try again, or press Ctrl+C in its own terminal; it may be frozen or about to end.",
        )
    return answer


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        path.chmod(0o600)  # no client can connect before listen()
        listener.listen(8)
        listener.setblocking(False)
    except OSError:
        listener.close()
        path.unlink(missing_ok=True)
        raise
    return listener


def _where(home: Path) -> Path:
    """Return the path of a home's socket. Raises FileNotFoundError if there can be none."""
    with contextlib.suppress(FileNotFoundError):
        return Path((home / POINTER).read_text(encoding="utf-8"))
    if len(os.fsencode(home / SOCKET)) > LONGEST_PATH:
        raise FileNotFoundError(home / POINTER)
    return home / SOCKET


def _has_left(connection: socket.socket) -> bool:
    """Return whether the other side has closed its socket, not only its writing end."""
    poller = select.poll()
    poller.register(connection, 0)  # POLLHUP and POLLERR are always reported
    return bool(poller.poll(0))


def _remove(home: Path) -> None:
    for name in (SOCKET, POINTER):
        (home / name).unlink(missing_ok=True)
