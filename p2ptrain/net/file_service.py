"""File protocol: every node sends files that the run's manifest names by digest to peers that lack them.

::

    initiator                          responder
    ["piece", sha256, offset]  ->
                               <-      ["piece", total]: the file's size, 0 if it is not here; then,
                                       if total > offset, at most PIECE_BYTES from there as payload
    ["enough"]                 ->

Requests and responses alternate on one stream. The initiator must compare the whole file's digest; nothing else
protects it from a false file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.data.file_store import MOST_STORED_BYTES
from p2ptrain.net.links import Limits
from p2ptrain.net.payload import receive_payload, send_payload
from p2ptrain.net.rate_limiter import RateLimit, RateLimiter
from p2ptrain.net.rpc import receive_message, send_message
from p2ptrain.net.throttle import Throttles
from p2ptrain.ports import Clock, Link

FILES_PROTOCOL = "/p2ptrain/files/1"

LIMITS = Limits(inbound=8, inbound_per_peer=2)
"""Limits of the protocol's streams. Guess: concurrent newcomers per peer in real runs would settle it."""
PIECE_BYTES = 1 << 20
"""Size of a piece: what an interrupted download loses at most."""
EACH = RateLimit(burst=4.5 * MOST_STORED_BYTES, per_s=4.5 * MOST_STORED_BYTES / 3600.0)
"""Bytes sent to one peer: a tokenizer, a corpus and initial weights, and half of them again."""
OVERALL = RateLimit(burst=36.0 * MOST_STORED_BYTES, per_s=36.0 * MOST_STORED_BYTES / 3600.0)
"""Bytes sent to all peers: on average 0.7 MB/s. Guess: how many newcomers a run has in an hour."""
MIN_COST = 4096
"""Bytes that a request costs at least, so that requests for missing files are limited, too."""
MAX_MESSAGE_BYTES = 64
_MAX_WORDS = 120


class BusyError(NetworkError):
    """The other side serves others at the moment."""


class PieceServer(ABC):
    """Server of things that have a SHA-256, a piece at a time.

    Args:
        about: what is served, for errors' texts.
        rates: say whether this node serves others.
        limits: bytes sent to one peer, and to all.
    """

    def __init__(self, about: str, rates: Throttles | None, clock: Clock, limits: RateLimiter[PeerId]) -> None:
        self._about = about
        self._rates = rates or Throttles()
        self._clock = clock
        self._limits = limits

    @abstractmethod
    async def piece(self, sha256: str, offset: int) -> tuple[int, bytes]:
        """Return a thing's size and at most ``PIECE_BYTES`` of it; 0 and nothing if it is not here."""

    async def other(self, link: Link, request: list[Any]) -> None:
        """Answer another request than for a piece. Raises RemoteError if there is none of that kind."""
        raise RemoteError(f"expected a request for {self._about}, got {str(request)[:_MAX_WORDS]}")

    async def answer(self, link: Link) -> None:
        """Serve a stream until its initiator has enough. Raises NetworkError and RemoteError."""
        while True:
            match await receive_message(link, self._about, MAX_MESSAGE_BYTES):
                case ["piece", bytes(digest), int(offset)] if len(digest) == 32 and 0 <= offset < MOST_STORED_BYTES:
                    await self._send(link, digest.hex(), offset)
                case ["enough"]:
                    return
                case request:
                    await self.other(link, request)

    async def _send(self, link: Link, sha256: str, offset: int) -> None:
        self.check(link)
        total, piece = await self.piece(sha256, offset)
        if not (self.admits(link, total, len(piece)) or await self.admits_later(link, total, len(piece))):
            await self.refuse(link)
            return
        await send_message(link, ["piece", total])
        if piece:
            await send_payload(link, [piece])

    def check(self, link: Link) -> None:
        """Raise NetworkError if this node does not serve now."""
        if self._rates.rests or not self._rates.gives:
            raise NetworkError(f"{short(link.peer)} asked for {self._about}, but this peer is not serving any")

    def admits(self, link: Link, total_bytes: int, size_bytes: int) -> bool:
        """Return whether the other side may have ``size_bytes`` of a thing now, and count them."""
        return self._limits.admits(link.peer, self._clock(), max(size_bytes, MIN_COST))

    async def admits_later(self, link: Link, total_bytes: int, size_bytes: int) -> bool:
        """Wait until the other side may have what it may not have now; return False if that takes too long."""
        return False

    async def refuse(self, link: Link) -> None:
        """Tell the other side that it may have nothing now. Raises NetworkError to close the link instead."""
        raise NetworkError(f"{short(link.peer)} sent too many requests for {self._about}")


class FileServer(PieceServer):
    """Server of this node's files.

    Args:
        files: path of each file, by its SHA-256 in hexadecimal digits.
        rates: say whether this node serves others.
    """

    def __init__(
        self, files: Mapping[str, Path], rates: Throttles | None = None, clock: Clock = time.monotonic
    ) -> None:
        super().__init__("files", rates, clock, RateLimiter(EACH, OVERALL))
        self._files = files

    async def piece(self, sha256: str, offset: int) -> tuple[int, bytes]:
        path = self._files.get(sha256)
        return (0, b"") if path is None else await asyncio.to_thread(read_piece, path, offset)


async def download(
    link: Link,
    sha256: str,
    have: bytearray,
    most_bytes: int = MOST_STORED_BYTES,
    piece_bytes: int = PIECE_BYTES,
    received: Callable[[int], None] = lambda size: None,
) -> bool:
    """Append to ``have`` what is missing of a file, at most ``most_bytes`` in all, without checking its digest.

    Args:
        received: called with the size of ``have`` after each piece.

    Returns False if the other side does not have it. Raises BusyError, NetworkError and RemoteError, the latter also if
    the other side's file is not longer than ``have``, which keeps all whole pieces.
    """
    while True:
        await send_message(link, ["piece", bytes.fromhex(sha256), len(have)])
        match await receive_message(link, "files", MAX_MESSAGE_BYTES):
            case ["piece", int(total)] if total == 0 or len(have) < total <= most_bytes:
                pass
            case ["busy"]:
                raise BusyError(f"{short(link.peer)} serves others at the moment")
            case other:
                raise RemoteError(f"expected the size of a file, got {str(other)[:_MAX_WORDS]}")
        if total == 0:
            return False
        [piece] = await receive_payload(link, [min(piece_bytes, total - len(have))])
        have += piece
        received(len(have))
        if len(have) == total:
            with contextlib.suppress(NetworkError):  # the other side may have closed the link
                await send_message(link, ["enough"])
            return True


def read_piece(path: Path, offset: int) -> tuple[int, bytes]:
    """Return a file's size and a piece of it; 0 and nothing if it can no longer be read."""
    try:
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            return total, os.pread(file.fileno(), PIECE_BYTES, offset)
    except OSError:
        return 0, b""
