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
"""Timeout of a download from one peer: 11 minutes, the largest file at 0.8 Mbit/s. The next peer continues it. Guess:
upload rates of volunteers; they wait this long for each adversarial peer that sends slowly."""
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

    A file that training does not need is asked for once, and the index until somebody has it.

    Pieces of several peers may make up one file. If they do not, the last of these peers must send all of it, so that
    false pieces of one peer cannot spoil what another sends.

    Args:
        sources: returns the peers to ask.
        dial: opens a link of the file protocol. Raises NetworkError.
        mirrors: asked for the index, after peers.
    """
    pauses_s = backoff(*PAUSE_S)
    have, senders = bytearray(), set[PeerId]()
    excluded: set[PeerId] = set()

    async def is_sent_by(peer: PeerId, addresses: Sequence[str]) -> bool:
        """Return whether the file is now whole and genuine. Raises NetworkError and RemoteError."""
        before = len(have)
        try:
            async with asyncio.timeout(SOURCE_DEADLINE_S):
                link = await dial(peer, addresses)
                try:
                    is_whole = await download(link, file.sha256, have)
                finally:
                    await link.close()
        except TimeoutError:
            raise NetworkError(f"{short(peer)} sends too slowly: {SOURCE_DEADLINE_S:.0f} s were not enough") from None
        finally:
            if len(have) > before:
                senders.add(peer)
        if is_whole and await asyncio.to_thread(_digest, have) != file.sha256:
            raise RemoteError("the digest of what it sent is wrong")
        return is_whole

    while True:
        failures = 0
        for peer, addresses in await sources():
            while peer not in excluded:
                is_mixed = bool(senders - {peer})
                try:
                    if await is_sent_by(peer, addresses):
                        notebook.note("got file", what=file.what, peer=peer, size_bytes=len(have))
                        return bytes(have)
                except RemoteError as error:
                    why = "its pieces do not continue those of other peers" if is_mixed else str(error)
                    notebook.note("no file", what=file.what, peer=peer, why=why)
                    have.clear()
                    senders.clear()
                    if is_mixed:
                        continue
                    excluded.add(peer)
                except NetworkError as error:
                    if NOT_SPOKEN not in str(error):
                        failures += 1
                        notebook.note("no file", what=file.what, peer=peer, why=str(error))
                break
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


async def _from_mirror(mirror: Mirror, file: NamedFile, notebook: Notebook) -> bytes | None:
    try:
        data = await mirror.fetch(file.sha256)
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
