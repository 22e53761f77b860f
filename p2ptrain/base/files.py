"""File writes that survive a crash or a power cut: a file is either complete or absent."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from p2ptrain.base.errors import HomeError, UserError
from p2ptrain.base.text import UserPath

LOCK = "lock"
"""Name of the file that ``locked`` locks."""


def write_new(path: Path, data: bytes, mode: int = 0o644, lasting: bool = True) -> None:
    """Create a file with its final permissions; never overwrite. Raises OSError and then leaves no file.

    Args:
        lasting: wait until the data is on the disk. May take seconds, so never on an event loop.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
    except BaseException:  # KeyboardInterrupt too
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def replace(path: Path, data: bytes, mode: int = 0o644, lasting: bool = True) -> None:
    """Replace a file atomically: readers see the old content or the new. Raises OSError and then keeps the old file.

    Args:
        lasting: as for ``write_new``. Without it, a power cut may leave neither content.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    temporary.unlink(missing_ok=True)
    try:
        write_new(temporary, data, mode, lasting)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def user_home() -> Path:
    """Return the user's home directory. Raises HomeError if neither HOME nor the system's list of users names one."""
    try:
        return UserPath(Path.home())
    except RuntimeError:
        raise HomeError(
            f"User {os.getuid()} has no home directory: HOME is not set, and the system has no entry for this user.",
            "Set HOME to a directory that you can write to.",
        ) from None


def expanded(path: str) -> Path:
    """Replace a leading ``~`` by the user's home directory. Raises HomeError as ``user_home`` does."""
    return user_home() / path[2:] if path.startswith("~/") else UserPath(path)


def cache_directory() -> Path:
    """Return the directory of files that all peers of this user share. Raises HomeError."""
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "p2ptrain"


def exists(path: Path) -> bool:
    """Return whether a path exists. Raises OSError if that cannot be known, where newer ``Path.exists`` says no."""
    return _mode(path) is not None


def is_dir(path: Path) -> bool:
    """Return whether a path is a directory. Raises OSError as ``exists`` does."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise


def check_vacant(path: Path) -> None:
    """Raise UserError unless a path is free or an empty directory."""
    try:
        is_taken = exists(path) and any(path.iterdir() if path.is_dir() else [path])
    except OSError as error:
        raise UserError(f"{path} cannot be written: {cause(error)}.", remedy(error)) from error
    if is_taken:
        raise UserError(f"{path} exists and is not empty.", "Choose another directory.")


def sync(path: Path) -> None:
    """Flush a file's or directory's content to the disk, as far as its file system can. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)):  # as some network disks
            raise
    finally:
        os.close(handle)


def missing_newline(path: Path) -> str:
    """Return the newline that a file's incomplete last line lacks, or nothing. Raises OSError.

    A full disk or a power cut truncates a line; text appended to that line would be lost with it.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            return "" if file.read(1) in (b"", b"\n") else "\n"
    except FileNotFoundError:
        return ""


def cause(error: OSError | ValueError) -> str:
    """Describe for people why a file could not be read or written, without error numbers and class names."""
    if isinstance(error, UnicodeError):
        return "it is not UTF-8 text"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def remedy(error: OSError, elsewhere: str = "choose another directory") -> str:
    """Return what an owner can do about a file that could not be read or written.

    Args:
        elsewhere: an imperative without a full stop: how to use another place instead. Empty if there is no choice.
    """
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            first = "Free some space on that disk"
        case errno.EROFS:
            first = "Make that disk writable"
        case errno.EACCES | errno.EPERM:
            first = "Check its owner and permissions, and those of its directory"
        case _:  # the cause says enough
            first = "Check the path and its disk"
    return f"{first}, or {elsewhere}." if elsewhere else f"{first}."


@contextlib.contextmanager
def locked(home: Path, option: str = "--home") -> Iterator[None]:
    """Create a home if necessary and lock it. Raises HomeError if that fails or another process holds it.

    Args:
        option: names another directory, for the remedy.
    """
    lock = FileLock(home / LOCK)
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise HomeError(
            f"Another process uses {home}.", f"Stop it, or choose another directory with {option}."
        ) from None
    except OSError as error:
        if error.errno == errno.ENOLCK:  # NFS without its lock service
            problem = f"The directory {home} cannot be used: {cause(error)}."
            raise HomeError(problem, f"Choose another directory with {option}, on a local disk.") from error
        raise unusable(home, error, option) from error
    try:
        yield
    finally:
        lock.release()


def unusable(home: Path, error: OSError, option: str = "--home") -> HomeError:
    problem = f"The directory {home} cannot be used: {cause(error)}."
    return HomeError(problem, remedy(error, f"choose another directory with {option}"))
