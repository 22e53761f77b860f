"""Files with rows: how they are opened, unpacked (gzip, bzip2, xz, zstd) and reported if they cannot be read."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Protocol, cast

from p2ptrain.base import files
from p2ptrain.base.documents import install_extra
from p2ptrain.base.errors import CorpusError
from p2ptrain.base.text import one_line, printable

INSTALL_DATA = install_extra("data")

_OPENERS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}
_ZSTANDARD = (b"\x28\xb5\x2f\xfd", *(bytes([number, 0x2A, 0x4D, 0x18]) for number in range(0x50, 0x60)))
"""First bytes of packed files. One of zstd may begin with a frame to skip (RFC 8878, section 3.1.2)."""

MOST_LINE_BYTES = 32 << 20
"""Maximum size of a line of jsonl; a longer one is skipped. Decoding takes up to ten times as much memory. Guess: the
longest documents of public corpora would settle it."""

UNPACK = "Unpack it first (gzip -dc, bzip2 -dc, xz -dc, zstd -dc --long=31), and name the new file."


class RowFile(Protocol):
    """File with rows: a local path, or a file of the hub; its string names it in messages."""

    def open(self, mode: Literal["rb"], /) -> IO[bytes]:
        """Open for reading and seeking."""


def unreadable(file: RowFile, file_format: str, error: Exception) -> CorpusError:
    reason = one_line((error.strerror if isinstance(error, OSError) else None) or str(error))
    return CorpusError(
        f"{printable(f'{file}')} cannot be read as {file_format}: {reason.rstrip('.')}.",
        UNPACK
        if "too much memory" in reason
        else files.remedy(error, "")
        if isinstance(error, OSError) and error.errno is not None
        else f"Name a whole {file_format} file, as the run needs.",
    )


class FirstLine(NamedTuple):
    """Beginning of a file."""

    line: bytes
    """First line, or as much of it as a row may have."""
    is_packed: bool


def first_line(path: Path) -> FirstLine:
    """Return the first line of a file, which may be packed. Raises CorpusError if it cannot be read or unpacked."""
    try:
        with path.open("rb") as raw, unpacked(raw, path) as content:
            return FirstLine(content.readline(MOST_LINE_BYTES), content is not raw)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise unreadable(path, "text", error) from error


def unpacked(raw: IO[bytes], file: RowFile) -> IO[bytes]:
    head = raw.read(6)
    raw.seek(0)
    for magic, opened in _OPENERS.items():
        if head.startswith(magic):
            return cast("IO[bytes]", opened(raw))
    if head.startswith(_ZSTANDARD):
        pyarrow, _ = import_pyarrow(f"The packed corpus {file}")
        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw), "zstd"))
    return raw


def import_pyarrow(purpose: str) -> tuple[Any, Any]:
    """Import the optional ``pyarrow`` library; done late because it takes a second."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise CorpusError(f"{purpose} needs the package pyarrow, which is not installed.", INSTALL_DATA) from error
    return pyarrow, pyarrow.parquet
