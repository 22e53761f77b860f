"""Check that a run's text can be got: its index, and one shard from somebody."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.manifest import Manifest
from p2ptrain.net.file_service import FILES_PROTOCOL, download
from p2ptrain.net.file_service import LIMITS as FILES_LIMITS
from p2ptrain.net.node import Node
from p2ptrain.net.p2pd.error_text import short_reason
from p2ptrain.net.shard_mirror import Mirror
from p2ptrain.net.shard_service import LIMITS as SHARDS_LIMITS
from p2ptrain.net.shard_service import SHARDS_PROTOCOL, fetch_shard
from p2ptrain.net.transport import P2PTransport
from p2ptrain.ports import Link
from p2ptrain.tokens.index import SHARD_BYTES, ShardIndex
from peer.doctor.findings import Finding, bad, ok
from peer.messages import duration, size

FETCH_S = 60.0
"""Timeout of one file or shard from one node: a shard at 0.6 Mbit/s."""
ASK_AUTHOR = "Ask the run's author to start the bootstrap on the whole run folder, or to name a mirror."


async def check_text(
    node: Node,
    nodes: Mapping[PeerId, Sequence[str]],  # to ask, with their addresses
    manifest: Manifest,
) -> Finding | None:
    """Fetch the index of a run's text, and a shard that each peer needs; None if the text ships with the package."""
    corpus = manifest.corpus
    if corpus.kind != "shards":
        return None
    mirrors = [Mirror(corpus.mirror, False)] if corpus.mirror else []
    faults: list[str] = []

    async def file(link: Link) -> bytes | None:
        have = bytearray()
        return bytes(have) if await download(link, corpus.root, have) else None

    dial = P2PTransport(node, FILES_PROTOCOL, FILES_LIMITS).open
    found = await _first(corpus.root, nodes, dial, file, mirrors, faults)
    if found is None:
        return bad(
            "data", f"nobody sends the index of the run's text: {'; '.join(faults) or 'nobody was asked'}", ASK_AUTHOR
        )
    try:
        index = ShardIndex.from_bytes(found[0])
    except ValueError as error:
        return bad("data", f"the index of the run's text is faulty: {error}", "Ask the run's author for another run.")
    digest, began = index.digests[-1], time.monotonic()

    async def shard(link: Link) -> bytes | None:
        return await fetch_shard(link, digest, lambda size: None)

    dial = P2PTransport(node, SHARDS_PROTOCOL, SHARDS_LIMITS).open
    faults.clear()
    found = await _first(digest, nodes, dial, shard, mirrors, faults)
    if found is None:
        return bad("data", f"nobody sends the run's text: {'; '.join(faults)}", ASK_AUTHOR)
    data, source = found
    took = duration(time.monotonic() - began)
    whole = size(len(index.digests) * SHARD_BYTES)
    return ok("data", f"{source} sends the run's text, {whole} at most: a shard of {size(len(data))} came in {took}")


async def _first(
    digest: str,
    nodes: Mapping[PeerId, Sequence[str]],
    dial: Callable[[PeerId, Sequence[str]], Awaitable[Link]],
    ask: Callable[[Link], Awaitable[bytes | None]],
    mirrors: Sequence[Mirror],
    faults: list[str],
) -> tuple[bytes, str] | None:
    """Return the first genuine answer, and who gave it; else add the reasons to ``faults``."""

    async def from_node(peer: PeerId, places: Sequence[str]) -> bytes | None:
        link = await dial(peer, places)
        try:
            return await ask(link)
        finally:
            await link.close()

    asked = [(short(peer), partial(from_node, peer, places)) for peer, places in nodes.items()]
    asked += [(each.where, partial(each.fetch, digest)) for each in mirrors]
    for name, answer in asked:
        try:
            async with asyncio.timeout(FETCH_S):
                data = await answer()
        except (NetworkError, RemoteError, TimeoutError) as error:
            faults.append(f"{name}: {short_reason(str(error)) or f'not within {FETCH_S:.0f} s'}")
            continue
        if data is None:
            faults.append(f"{name} does not have it")
        elif hashlib.sha256(data).hexdigest() != digest:
            faults.append(f"{name} sends something else")
        else:
            return data, name
    return None
