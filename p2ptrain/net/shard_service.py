"""Shard protocol: every node says which shards of the run's text it has, and sends them by digest.

::

    initiator                          responder
    ["held", root]             ->
                               <-      ["held", here, coming]: the shards that are here, and those that are on their
                                       way; bit n % 8 of byte n // 8 for the index's digest n; empty for another root
    ["piece", sha256, offset]  ->
                               <-      as in the file protocol, with pieces of PIECE_BYTES; or ["busy"]
    ["enough"]                 ->

The initiator must compare the shard's digest; nothing else protects it from a false one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.net.file_service import PieceServer, download
from p2ptrain.net.links import Limits
from p2ptrain.net.rate_limiter import RateLimit, RateLimiter
from p2ptrain.net.rpc import receive_message, send_message
from p2ptrain.net.throttle import Throttles
from p2ptrain.ports import Clock, Link
from p2ptrain.tokens.fetch_plan import GRACE_S, LEAST_BYTES_PER_S
from p2ptrain.tokens.index import SHARD_BYTES, ShardIndex
from p2ptrain.tokens.store import ShardStore

SHARDS_PROTOCOL = "/p2ptrain/shards/1"

LIMITS = Limits(inbound=32, inbound_per_peer=4)
"""Limits of the protocol's streams. Guess: concurrent newcomers per peer in real runs would settle it."""
PIECE_BYTES = 256 << 10
"""Size of a piece: two seconds at 1 Mbit/s, so that a slow source is soon noticed."""
MOST_SERVED = 3
"""Shards sent at once: the first of them soon arrives and is passed on. Of 100 peers that begin at once, the median
begins after 9 s in simulation, with 6 at once after 14 s (bench/carry.py)."""
QUEUE_S, MOST_WAITING = 10.0, 24
"""How long, and how many, may wait at a bootstrap until it has sent another shard: who has got least comes first. All
others hear that the node is busy, and ask elsewhere. If all had to ask again, some of 100 peers would try for a
minute."""
MOST_REMEMBERED = 1024
"""Peers of which the queue knows how much they have got."""
MOST_SERVED_TO_ONE = 2
SLOW_PAUSE_S = 60.0
"""Time for which a peer gets nothing after a slow transfer was ended, so that it does not take the place again at once.
Guess: how long others wait at a busy source."""
LONGEST_S = 240.0
"""Longest duration of a stream: a shard at 140 kbit/s."""
MOST_HELD = 8 * (24 << 10)
"""Digests that a bitmap tells of: the first 800 GB of an index."""
MAX_HELD_BYTES = 50 << 10
"""Largest message of the protocol."""
HELD_S = 5.0
"""Seconds for which a bitmap is sent again without a look at the disk."""
EACH = RateLimit(burst=32.0 * SHARD_BYTES, per_s=SHARD_BYTES / 4.0)
"""Bytes sent to one peer: two windows at once, then 0.5 M tokens of 2 bytes a second, more than a card trains of a
small model. Guess: the throughput of the fastest peers of real runs."""
OVERALL = RateLimit(burst=256.0 * SHARD_BYTES, per_s=SHARD_BYTES / 2.0)
"""Bytes sent to all peers, where the owner has no lower cap: a peer sends on average what it takes. Guess: how many
newcomers a run has in an hour."""
OF_A_BOOTSTRAP = RateLimit(burst=1024.0 * SHARD_BYTES, per_s=4.0 * SHARD_BYTES)
"""Bytes that a bootstrap, whose caps its owner sets, sends to all peers: 134 Mbit/s."""


@dataclass(slots=True)
class _ShardTransfer:
    """Shards that go to one link."""

    began: float
    deadline: asyncio.Timeout
    left: int = 0
    """Bytes that are counted already, and not sent yet."""
    sent: int = 0


class ShardServer(PieceServer):
    """Server of the shards of one index that are in a store.

    Args:
        rates: say whether this node serves others.
        coming: returns the numbers of the digests that this node is fetching.
        queue_s: how long others wait here if too many are served.
    """

    def __init__(
        self,
        index: ShardIndex,
        store: ShardStore,
        rates: Throttles | None = None,
        clock: Clock = time.monotonic,
        overall: RateLimit = OVERALL,
        coming: Callable[[], Collection[int]] = tuple,
        queue_s: float = 0.0,
    ) -> None:
        super().__init__("shards", rates, clock, RateLimiter(EACH, overall))
        self.digests = frozenset(index.digests)
        """Digests of the shards that are served."""
        self.store = store
        self._index, self._root = index, bytes.fromhex(index.root)
        self._coming = coming
        self._told, self._told_at = b"", -HELD_S
        self._transfers: dict[Link, _ShardTransfer] = {}
        self._deadlines: dict[Link, asyncio.Timeout] = {}
        self._queue_s = queue_s
        self._waiting: dict[Link, asyncio.Event] = {}
        self._sent: BoundedDict[PeerId, int] = BoundedDict(MOST_REMEMBERED)
        """Shards that each peer has got."""
        self._paused: BoundedDict[PeerId, float] = BoundedDict(MOST_REMEMBERED)
        """Until when each peer gets nothing."""

    async def piece(self, sha256: str, offset: int) -> tuple[int, bytes]:
        if sha256 not in self.digests:  # another run's, which may be a closed one
            return 0, b""
        return await asyncio.to_thread(self.store.read, sha256, offset, PIECE_BYTES)

    async def answer(self, link: Link) -> None:
        try:
            async with asyncio.timeout(LONGEST_S) as self._deadlines[link]:
                await super().answer(link)
        except TimeoutError:
            raise NetworkError(f"{short(link.peer)} takes too long to get a shard") from None
        finally:
            del self._deadlines[link]
            if self._transfers.pop(link, None) is not None:
                self._sent[link.peer] = self._sent.get(link.peer, 0) + 1
            self._wake()

    async def admits_later(self, link: Link, total_bytes: int, size_bytes: int) -> bool:
        is_paused = self._paused.get(link.peer, 0.0) > self._clock()
        if not self._queue_s or not total_bytes or link in self._transfers or is_paused:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._queue_s):
                while len(self._transfers) >= MOST_SERVED and len(self._waiting) < MOST_WAITING:
                    self._waiting[link] = asyncio.Event()
                    try:
                        await self._waiting[link].wait()
                    finally:
                        del self._waiting[link]
                    if self.admits(link, total_bytes, size_bytes):
                        return True
                self._wake()  # this one has had too much
        return False

    def _wake(self) -> None:
        """Let the one try again that has got least of those who wait."""
        waiting = [link for link, event in self._waiting.items() if not event.is_set()]
        if waiting and len(self._transfers) < MOST_SERVED:
            self._waiting[min(waiting, key=lambda link: self._sent.get(link.peer, 0))].set()

    def admits(self, link: Link, total_bytes: int, size_bytes: int) -> bool:
        """Count a shard as a whole at its first piece, so that nobody is refused in the middle of one."""
        if not total_bytes:
            return super().admits(link, 0, 0)
        transfer = self._transfers.get(link)
        if transfer is None:
            served = sum(each.peer == link.peer for each in self._transfers)
            if self._paused.get(link.peer, 0.0) > self._clock():
                return False
            if len(self._transfers) >= MOST_SERVED:
                self._end_slow_ones()
            if len(self._transfers) >= MOST_SERVED or served >= MOST_SERVED_TO_ONE:
                return False
            transfer = _ShardTransfer(self._clock(), self._deadlines[link])
        if transfer.left < size_bytes:
            if not super().admits(link, total_bytes, total_bytes):
                return False
            transfer.left += total_bytes
        transfer.left -= size_bytes
        transfer.sent += size_bytes
        self._transfers[link] = transfer
        return True

    def _end_slow_ones(self) -> None:
        """End slow transfers, whose places another peer wants. Those that our own cap slows go on."""
        now, least = self._clock(), min(LEAST_BYTES_PER_S, self._rates.up.rate / (2 * MOST_SERVED))
        for link, transfer in self._transfers.items():
            lasts_s = now - transfer.began
            if lasts_s > GRACE_S and transfer.sent < least * lasts_s and not transfer.deadline.expired():
                transfer.deadline.reschedule(0.0)
                self._paused[link.peer] = now + SLOW_PAUSE_S

    async def refuse(self, link: Link) -> None:
        await send_message(link, ["busy"])

    async def other(self, link: Link, request: list[Any]) -> None:
        match request:
            case ["held", bytes(root)]:
                self.check(link)
                is_ours = root == self._root
                told = [await self._bitmap(), bitmap(self._coming())] if is_ours else [b"", b""]
                if not super().admits(link, 0, len(told[0])):
                    raise NetworkError(f"{short(link.peer)} asked too often which shards are here")
                await send_message(link, ["held", *told])
            case _:
                await super().other(link, request)

    def leave_out(self, digest: str) -> None:
        """Serve a shard no more: its file is damaged."""
        self.digests -= {digest}
        self._told_at = -HELD_S

    async def _bitmap(self) -> bytes:
        if self._clock() - self._told_at >= HELD_S:
            self._told_at = self._clock()
            held = await asyncio.to_thread(self.store.held, self._index)
            self._told = bitmap([number for number in held if self._index.digests[number] in self.digests])
        return self._told


def bitmap(held: Collection[int]) -> bytes:
    """Return the numbers below ``MOST_HELD`` as bits."""
    numbers = [number for number in held if number < MOST_HELD]
    bits = np.zeros(max(numbers, default=-1) + 1, dtype=np.uint8)
    bits[numbers] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def among(bits: bytes, numbers: Iterable[int]) -> frozenset[int]:
    """Return those of the numbers that a bitmap has."""
    return frozenset(each for each in numbers if each // 8 < len(bits) and bits[each // 8] >> each % 8 & 1)


async def ask_held(link: Link, root: str) -> tuple[bytes, bytes]:
    """Return two bitmaps: of the shards that the other side has, and of those that it is fetching.

    Raises NetworkError and RemoteError.
    """
    await send_message(link, ["held", bytes.fromhex(root)])
    match await receive_message(link, "shards", MAX_HELD_BYTES):
        case ["held", bytes(here), bytes(coming)]:
            return here, coming
        case other:
            raise RemoteError(f"expected the shards that are there, got {str(other)[:120]}")


async def fetch_shard(link: Link, digest: str, received: Callable[[int], None]) -> bytes | None:
    """Return a shard, unchecked; None if the other side does not have it.

    Args:
        received: called with the bytes that have come, after each piece.

    Raises BusyError, NetworkError and RemoteError.
    """
    have = bytearray()
    return bytes(have) if await download(link, digest, have, SHARD_BYTES, PIECE_BYTES, received) else None
