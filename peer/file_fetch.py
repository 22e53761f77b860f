"""Download of files that the run names by digest, from other peers and mirrors."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence

from p2ptrain.base.backoff import PAUSE_S, backoff
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.data.file_store import INDEX, MOST_STORED_BYTES, NamedFile
from p2ptrain.net.file_service import download
from p2ptrain.net.shard_mirror import Mirror
from p2ptrain.ports import Link, Notebook

Source = tuple[PeerId, Sequence[str]]
"""Peer that may have a file, and its addresses."""

SOURCE_DEADLINE_S = MOST_STORED_BYTES / 100e3
"""Timeout of a download from one peer or mirror: 11 minutes, the largest file at 0.8 Mbit/s. Guess: upload
rates of volunteers; they wait this long for each adversarial peer that sends slowly."""
NOT_SPOKEN = "protocols not supported"
"""go-libp2p's words for a peer that does not know the protocol, an older p2ptrain."""


async def ask_for_file(
    file: NamedFile,
    sources: Callable[[], Awaitable[Sequence[Source]]],
    dial: Callable[[PeerId, Sequence[str]], Awaitable[Link]],
    notebook: Notebook,
    mirrors: Sequence[Mirror] = (),
) -> bytes | None:
    """Download a file; None if nobody who can be asked has it. Retries with backoff while any of them fails.

    A file that training does not need is asked for once, and the index until somebody has it. Each peer must send the
    whole file, so that false pieces of one cannot spoil what another sends.

    Args:
        sources: returns the peers to ask.
        dial: opens a link of the file protocol. Raises NetworkError.
        mirrors: asked for the index, after peers.
    """
    pauses_s = backoff(*PAUSE_S)
    excluded: set[PeerId] = set()
    while True:
        failures = 0
        for peer, addresses in [each for each in await sources() if each[0] not in excluded]:
            try:
                if (data := await _from_peer(peer, addresses, file, dial)) is not None:
                    notebook.note("got file", what=file.what, peer=peer, size_bytes=len(data))
                    return data
            except RemoteError as error:
                excluded.add(peer)
                notebook.note("no file", what=file.what, peer=peer, why=str(error))
            except NetworkError as error:
                if NOT_SPOKEN not in str(error):
                    failures += 1
                    notebook.note("no file", what=file.what, peer=peer, why=str(error))
        for mirror in mirrors if file.what == INDEX else ():
            if (data := await _from_mirror(mirror, file, notebook)) is not None:
                return data
        if not file.is_needed or not (failures or file.what == INDEX):
            return None
        pause_s = next(pauses_s)
        why = f"nobody sent the run's {file.what}"
        remedy = "Check that the bootstrap named in the link is running, or name a mirror with --mirror."
        if file.option:
            remedy = f"If you have the file, stop this peer and start it with {file.option} FILE."
        notebook.note("waiting", why=why, seconds=pause_s, remedy=remedy)
        await asyncio.sleep(pause_s)


async def _from_peer(
    peer: PeerId,
    addresses: Sequence[str],
    file: NamedFile,
    dial: Callable[[PeerId, Sequence[str]], Awaitable[Link]],
) -> bytes | None:
    """Return the file; None if the peer does not have it. Raises NetworkError and RemoteError."""
    have = bytearray()
    try:
        async with asyncio.timeout(SOURCE_DEADLINE_S):
            link = await dial(peer, addresses)
            try:
                if not await download(link, file.sha256, have):
                    return None
            finally:
                await link.close()
    except TimeoutError:
        raise NetworkError(f"{short(peer)} sends too slowly: {SOURCE_DEADLINE_S:.0f} s were not enough") from None
    if await asyncio.to_thread(_digest, have) != file.sha256:
        raise RemoteError("the digest of what it sent is wrong")
    return bytes(have)


async def _from_mirror(mirror: Mirror, file: NamedFile, notebook: Notebook) -> bytes | None:
    try:
        async with asyncio.timeout(SOURCE_DEADLINE_S):
            data = await mirror.fetch(file.sha256)
    except TimeoutError:
        why = f"it sends too slowly: {SOURCE_DEADLINE_S:.0f} s were not enough"
    except (NetworkError, RemoteError) as error:
        why = str(error)
    else:
        if data is None or await asyncio.to_thread(_digest, data) == file.sha256:
            return data
        why = "the digest of what it sent is wrong"
    notebook.note("no file", what=file.what, peer=None, why=f"{mirror.where}: {why}")
    return None


def _digest(data: bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()
