"""Private folders for Unix sockets, and the removal of those whose process has ended."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

LONGEST_PARENT = 50
"""Bytes. A socket path has at most 104 (macOS), of which our folder and file names take up to 50."""
_FOLDER_PREFIX = "p2ptrain-"
_LOCK_NAME = "lock"
_UNLOCKED_GRACE_S = 60.0
"""Age after which a folder without a lock file is removed; a younger one may be about to get it."""


class SocketFolder:
    """A private folder for Unix sockets, marked as in use by a file lock that the kernel releases on exit."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock

    @classmethod
    def create(cls) -> SocketFolder:
        """Remove folders of ended processes, then create a new one."""
        parent = Path(tempfile.gettempdir())
        if len(str(parent)) > LONGEST_PARENT:
            parent = Path("/tmp")
        sweep(parent)
        while True:
            path = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=parent))
            lock = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (path / _LOCK_NAME).exists():
                return cls(path, lock)
            os.close(lock)  # another process removed the folder before it was locked

    def remove(self) -> None:
        """Remove the folder and release its lock; safe to call twice."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def sweep(parent: Path) -> list[Path]:
    """Remove this user's socket folders whose process has ended, and return them."""
    return [folder for folder in parent.glob(f"{_FOLDER_PREFIX}*") if _swept(folder)]


def _swept(folder: Path) -> bool:
    """Remove a folder that is not in use, and return whether it was removed.

    The lock is held until the folder is gone, so a process that just created the folder waits for it and notices.
    """
    try:
        status = folder.lstat()
        if folder.is_symlink() or not folder.is_dir() or status.st_uid != os.getuid():
            return False
        lock = os.open(folder / _LOCK_NAME, os.O_RDWR)
    except FileNotFoundError:
        is_old = folder.exists() and time.time() - status.st_mtime > _UNLOCKED_GRACE_S
        return is_old and _removed(folder)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _removed(folder)
    except OSError:
        return False
    finally:
        os.close(lock)


def _removed(folder: Path) -> bool:
    if all(entry.name == _LOCK_NAME or entry.is_socket() for entry in folder.iterdir()):
        shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()
