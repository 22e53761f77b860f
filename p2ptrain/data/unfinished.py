"""State of an ``init`` that was stopped, in the run's directory, from which the same command goes on.

::

    RUN/shards/              the whole shards so far
    RUN/unfinished/key       what the ids depend on, as JSON
    RUN/unfinished/state     a line of JSON, and ids

A directory with ``unfinished`` holds no run: manifest and key are written when the text is complete.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
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
SAVED_S = 20.0
"""Seconds between two saved states, each of up to 16 MB."""

SavedState = tuple[dict[str, Any], np.ndarray]
"""Numbers, and ids."""


class Unfinished:
    """The state in a run's directory.

    Args:
        run: the directory, created if it does not exist.
        key: what the ids depend on, by the option for it.

    Raises HomeError if the directory cannot be written, or has the state of another key.
    """

    def __init__(self, run: Path, key: Mapping[str, Any]) -> None:
        self._run, self._folder = run, run / UNFINISHED
        self._missing = [each for each in (run, *run.parents) if not files.exists(each)]
        written = [run / SHARDS_FOLDER, run / FILES_FOLDER]
        self._ours = [each for each in written if files.exists(self._folder) or not files.exists(each)]
        self._lock = FileLock(self._folder / "lock")
        self._saved_at = time.monotonic()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            check_stopped(run, key)
            files.replace(self._folder / "key", json.dumps(key).encode())
        except Timeout:
            raise HomeError(f"Another p2ptrain init writes {run}.", "Wait for it, or name another directory.") from None
        except OSError as error:
            raise self._unwritable(error) from error
        except HomeError:
            self.close()
            raise

    @property
    def is_due(self) -> bool:
        """Whether ``SAVED_S`` have passed since the state was saved."""
        return time.monotonic() - self._saved_at >= SAVED_S

    def load(self) -> SavedState | None:
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
        self._saved_at = time.monotonic()

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

    def _unwritable(self, error: OSError) -> HomeError:
        return HomeError(f"{self._folder} cannot be written: {files.cause(error)}.", files.remedy(error))


def check_stopped(run: Path, key: Mapping[str, Any] | None) -> None:
    """Raise HomeError if a directory has the state of an ``init`` with another key; None: of one without a text."""
    try:
        found = json.loads((run / UNFINISHED / "key").read_bytes())
    except (OSError, ValueError):
        return
    wanted = {"the text": None} if key is None else json.loads(json.dumps(key))
    if changed := [name for name, value in wanted.items() if key is None or found.get(name) != value]:
        raise HomeError(
            f"{run} has the tokens of an init that was stopped, which differs in {changed[0]}.",
            f"Repeat that command to go on, or name another directory; or delete {run / UNFINISHED} and "
            f"{run / SHARDS_FOLDER} to begin anew.",
        )
