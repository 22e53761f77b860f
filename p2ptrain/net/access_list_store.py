"""The author's rulings in the DHT, where every node finds the newest and keeps it alive.

One key a run, under it one subkey a serial, for an hour. Every node runs the validator: it stores and returns nothing
there but rulings that the run's author signed, none older than it knows itself. So nobody can put an older document in
a newer one's place, nor fill the key. Whoever sees that the newest is missing, or half through its hour, stores it
again: rulings live as long as anybody of the run does, with or without the author.
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
from hivemind.utils.timed_storage import get_dht_time

from p2ptrain.admission import MAX_RULINGS_BYTES, AccessList, Gate
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import RunId
from p2ptrain.net.dht import network_errors

logger = logging.getLogger(__name__)

LIFETIME_S = 3600.0
"""How long a node stores rulings. A guess: a swarm that sleeps for an hour asks its witness, or its disk."""
PERIOD_S = 30.0
"""Between two looks, times a random factor of .75 to 1.25: how soon a ban counts everywhere. A guess."""
DEADLINE_S = 15.0
"""For one look or one storing; as for presence records."""
CLOCK_SKEW_S = 300.0
"""As for presence records."""
STORED_ANYWAY = 1 / 64
"""The share of looks after which they are stored whatever was found: the hour in an answer is the word of the node that
answered, which may lie. About every half an hour; one of many nodes does it every minute."""


def access_list_key(run: RunId) -> str:
    """The DHT key of a run's rulings."""
    return f"p2ptrain.{run}.rulings"


@lru_cache(maxsize=64)
def key_bytes(run: RunId) -> bytes:
    """The same, as validators see it."""
    encoded: bytes = DHTID.generate(source=access_list_key(run)).to_bytes()
    return encoded


def may_be_stored(record: DHTRecord, gate: Gate) -> bool:
    """Whether a record under the rulings' key is what belongs there."""
    if not record.expiration_time <= get_dht_time() + LIFETIME_S + CLOCK_SKEW_S:  # nor is NaN
        return False
    try:
        value = msgpack.unpackb(record.value, max_bin_len=MAX_RULINGS_BYTES, max_map_len=0, max_array_len=0)
    except (ValueError, TypeError):
        return False
    rulings = _genuine(value, gate.run, gate.author) if type(value) is bytes else None
    return (
        rulings is not None
        and rulings.serial >= gate.rulings.serial
        and record.subkey == MSGPackSerializer.dumps(rulings.serial)
    )


class AccessListStore:
    """Keeps a gate's rulings and the DHT's the same: the newest of both. Survives NetworkError.

    Args:
        dht: the node of the day; raises NetworkError while there is none.
        on_news: called when the gate took newer rulings from the DHT.
    """

    def __init__(
        self, dht: Callable[[], DHTNode], gate: Gate, on_news: Callable[[], None], random: Random | None = None
    ) -> None:
        self._dht = dht
        self._gate = gate
        self._on_news = on_news
        self._random = random or Random()

    async def run(self) -> None:
        """Look now and then, for ever."""
        while True:
            try:
                await self.look()
            except NetworkError as error:
                logger.info("rulings: %s", error)
            await asyncio.sleep(PERIOD_S * self._random.uniform(0.75, 1.25))

    async def look(self) -> None:
        """One look; take what is newer, store what is missing. Raises NetworkError."""
        try:
            async with asyncio.timeout(DEADLINE_S), network_errors("the lookup"):
                found = await self._dht().get(access_list_key(self._gate.run), latest=True)
        except TimeoutError:
            raise NetworkError(f"the lookup took more than {DEADLINE_S:.0f} s") from None
        entries = found.value if found is not None and isinstance(found.value, dict) else {}
        lasts_until = 0.0
        for entry in entries.values():
            if type(entry.value) is bytes and self._take(entry.value):
                lasts_until = entry.expiration_time
        is_due = lasts_until < get_dht_time() + LIFETIME_S / 2 or self._random.random() < STORED_ANYWAY
        if self._gate.rulings.serial and is_due:
            await self.store()

    async def store(self) -> None:
        """Store the gate's rulings. Raises NetworkError."""
        rulings = self._gate.rulings
        try:
            async with asyncio.timeout(DEADLINE_S), network_errors("storing the rulings"):
                until = get_dht_time() + LIFETIME_S
                stored = await self._dht().store(
                    access_list_key(self._gate.run), rulings.encode(), until, subkey=rulings.serial
                )
        except TimeoutError:
            raise NetworkError(f"storing the rulings took more than {DEADLINE_S:.0f} s") from None
        if not stored:
            raise NetworkError("no node stored the rulings")

    def _take(self, encoded: bytes) -> bool:
        """Take in what is newer; whether these are the gate's rulings now."""
        rulings = _genuine(encoded, self._gate.run, self._gate.author)
        if rulings is None:  # a node may be modified
            return False
        if self._gate.take(encoded):
            self._on_news()
        return rulings.serial == self._gate.rulings.serial


@lru_cache(maxsize=32)
def _genuine(encoded: bytes, run: RunId, author: bytes) -> AccessList | None:
    """The rulings that these bytes spell, if the author signed them. Remembered: they come back with every look."""
    try:
        return AccessList.decode(encoded, run, author)
    except RemoteError:
        return None
