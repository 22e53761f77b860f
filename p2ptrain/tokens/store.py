"""Shards on this machine's disk, by digest. All peers and runs of one user share them.

::

    DIRECTORY/<two digits>/<sha256>    one shard

A file gets its name only when it is whole and on the disk. Files are dropped, the longest unused first, when they take
more than a limit; whoever has mapped one keeps it until then.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import numpy as np

from p2ptrain.base import files
from p2ptrain.base.clock import wall
from p2ptrain.base.errors import HomeError
from p2ptrain.tokens.index import SHARD_BYTES, ShardIndex

RECENT_S = 600.0
"""Seconds after its last use in which no peer drops a shard; peers mark theirs every minute."""


class ShardStore:
    """Shards in one directory, which is created with the first one. Any thread."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, digest: str) -> Path:
        return self.directory / digest[:2] / digest

    def has(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def held(self, index: ShardIndex) -> frozenset[int]:
        """Return the numbers, among all digests of an index, of the shards that are here."""
        here = {path.name for path in self._paths()}
        return frozenset(number for number, digest in enumerate(index.digests) if digest in here)

    def add(self, digest: str, data: bytes) -> None:
        """Store a shard. Raises ValueError if it has another digest, HomeError if it cannot be written."""
        if len(data) > SHARD_BYTES or hashlib.sha256(data).hexdigest() != digest:
            raise ValueError(f"expected a shard with sha256 {digest}")
        path = self.path(digest)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.replace(path, data)
        except OSError as error:
            raise HomeError(
                f"The text cannot be stored in {self.directory}: {files.cause(error)}.",
                files.remedy(error, "set XDG_CACHE_HOME to another directory"),
            ) from error

    def is_whole(self, digest: str) -> bool:
        """Return whether a shard is here and was not damaged; reads all of it. Raises HomeError."""
        try:
            with self.path(digest).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == digest
        except FileNotFoundError:
            return False
        except OSError as error:
            raise HomeError(
                f"{self.path(digest)} cannot be read: {files.cause(error)}.", files.remedy(error, "")
            ) from error

    def read(self, digest: str, offset: int, size: int) -> tuple[int, bytes]:
        """Return a shard's size and a piece of it; 0 and nothing if it is not here, or cannot be read."""
        try:
            with self.path(digest).open("rb") as file:
                return os.fstat(file.fileno()).st_size, os.pread(file.fileno(), size, offset)
        except OSError:
            return 0, b""

    def map(self, digest: str, id_bytes: int, tokens: int) -> np.ndarray | None:  # [tokens] uint16 or uint32, read-only
        """Return a shard's ids, memory-mapped; None if it is missing. Marks it as used.

        A file of another size or digest is damaged, and removed so that the shard is fetched again.
        """
        path = self.path(digest)
        try:
            if path.stat().st_size != tokens * id_bytes or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
                path.unlink()
                return None
            found = np.memmap(path, np.dtype(f"<u{id_bytes}"), "r", shape=(tokens,))
            with contextlib.suppress(OSError):  # the disk may be read-only
                os.utime(path)
        except (OSError, ValueError):
            return None
        return found

    @property
    def size_bytes(self) -> int:
        """Bytes of all shards that are here, also of other runs."""
        found = 0
        for path in self._paths():
            with contextlib.suppress(OSError):  # another peer has dropped it
                found += path.stat().st_size
        return found

    def use(self, digests: Iterable[str]) -> None:
        """Mark shards as used, so that no peer of this user drops them soon."""
        for digest in digests:
            with contextlib.suppress(OSError):  # it is not here, or the disk is read-only
                os.utime(self.path(digest))

    def drop(self, most_bytes: float, kept: Collection[str], now: float | None = None) -> int:
        """Delete the longest unused shards beyond a limit; return the bytes that remain.

        None of the ``kept`` ones, and none that was used ``RECENT_S`` ago: another peer may be reading it.
        """
        recent = (wall() if now is None else now) - RECENT_S
        found = []
        for path in self._paths():
            with contextlib.suppress(OSError):
                state = path.stat()
                found.append((state.st_mtime, state.st_size, path))
        total = sum(size for _, size, _ in found)
        for used, size, path in sorted(found, key=lambda each: each[0]):
            if total <= most_bytes:
                break
            if used < recent and path.name not in kept:
                with contextlib.suppress(OSError):
                    path.unlink()
                    total -= size
        return total

    def _paths(self) -> Iterator[Path]:
        with contextlib.suppress(OSError):  # there is no store yet, or another peer has dropped a shard
            for folder in self.directory.iterdir():
                with contextlib.suppress(OSError):
                    yield from folder.iterdir()
