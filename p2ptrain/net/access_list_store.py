"""Access list in the DHT: every node finds the newest one there and keeps it stored.

Each run has one key with one subkey per serial number; a record lasts an hour. Every node runs the validator, which
stores and returns only access lists that the run's author signed and that are not older than its own. Therefore nobody
can replace a newer list by an older one or fill the key. A node stores the newest list again when it is missing or has
less than half an hour left, so the list survives as long as any node of the run, with or without the author.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import lru_cache
from random import Random

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer

from p2ptrain.admission import MAX_ACCESS_LIST_BYTES, AccessList, Gate
from p2ptrain.base.clock import CLOCK_SKEW_S, wall
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import RunId
from p2ptrain.net.dht import network_errors

logger = logging.getLogger(__name__)

LIFETIME_S = 3600.0
"""How long a node stores an access list; after a longer pause a swarm asks its invite issuer or reads its disk. Guess:
how long whole swarms are offline would settle it."""
PERIOD_S = 30.0
"""Mean time between two lookups (random factor .75 to 1.25), and so the delay until a ban takes effect everywhere.
Guess: the DHT's load in a large swarm would settle it."""
DEADLINE_S = 15.0
"""Timeout of one lookup or store, as for presence records."""
STORED_ANYWAY = 1 / 64
"""Share of lookups after which the list is stored whatever was found, because an answer's expiration time may be false.
A node does so about every half hour, and one of many nodes every minute."""


def access_list_key(run: RunId) -> str:
    """Return the DHT key of a run's access list."""
    return f"p2ptrain.{run}.rulings"


@lru_cache(maxsize=64)
def key_bytes(run: RunId) -> bytes:
    """Return ``access_list_key`` in the binary form that validators receive."""
    encoded: bytes = DHTID.generate(source=access_list_key(run)).to_bytes()
    return encoded


def may_be_stored(record: DHTRecord, gate: Gate) -> bool:
    """Return whether a record under the access list's key is an acceptable access list."""
    if not record.expiration_time <= wall() + LIFETIME_S + CLOCK_SKEW_S:  # nor is NaN
        return False
    try:
        value = msgpack.unpackb(record.value, max_bin_len=MAX_ACCESS_LIST_BYTES, max_map_len=0, max_array_len=0)
    except (ValueError, TypeError):
        return False
    access_list = _genuine(value, gate.run, gate.author) if type(value) is bytes else None
    return (
        access_list is not None
        and access_list.serial >= gate.access_list.serial
        and record.subkey == MSGPackSerializer.dumps(access_list.serial)
    )


class AccessListStore:
    """Synchronization of a gate's access list with the DHT: both keep the newest. Survives NetworkError.

    Args:
        dht: returns the current DHT node; raises NetworkError while there is none.
        on_news: called when the gate took a newer access list from the DHT.
    """

    def __init__(
        self, dht: Callable[[], DHTNode], gate: Gate, on_news: Callable[[], None], random: Random | None = None
    ) -> None:
        self._dht = dht
        self._gate = gate
        self._on_news = on_news
        self._random = random or Random()

    async def run(self) -> None:
        """Look up the access list every ``PERIOD_S``, forever."""
        while True:
            try:
                await self.look()
            except NetworkError as error:
                logger.info("access list: %s", error)
            await asyncio.sleep(PERIOD_S * self._random.uniform(0.75, 1.25))

    async def look(self) -> None:
        """Look up the access list once; take a newer one, store a missing one. Raises NetworkError."""
        async with network_errors("the lookup", DEADLINE_S):
            found = await self._dht().get(access_list_key(self._gate.run), latest=True)
        entries = found.value if found is not None and isinstance(found.value, dict) else {}
        lasts_until = 0.0
        for entry in entries.values():
            if type(entry.value) is bytes and self._take(entry.value):
                lasts_until = entry.expiration_time
        is_due = lasts_until < wall() + LIFETIME_S / 2 or self._random.random() < STORED_ANYWAY
        if self._gate.access_list.serial and is_due:
            await self.store()

    async def store(self) -> None:
        """Store the gate's access list. Raises NetworkError."""
        access_list = self._gate.access_list
        async with network_errors("storing the access list", DEADLINE_S):
            until = wall() + LIFETIME_S
            stored = await self._dht().store(
                access_list_key(self._gate.run), access_list.encode(), until, subkey=access_list.serial
            )
        if not stored:
            raise NetworkError("no node stored the access list")

    def _take(self, encoded: bytes) -> bool:
        """Take a newer access list; return whether it is the gate's now."""
        access_list = _genuine(encoded, self._gate.run, self._gate.author)
        if access_list is None:  # the answering node may be modified
            return False
        if self._gate.take(encoded):
            self._on_news()
        return access_list.serial == self._gate.access_list.serial


@lru_cache(maxsize=32)
def _genuine(encoded: bytes, run: RunId, author: bytes) -> AccessList | None:
    """Decode an access list; None if the author did not sign it. Cached, since every lookup returns the same bytes."""
    try:
        return AccessList.decode(encoded, run, author)
    except RemoteError:
        return None
