"""Directories of adversarial peers that announce false presence records."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import peer_of
from p2ptrain.net.identity import Identity
from p2ptrain.ports import Directory
from p2ptrain.swarm import PeerState, Presence

CROWD = 300
"""Peers that a crowd is said to have: a node stores 10 records per second of one sender, 200 at once
(``net.dht_protocol.EACH``), and each lasts 75 s."""
SILENCE_S = 3600.0
"""Time for which a call to the crowd gets no answer: longer than any deadline."""


@dataclass(slots=True)
class ForgingDirectory:
    """Directory that also announces other peers at its own address."""

    directory: Directory
    forged: tuple[Presence, ...] = ()
    """Copies of its last record under the names of all other known peers, with its own signature."""
    _own: Presence | None = None

    @property
    def size(self) -> int:
        return self.directory.size

    async def announce(self, presence: Presence) -> None:
        self._own = presence
        await self.directory.announce(presence)
        await self.lookup()
        for record in self.forged:
            with contextlib.suppress(NetworkError):  # no node stored it
                await self.directory.announce(record)

    async def lookup(self) -> list[Presence]:
        known = await self.directory.lookup()
        if (own := self._own) is not None:
            self.forged = tuple(replace(own, peer=other.peer) for other in known if other.peer != own.peer)
        return known

    async def keep_finished(self, presence: Presence) -> None:
        await self.directory.keep_finished(presence)

    async def finished(self) -> list[Presence]:
        return await self.directory.finished()


@dataclass(slots=True)
class CrowdDirectory:
    """Directory that also announces a crowd of peers that do not exist, each signed with a key of its own."""

    directory: Directory
    forged: tuple[Presence, ...] = ()
    """The crowd's last records."""
    _crowd: list[Identity] = field(default_factory=list)
    _server: asyncio.Server | None = None
    _announcing: asyncio.Task[None] | None = None

    @property
    def size(self) -> int:
        return self.directory.size

    async def announce(self, presence: Presence) -> None:
        await self.directory.announce(presence)
        if self._announcing is None or self._announcing.done():
            self._announcing = asyncio.get_running_loop().create_task(self._announce_crowd(presence))

    async def _announce_crowd(self, own: Presence) -> None:
        """Announce the crowd once, at an address where a call takes its whole timeout."""
        if self._server is None:
            self._server = await asyncio.start_server(_say_nothing, _host(own.addresses[0]), 0)
            keys = (Ed25519PrivateKey.generate() for _ in range(CROWD))
            self._crowd = [Identity(Path(), peer_of(key.public_key().public_bytes_raw()), key) for key in keys]
        places = (_with_port(own.addresses[0], self._server.sockets[0].getsockname()[1]),)
        self.forged = tuple(
            each.sign(replace(own, peer=each.peer_id, addresses=places, settled=True, state=PeerState.TRAINING))
            for each in self._crowd
        )
        for record in self.forged:
            with contextlib.suppress(NetworkError):  # no node stored it
                await self.directory.announce(record)

    async def lookup(self) -> list[Presence]:
        """Look up the others; it must not count its own crowd, or it would lie about its progress, too."""
        crowd = {each.peer_id for each in self._crowd}
        return [each for each in await self.directory.lookup() if each.peer not in crowd]

    async def keep_finished(self, presence: Presence) -> None:
        await self.directory.keep_finished(presence)

    async def finished(self) -> list[Presence]:
        return await self.directory.finished()


def _host(multiaddress: str) -> str:
    """Return the host of an address such as /ip4/11.0.1.2/tcp/31337."""
    return multiaddress.split("/")[2]


def _with_port(multiaddress: str, port: int) -> str:
    """Return an address such as /ip4/11.0.1.2/tcp/31337 with another port."""
    return "/".join([*multiaddress.split("/")[:4], str(port)])


async def _say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(SILENCE_S)
    writer.close()
