"""Sources of a run's text: other peers, mirrors and bootstraps, what they say, and a fetch from each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from random import Random

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.net.shard_mirror import Mirror
from p2ptrain.net.shard_service import among, ask_held, fetch_shard
from p2ptrain.ports import Link
from p2ptrain.tokens.fetch_plan import ShardSource, SourceKind
from p2ptrain.tokens.index import ShardIndex
from peer.file_fetch import Source

MOST_ASKED = 24
"""Peers that are asked what they have, besides bootstraps. Guess: bench/carry.py with others."""
AT_ONCE = 8
"""Peers that are asked at the same time."""
ASK_S = 10.0
"""Timeout of one such question, dialing included."""


class ShardSources:
    """Sources of one run's shards.

    Args:
        index: of the run.
        bootstraps: the nodes of the join link.
        peers: returns other peers. Raises NetworkError.
        dial: opens a link of the shard protocol. Raises NetworkError and RemoteError.
        mirrors: the owner's and the run's.
        rng: chooses whom to ask.
        on_change: called when a source has told what it has.
    """

    def __init__(
        self,
        index: ShardIndex,
        bootstraps: Sequence[Source],
        peers: Callable[[], Awaitable[Sequence[Source]]],
        dial: Callable[[PeerId, Sequence[str]], Awaitable[Link]],
        mirrors: Sequence[Mirror],
        rng: Random,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.on_change = on_change
        self.fault = ""
        """Why the last one that was asked what it has did not say so; empty if all did."""
        self._index, self._root = index, index.root
        self._find, self._dial, self._rng = peers, dial, rng
        self._bootstraps = dict(bootstraps)
        self._mirrors = {each.where: each for each in mirrors}
        self._lacking: dict[str, set[int]] = {each: set() for each in self._mirrors}
        """Shards that mirrors have said to lack."""
        self._peers: dict[PeerId, Sequence[str]] = {}
        self._told: BoundedDict[PeerId, tuple[bytes, bytes]] = BoundedDict(2 * MOST_ASKED)
        """What nodes have said to have, and to be fetching."""

    def known(self, wanted: Iterable[int]) -> list[ShardSource]:
        """Return what the sources have of the wanted shards."""
        wanted = list(wanted)
        found = [
            ShardSource(name, SourceKind.MIRROR, frozenset(wanted) - lacking) for name, lacking in self._lacking.items()
        ]
        for peer, (here, coming) in self._told.items():
            kind = SourceKind.BOOTSTRAP if peer in self._bootstraps else SourceKind.PEER
            found.append(ShardSource(peer, kind, among(here, wanted), among(coming, wanted)))
        return found

    def name(self, source: str) -> str:
        """Return a source's name for people."""
        if source in self._mirrors:
            return source
        return f"{'the bootstrap ' if PeerId(source) in self._bootstraps else ''}{short(PeerId(source))}"

    async def look(self) -> None:
        """Ask nodes what they have: bootstraps, and peers that answered the last time, or others."""
        self.fault = ""
        try:
            found = dict(await self._find())
        except NetworkError as error:
            self.fault, found = str(error), {}
        for peer in self._bootstraps:
            found.pop(peer, None)
        stay = [peer for peer in self._peers if peer in self._told]
        others = [peer for peer in found if peer not in stay]
        chosen = [*stay, *self._rng.sample(others, min(len(others), MOST_ASKED))][:MOST_ASKED]
        if len(chosen) == MOST_ASKED and len(others) > MOST_ASKED // 4:  # see others, too, in a large swarm
            chosen[-MOST_ASKED // 4 :] = self._rng.sample(others, MOST_ASKED // 4)
        self._peers = {peer: found.get(peer, self._peers.get(peer, ())) for peer in chosen}
        gate = asyncio.Semaphore(AT_ONCE)

        async def ask(peer: PeerId, addresses: Sequence[str]) -> None:
            async with gate:
                await self._ask(peer, addresses)

        async with asyncio.TaskGroup() as group:
            for peer, addresses in (*self._bootstraps.items(), *self._peers.items()):
                group.create_task(ask(peer, addresses))

    async def _ask(self, peer: PeerId, addresses: Sequence[str]) -> None:
        try:
            async with asyncio.timeout(ASK_S):
                link = await self._dial(peer, addresses)
                try:
                    self._told[peer] = await ask_held(link, self._root)
                finally:
                    await link.close()
        except (NetworkError, RemoteError, TimeoutError) as error:
            self._told.pop(peer, None)
            self.fault = str(error) or f"{short(peer)} did not answer within {ASK_S:.0f} s"
        else:
            self.on_change()

    async def fetch(self, source: str, shard: int, received: Callable[[int], None]) -> bytes | None:
        """Return a shard, unchecked; None if the source does not have it. Raises BusyError, NetworkError, RemoteError.

        Args:
            received: called with the bytes that have come.
        """
        digest = self._index.digests[shard]
        if (mirror := self._mirrors.get(source)) is not None:
            data = await mirror.fetch(digest, received)
            if data is None:
                self._lacking[source].add(shard)
            return data
        peer = PeerId(source)
        link = await self._dial(peer, self._bootstraps.get(peer) or self._peers.get(peer, ()))
        try:
            data = await fetch_shard(link, digest, received)
        finally:
            await link.close()
        if data is None:
            self._told.pop(peer, None)
        return data
