"""Folder of compiled libraries, which all peers of this user share.

::

    DIRECTORY/torch-2.13.0/<key>.so       library of one ``compiled_pass.PassShape``
    DIRECTORY/torch-2.13.0/<key>.backward.so  a stage's second library, if it has one
    DIRECTORY/torch-2.13.0/<key>.digest   SHA-256 of a whole library, or of both
    DIRECTORY/torch-2.13.0/<key>.failed   why it could not be made; nobody tries again while it exists
    DIRECTORY/torch-2.13.0/<key>.lock     held by the one process that compiles it; stages of a model share one
    DIRECTORY/torch-2.13.0/<key>-…/       its workspace
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from pathlib import Path

from p2ptrain.base import files
from p2ptrain.train.compiled_pass import CompiledPassError

FOLDER = "compiled"
"""Name of the libraries' directory in the user's cache."""
TRY_LATER = os.EX_TEMPFAIL
"""Status with which the compiler ends if memory or disk ran out; after other failures nobody should try again."""
KEPT_S = 30 * 86_400.0
"""Age since the last use at which a library, or a failure, is deleted. Guess: how long runs rest."""


def private_folder(directory: Path, name: str) -> Path:
    """Return a folder that only this user can write to, and delete what was not used for long.

    Raises OSError, or CompiledPassError if others can write to it: its libraries are run.
    """
    folder = directory / name
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    for each in (directory, folder):
        status = each.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise CompiledPassError(f"other users can write to {each}; delete it, or make it yours alone")
    oldest = time.time() - KEPT_S
    for each in [*directory.iterdir(), *folder.iterdir()]:
        with contextlib.suppress(OSError):  # another peer may delete it at the same moment
            if each != folder and each.stat().st_mtime < oldest:
                shutil.rmtree(each) if each.is_dir() else each.unlink()
    return folder


def publish(made: Path, library: Path) -> None:
    """Give a library, and that of its backward pass, the final name, with their digest beside it. Raises OSError."""
    for each in _parts(made):
        files.sync(each)
    files.replace(library.with_suffix(".digest"), _digest(made).encode())
    if (second := backward_library(made)).exists():
        second.replace(backward_library(library))
    made.replace(library)


def is_whole(library: Path) -> bool:
    """Return whether a library exists and is what was published; half a library would end the process that calls it.

    Raises OSError if it cannot be read.
    """
    try:
        return library.with_suffix(".digest").read_bytes() == _digest(library).encode()
    except FileNotFoundError:
        return False


def keep(library: Path) -> None:
    """Note that a library was used. Raises OSError."""
    for each in (*_parts(library), library.with_suffix(".digest"), library.parent):
        os.utime(each)


def failure_file(library: Path) -> Path:
    """Return the file that keeps others from trying again."""
    return library.with_suffix(".failed")


def failure(library: Path) -> str:
    """Return why a library could not be made; "" if nobody tried or the reason was forgotten. Raises OSError."""
    try:
        return failure_file(library).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def remember_failure(library: Path, why: str) -> None:
    """Keep others from trying what cannot succeed. Raises OSError."""
    files.replace(failure_file(library), why.encode())


def backward_library(library: Path) -> Path:
    """Return the file of a stage's backward pass beside that of its forward pass."""
    return library.with_suffix(".backward.so")


def _parts(library: Path) -> list[Path]:
    """Return a library's files, the last to appear first."""
    second = backward_library(library)
    return [library, second] if second.exists() else [library]


def _digest(library: Path) -> str:
    digests = []
    for each in _parts(library):
        with each.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return "".join(digests)
