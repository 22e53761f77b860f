"""Private folders for Unix sockets, and the removal of those whose process has ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from pathlib import Path

from p2ptrain.base.errors import DeviceError
from p2ptrain.base.files import cause

LONGEST_PARENT = 50
"""Bytes. A socket path has at most 104 (macOS), of which our folder and file names take up to 50."""
FOLDER_PREFIX = "p2ptrain."


class SocketFolder:
    """A private folder for Unix sockets, marked as in use by a lock that the kernel releases on exit.

    The lock is on the folder itself (flock(2)). No cleaner of the temporary directory can remove it, and systemd's
    skips locked folders (tmpfiles.d(5), "Age").
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock

    @classmethod
    def create(cls) -> SocketFolder:
        """Remove folders of ended processes, then create a new one.

        Raises DeviceError if the temporary directory cannot be written, or its file system supports no sockets.
        """
        try:
            parent = Path(tempfile.gettempdir())
        except OSError:  # no candidate is writable
            parent = Path("/tmp")
        if len(os.fsencode(parent)) > LONGEST_PARENT:
            parent = Path("/tmp")
        try:
            sweep(parent)
            while (folder := cls._created(parent)) is None:
                pass
        except OSError as error:
            raise DeviceError(
                f"There can be no sockets in the temporary directory {parent}: {cause(error)}.",
                f"Set TMPDIR to a directory on a local disk that you can write to; at most {LONGEST_PARENT} bytes.",
            ) from error
        return folder

    @classmethod
    def _created(cls, parent: Path) -> SocketFolder | None:
        """Create and lock a folder; None if another process's sweep removed it before. Raises OSError."""
        path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent))
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return None
        with contextlib.suppress(OSError):  # without locks, as on some NFS, no sweep removes the folder either
            fcntl.flock(lock, fcntl.LOCK_EX)
        folder = cls(path, lock)
        if not path.exists():
            os.close(lock)
            return None
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.bind(str(path / "probe"))
            (path / "probe").unlink()
        except BaseException:
            folder.remove()
            raise
        return folder

    def remove(self) -> None:
        """Remove the folder and release its lock; safe to call twice."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def sweep(parent: Path) -> list[Path]:
    """Remove this user's socket folders whose process has ended, and return them."""
    return [folder for folder in parent.glob(f"{FOLDER_PREFIX}*") if _swept(folder)]


def _swept(folder: Path) -> bool:
    """Remove a folder that is not in use, and return whether it was removed.

    The lock is held until the folder is gone, so a process that just created the folder waits for it and notices.
    """
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.fstat(lock).st_uid != os.getuid():
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if all(entry.is_socket() for entry in folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()
    except OSError:
        return False
    finally:
        os.close(lock)
