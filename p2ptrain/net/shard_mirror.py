"""Mirrors of a run's shards: a folder, a web server, or a data set of the Hugging Face hub.

All have the layout of a ``ShardStore``, ``<two digits>/<sha256>``, so that a web server can serve the author's
``RUN/shards`` as it is; a folder may also be a run's. What a mirror sends is untrusted: it is bounded in size and time,
and the caller compares the digest.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

from p2ptrain.base.errors import NetworkError, RemoteError, UserError
from p2ptrain.base.text import one_line
from p2ptrain.data.hub import huggingface_hub
from p2ptrain.manifest.section import HUB_NAME
from p2ptrain.net.address import is_on_internet
from p2ptrain.net.throttle import Throttles
from p2ptrain.tokens.index import SHARD_BYTES
from p2ptrain.tokens.store import ShardStore

CONNECT_S = 20.0
"""Timeout to connect to a server, and between two reads."""
MOST_REDIRECTS = 4
"""The hub redirects twice."""
READ_BYTES = 64 << 10

_HUB = re.compile(r"hf:(?P<name>[^@]+)(@(?P<revision>[\w./-]{1,100}))?")


class Mirror:
    """One mirror.

    Args:
        where: ``hf:OWNER/NAME[@REVISION]``, ``https://…``, or a folder.
        is_own: whether this computer's owner named it: it may then be in the local network, and without TLS.
        rates: caps on this peer's traffic.

    Raises UserError for a place of another form.
    """

    def __init__(self, where: str, is_own: bool, rates: Throttles | None = None) -> None:
        self.where = where
        self._is_own = is_own
        self._rates = rates or Throttles()
        self._hub = _HUB.fullmatch(where)
        if where.startswith("hf:"):
            if self._hub is None or re.fullmatch(HUB_NAME, self._hub["name"]) is None:
                raise _unknown(where)
        elif "://" in where:
            schemes = ("https", "http") if is_own else ("https",)
            if urlsplit(where).scheme not in schemes or not urlsplit(where).hostname:
                raise _unknown(where)

    async def fetch(self, digest: str, received: Callable[[int], None] = lambda size: None) -> bytes | None:
        """Return what the mirror has by that name, unchecked; None if it has nothing.

        Args:
            received: called with the bytes that have come.

        Raises NetworkError if it cannot be reached, RemoteError if it sends too much.
        """
        if self._hub is not None:
            url, headers = await asyncio.to_thread(_hub_address, self._hub["name"], self._hub["revision"], digest)
            return await self._download(url, headers, received)
        if "://" in self.where:
            return await self._download(f"{self.where.rstrip('/')}/{digest[:2]}/{digest}", {}, received)
        return await asyncio.to_thread(_from_folder, Path(self.where), digest)

    async def _download(self, url: str, headers: Mapping[str, str], received: Callable[[int], None]) -> bytes | None:
        import aiohttp

        headers = {"Accept-Encoding": "identity", **headers}
        connector = aiohttp.TCPConnector(socket_factory=None if self._is_own else _public_socket)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=CONNECT_S)
        try:
            async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
                for _ in range(1 + MOST_REDIRECTS):
                    async with session.get(url, headers=headers, allow_redirects=False) as answer:
                        if answer.status == 404:
                            return None
                        if answer.status == 200:
                            return await self._body(answer, received)
                        if answer.status not in (301, 302, 303, 307, 308) or "Location" not in answer.headers:
                            raise NetworkError(f"{self.where} answers with status {answer.status}")
                        before, url = urlsplit(url), urljoin(url, answer.headers["Location"])
                        if urlsplit(url).scheme != "https" and before.scheme == "https":
                            raise RemoteError(f"{self.where} redirects to an address without TLS")
                        if urlsplit(url).netloc != before.netloc:
                            headers = {"Accept-Encoding": "identity"}  # the token is the first server's
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            raise NetworkError(f"{self.where}: {one_line(str(error) or 'it sends nothing', 120)}") from error
        raise NetworkError(f"{self.where} redirects too often")

    async def _body(self, answer: Any, received: Callable[[int], None]) -> bytes:
        found, line = bytearray(), self._rates.down
        async for piece in answer.content.iter_chunked(READ_BYTES):
            found += piece
            if len(found) > SHARD_BYTES:
                raise RemoteError(f"{self.where} sends more than a shard has")
            await line.wait(line.book(len(piece)), len(piece))
            received(len(found))
        return bytes(found)


def _hub_address(name: str, revision: str | None, digest: str) -> tuple[str, Mapping[str, str]]:
    hub = huggingface_hub()
    url: str = hub.hf_hub_url(name, f"{digest[:2]}/{digest}", repo_type="dataset", revision=revision)
    headers: Mapping[str, str] = hub.utils.build_hf_headers()
    return url, headers


def _from_folder(folder: Path, digest: str) -> bytes | None:
    folder = folder.expanduser()
    paths = ShardStore(folder).path(digest), ShardStore(folder / "shards").path(digest), folder / "files" / digest
    for path in paths:
        with contextlib.suppress(OSError):
            if path.is_file() and path.stat().st_size <= SHARD_BYTES:
                return path.read_bytes()
    return None


def _public_socket(address: Any) -> socket.socket:
    """Open a socket for an address that is on the internet. Raises OSError for one of the owner's own network, which a
    stranger's manifest or redirect must not reach."""
    family, kind, protocol, _, place = address
    if not is_on_internet(ipaddress.ip_address(place[0])):
        raise OSError(f"{place[0]} is not on the internet")
    return socket.socket(family, kind, protocol)


def _unknown(where: str) -> UserError:
    return UserError(
        f"There is no mirror of the form {where}.", "Name a folder, https://…, or a data set of the hub: hf:OWNER/NAME."
    )
