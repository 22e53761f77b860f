"""File protocol: every node sends files that the run's manifest names by digest to peers that lack them.

::

    initiator                          responder
    ["piece", sha256, offset]  ->
                               <-      ["piece", total]: the file's size, 0 if it is not here; then,
                                       if total > offset, at most PIECE_BYTES from there as payload
    ["enough"]                 ->

Requests and responses alternate on one stream. A download that breaks off continues at its offset, also from another
peer. The initiator must compare the whole file's digest; nothing else protects it from a false file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

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
_MAX_MESSAGE_BYTES = 64
_MAX_WORDS = 120


class FileServer:
    """Server of this node's files.

    Args:
        files: path of each file, by its SHA-256 in hexadecimal digits.
        rates: say whether this node serves others.
    """

    def __init__(
        self, files: Mapping[str, Path], rates: Throttles | None = None, clock: Clock = time.monotonic
    ) -> None:
        self._files = files
        self._rates = rates or Throttles()
        self._clock = clock
        self._limits: RateLimiter[PeerId] = RateLimiter(EACH, OVERALL)

    async def answer(self, link: Link) -> None:
        """Serve a stream until its initiator has enough. Raises NetworkError and RemoteError."""
        while True:
            match await receive_message(link, "files", _MAX_MESSAGE_BYTES):
                case ["piece", bytes(digest), int(offset)] if len(digest) == 32 and 0 <= offset < MOST_STORED_BYTES:
                    await self._send(link, digest.hex(), offset)
                case ["enough"]:
                    return
                case other:
                    raise RemoteError(f"expected a request for a file, got {str(other)[:_MAX_WORDS]}")

    async def _send(self, link: Link, sha256: str, offset: int) -> None:
        if self._rates.rests or not self._rates.gives:
            raise NetworkError(f"{short(link.peer)} asked for a file, but this peer is not serving any")
        path = self._files.get(sha256)
        total, piece = (0, b"") if path is None else await asyncio.to_thread(_read, path, offset)
        if not self._limits.admits(link.peer, self._clock(), max(len(piece), MIN_COST)):
            raise NetworkError(f"{short(link.peer)} sent too many file requests")
        await send_message(link, ["piece", total])
        if piece:
            await send_payload(link, [piece])


async def download(link: Link, sha256: str, have: bytearray) -> bool:
    """Append to ``have`` what is missing of a file, at most ``MOST_STORED_BYTES`` in all, without checking its digest.

    Returns False if the other side does not have it. Raises NetworkError and RemoteError, the latter also if the other
    side's file is not longer than ``have``, which keeps all whole pieces.
    """
    while True:
        await send_message(link, ["piece", bytes.fromhex(sha256), len(have)])
        match await receive_message(link, "files", _MAX_MESSAGE_BYTES):
            case ["piece", int(total)] if total == 0 or len(have) < total <= MOST_STORED_BYTES:
                pass
            case other:
                raise RemoteError(f"expected the size of a file, got {str(other)[:_MAX_WORDS]}")
        if total == 0:
            return False
        [piece] = await receive_payload(link, [min(PIECE_BYTES, total - len(have))])
        have += piece
        if len(have) == total:
            with contextlib.suppress(NetworkError):  # the other side may have closed the link
                await send_message(link, ["enough"])
            return True


async def size_of(link: Link, sha256: str) -> int:
    """Return the size of a file that the other side would send, 0 if it has none, without its content.

    Raises NetworkError and RemoteError.
    """
    await send_message(link, ["piece", bytes.fromhex(sha256), MOST_STORED_BYTES - 1])  # the last byte, at most
    match await receive_message(link, "files", _MAX_MESSAGE_BYTES):
        case ["piece", int(total)] if 0 <= total <= MOST_STORED_BYTES:
            return total
        case other:
            raise RemoteError(f"expected the size of a file, got {str(other)[:_MAX_WORDS]}")


def _read(path: Path, offset: int) -> tuple[int, bytes]:
    """Return a file's size and a piece of it; 0 and nothing if it can no longer be read."""
    try:
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            return total, os.pread(file.fileno(), PIECE_BYTES, offset)
    except OSError:
        return 0, b""
