"""Files that are whole or absent, whenever the power goes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_new(path: Path, data: bytes, mode: int = 0o644, lasting: bool = True) -> None:
    """Create with the final permissions from the start; never overwrite. Raises OSError, and then no file appears.

    Args:
        lasting: wait until it is on the disk, which may take seconds: not on an event loop.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
    except BaseException:  # Ctrl+C too
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def replace(path: Path, data: bytes, mode: int = 0o644, lasting: bool = True) -> None:
    """Old content or new, never half of it. Raises OSError, and then the old file stays and no other appears.

    Args:
        lasting: as for ``write_new``. Where it is not, a computer that loses its power may be left with neither.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    temporary.unlink(missing_ok=True)
    try:
        write_new(temporary, data, mode, lasting)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def missing_newline(path: Path) -> str:
    """What to begin with when a line is added: nothing, or the newline that ends the torn line before. Raises OSError.

    A full disk tears a line, and so does a power cut; what is added to a torn line is lost with it.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            return "" if file.read(1) in (b"", b"\n") else "\n"
    except FileNotFoundError:
        return ""


def cause(error: OSError | ValueError) -> str:
    """Why a file could not be read or written, for people: without numbers and classes of Python's."""
    if isinstance(error, UnicodeError):
        return "it is no text in UTF-8"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def printable(path: Path) -> str:
    """A path as it is, or escaped when it holds what a terminal would obey."""
    return str(path) if str(path).isprintable() else ascii(str(path))
