"""Shard protocol: every node says which shards of the run's text it has, and sends them by digest.

::

    initiator                          responder
    ["held", root]             ->
                               <-      ["held", bitmap]: bit n % 8 of byte n // 8 for the index's digest n; empty for
                                       another root, or if nothing is here
    ["piece", sha256, offset]  ->
                               <-      as in the file protocol
    ["enough"]                 ->

The initiator must compare the shard's digest; nothing else protects it from a false one.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

from p2ptrain.base.errors import RemoteError
from p2ptrain.net.file_service import PIECE_BYTES, PieceServer
from p2ptrain.net.links import Limits
from p2ptrain.net.rate_limiter import RateLimit, RateLimiter
from p2ptrain.net.rpc import receive_message, send_message
from p2ptrain.net.throttle import Throttles
from p2ptrain.ports import Clock, Link
from p2ptrain.tokens.index import SHARD_BYTES, ShardIndex
from p2ptrain.tokens.store import ShardStore

SHARDS_PROTOCOL = "/p2ptrain/shards/1"

LIMITS = Limits(inbound=16, inbound_per_peer=3)
"""Limits of the protocol's streams. Guess: concurrent newcomers per peer in real runs would settle it."""
MOST_HELD = 8 * (48 << 10)
"""Digests that a bitmap tells of: the first 1.6 TB of an index."""
MAX_HELD_BYTES = 49 << 10
"""Largest message of the protocol."""
HELD_S = 5.0
"""Seconds for which a bitmap is told again without a look at the disk."""
EACH = RateLimit(burst=32.0 * SHARD_BYTES, per_s=SHARD_BYTES / 4.0)
"""Bytes sent to one peer: two windows at once, then 0.5 M tokens of 2 bytes a second, more than a card trains of a
small model. Guess: the throughput of the fastest peers of real runs."""
OVERALL = RateLimit(burst=256.0 * SHARD_BYTES, per_s=SHARD_BYTES / 2.0)
"""Bytes sent to all peers, where the owner has no lower cap: a peer sends on average what it takes. Guess: how many
newcomers a run has in an hour."""
OF_A_BOOTSTRAP = RateLimit(burst=1024.0 * SHARD_BYTES, per_s=4.0 * SHARD_BYTES)
"""The same of a bootstrap, whose caps its owner sets: 134 Mbit/s."""


class ShardServer(PieceServer):
    """Server of the shards of one index that are in a store.

    Args:
        rates: say whether this node serves others.
    """

    def __init__(
        self,
        index: ShardIndex,
        store: ShardStore,
        rates: Throttles | None = None,
        clock: Clock = time.monotonic,
        overall: RateLimit = OVERALL,
    ) -> None:
        super().__init__("shards", rates, clock, RateLimiter(EACH, overall))
        self._root, self._digests = bytes.fromhex(index.root), frozenset(index.digests)
        self._index, self._store = index, store
        self._told, self._told_at = b"", -HELD_S

    async def piece(self, sha256: str, offset: int) -> tuple[int, bytes]:
        if sha256 not in self._digests:  # another run's, which may be a closed one
            return 0, b""
        return await asyncio.to_thread(self._store.read, sha256, offset, PIECE_BYTES)

    async def other(self, link: Link, request: list[Any]) -> None:
        match request:
            case ["held", bytes(root)]:
                self.check(link)
                told = await self._bitmap() if root == self._root else b""
                self.charge(link, len(told))
                await send_message(link, ["held", told])
            case _:
                await super().other(link, request)

    async def _bitmap(self) -> bytes:
        if self._clock() - self._told_at >= HELD_S:
            self._told_at = self._clock()
            self._told = bitmap(await asyncio.to_thread(self._store.held, self._index))
        return self._told


def bitmap(held: frozenset[int]) -> bytes:
    """Return the numbers below ``MOST_HELD`` as bits."""
    numbers = [number for number in held if number < MOST_HELD]
    bits = np.zeros(max(numbers, default=-1) + 1, dtype=np.uint8)
    bits[numbers] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def numbers_in(bits: bytes, shards: int) -> frozenset[int]:
    """Return the numbers of a bitmap, those below ``shards``."""
    found = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")[:shards]
    return frozenset(np.flatnonzero(found).tolist())


async def ask_held(link: Link, index: ShardIndex) -> frozenset[int]:
    """Return the numbers of the digests whose shards the other side has. Raises NetworkError and RemoteError."""
    await send_message(link, ["held", bytes.fromhex(index.root)])
    match await receive_message(link, "shards", MAX_HELD_BYTES):
        case ["held", bytes(bits)] if len(bits) <= -(-len(index.digests) // 8):
            return numbers_in(bits, len(index.digests))
        case other:
            raise RemoteError(f"expected the shards that are there, got {str(other)[:120]}")
