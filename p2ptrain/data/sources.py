"""Files that an author or owner names: what is wrong with them, whether they change, and their digests."""

from __future__ import annotations

import codecs
import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

from p2ptrain.base import files
from p2ptrain.base.errors import CorpusError, WeightsError
from p2ptrain.base.text import printable
from p2ptrain.data.unpacking import RowFile

PIECE_CHARACTERS = 1 << 18
"""Characters of a chunk: encoding takes 50 MB for them, and ten times as much where a tokenizer lengthens them as far
as it may (measured)."""

INIT_WITH_FILES = "p2ptrain init NEW_RUN --corpus FILE --tokenizer FILE"
"""Command that begins a run for an author's own files; either option may be omitted."""

BINARY_HEAD_BYTES = 8_000
"""Beginning of a file in which a zero byte means binary data: as much as git's ``buffer_is_binary`` looks at."""


class InterruptedCorpusError(CorpusError):
    """A source stopped midway for a reason that may pass; the next start goes on where it was."""


@contextlib.contextmanager
def unchanged(path: Path) -> Iterator[None]:
    """Raise CorpusError if the file is written to, replaced or removed during the context.

    The digest is computed before the text is read, so it does not hold for a file that changes in between.
    """
    before = _identity(path)
    try:
        yield
    except (CorpusError, WeightsError) as error:
        if _identity(path) == before:
            raise
        raise _changed(path) from error  # the change explains whatever was wrong
    if _identity(path) != before:
        raise _changed(path)


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _changed(path: Path) -> CorpusError:
    return CorpusError(
        f"{printable(path)} changed while it was read.",
        "Let the program that writes it finish, then start again with the file that the run names.",
    )


def file_digest(path: Path, what: str) -> str:
    """Return the SHA-256 of a file. Raises CorpusError if it is empty or not a readable regular file."""
    check_readable(path, what)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_readable(path: Path, what: str, may_be_empty: bool = False) -> None:
    """Raise CorpusError unless a path is a regular file that this user may read, with something in it."""
    try:
        if path.is_dir():
            raise CorpusError(f"The {what} {printable(path)} is a folder.", "Name the file in it.")
        if path.exists() and not path.is_file():
            raise CorpusError(
                f"The {what} {printable(path)} is a pipe or a device, which can be read only once.",
                "Write its content to a file, and name that.",
            )
        with path.open("rb") as file:
            is_empty = not file.read(1)
    except OSError as error:
        raise CorpusError(
            f"The {what} file {printable(path)} cannot be read: {error.strerror}.", files.remedy(error, "")
        ) from error
    if is_empty and not may_be_empty:
        raise CorpusError(f"The {what} {printable(path)} is an empty file.", "Name the whole file.")


def check_digest(path: Path, expected: str, what: str) -> None:
    """Raise CorpusError unless ``path`` is a readable file with the SHA-256 ``expected``."""
    found = file_digest(path, what)
    if found != expected:
        raise CorpusError(
            f"{path} is not this run's {what}: its sha256 is {found}, but the run names {expected}.",
            "Get the file that this run was started with, unchanged and uncompressed. To use this one, begin another "
            f"run: {INIT_WITH_FILES}",
        )


def not_text(file: RowFile, error: UnicodeDecodeError) -> CorpusError:
    """Return the error of a file that is not UTF-8."""
    name = printable(f"{file}")
    if _is_binary(file):
        return CorpusError(
            f"{name} is not a text file.",
            "Name a file of plain text, jsonl or parquet; convert other formats first.",
        )
    return CorpusError(
        f"{name} is not UTF-8 text: {error.reason} (byte 0x{error.object[error.start]:02x}).",
        "Use a text file in UTF-8; iconv converts from other encodings.",
    )


def unreadable_text(file: RowFile, error: OSError) -> CorpusError:
    """Return the error of a text file that the system does not give."""
    return CorpusError(f"{printable(f'{file}')} cannot be read: {error.strerror}.", files.remedy(error, ""))


def _is_binary(file: RowFile) -> bool:
    """Return whether a file that is not UTF-8 begins with zero bytes, but not as UTF-16 or UTF-32."""
    head = b""
    with contextlib.suppress(OSError), file.open("rb") as opened:
        head = opened.read(BINARY_HEAD_BYTES)
    return b"\0" in head and not head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE))
