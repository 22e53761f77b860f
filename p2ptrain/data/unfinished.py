"""State of an ``init`` that was stopped, in the run's directory, from which the same command goes on.

::

    RUN/shards/              the whole shards so far
    RUN/unfinished/state     a line of JSON, and ids
    RUN/unfinished/spool     dialogues that are not packed yet

A directory with ``unfinished`` holds no run: manifest and key are written when the text is complete.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from p2ptrain.base import files
from p2ptrain.base.errors import HomeError
from p2ptrain.data.file_store import FILES_FOLDER
from p2ptrain.manifest.directory import MANIFEST_FILE

SHARDS_FOLDER = "shards"
"""Folder of shards in a run's directory."""
UNFINISHED = "unfinished"


class Unfinished:
    """The state in a run's directory.

    Args:
        run: the directory, created if it does not exist.
        key: what the ids depend on; a state of another key is deleted, with its shards.

    Raises HomeError if the directory cannot be written.
    """

    def __init__(self, run: Path, key: Any) -> None:
        self._run, self._folder = run, run / UNFINISHED
        self._key = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        self._missing = [each for each in (run, *run.parents) if not files.exists(each)]
        written = [run / SHARDS_FOLDER, run / FILES_FOLDER]
        self._ours = [each for each in written if files.exists(self._folder) or not files.exists(each)]
        self._lock = FileLock(self._folder / "lock")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            if self._read_key() not in ("", self._key):
                self._clear()
            if not files.exists(self._folder / "key"):
                files.replace(self._folder / "key", self._key.encode())
        except Timeout:
            raise HomeError(f"Another p2ptrain init writes {run}.", "Wait for it, or name another directory.") from None
        except OSError as error:
            raise self._unwritable(error) from error

    @property
    def spool(self) -> Path:
        return self._folder / "spool"

    def load(self) -> tuple[dict[str, Any], np.ndarray] | None:
        """Return the saved state; None if there is none."""
        try:
            line, _, ids = (self._folder / "state").read_bytes().partition(b"\n")
            return json.loads(line), np.frombuffer(ids, dtype="<u4")
        except (OSError, ValueError):
            return None

    def save(self, state: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Replace the state. Raises HomeError."""
        ids = b"".join(each.astype("<u4").tobytes() for each in arrays)
        try:
            files.replace(self._folder / "state", json.dumps(state).encode() + b"\n" + ids)
        except OSError as error:
            raise self._unwritable(error) from error

    def forget(self, is_all: bool = False) -> None:
        """Delete the state, and with ``is_all`` what else was written, also directories that were created for it."""
        if is_all and not files.exists(self._run / MANIFEST_FILE):  # another init may have made a run of it
            self._clear()
        shutil.rmtree(self._folder, ignore_errors=True)
        if is_all:
            for each in self._missing:
                try:
                    each.rmdir()
                except OSError:  # not empty
                    return

    def close(self) -> None:
        """Let another ``init`` go on. Safe to call twice."""
        self._lock.release()

    def _clear(self) -> None:
        for each in (*self._folder.iterdir(), *self._ours):
            if each.is_dir():
                shutil.rmtree(each, ignore_errors=True)
            elif each.name != "lock":
                each.unlink(missing_ok=True)

    def _read_key(self) -> str:
        try:
            return (self._folder / "key").read_text()
        except OSError:
            return ""

    def _unwritable(self, error: OSError) -> HomeError:
        return HomeError(f"{self._folder} cannot be written: {files.cause(error)}.", files.remedy(error))
