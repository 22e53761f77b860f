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

from p2ptrain.base import files
from p2ptrain.base.errors import HomeError
from p2ptrain.data.file_store import FILES_FOLDER

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
        self._folder = run / UNFINISHED
        self._key = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        self._missing = [each for each in (run, *run.parents) if not files.exists(each)]
        written = [run / SHARDS_FOLDER, run / FILES_FOLDER]
        self._ours = [each for each in written if files.exists(self._folder) or not files.exists(each)]
        try:
            if files.exists(self._folder) and self._read_key() != self._key:
                self.forget(is_all=True)
            self._folder.mkdir(parents=True, exist_ok=True)
            if not files.exists(self._folder / "key"):
                files.replace(self._folder / "key", self._key.encode())
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
        shutil.rmtree(self._folder, ignore_errors=True)
        if is_all:
            for each in self._ours:
                shutil.rmtree(each, ignore_errors=True)
            for each in self._missing:
                try:
                    each.rmdir()
                except OSError:  # not empty
                    return

    def _read_key(self) -> str:
        try:
            return (self._folder / "key").read_text()
        except OSError:
            return ""

    def _unwritable(self, error: OSError) -> HomeError:
        return HomeError(f"{self._folder} cannot be written: {files.cause(error)}.", files.remedy(error))
