"""Files that a manifest names by digest, stored so that later starts, and other peers, need no path.

::

    DIRECTORY/<sha256>    one file: the index of the text, a tokenizer.json, or small initial weights

A file is used only if its SHA-256 is its name.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from p2ptrain.base import files
from p2ptrain.base.errors import CorpusError, HomeError
from p2ptrain.base.text import printable
from p2ptrain.data.chat_template import CHATML
from p2ptrain.data.sources import check_digest
from p2ptrain.data.tokenizer import MOST_TOKENIZER_BYTES

if TYPE_CHECKING:
    from p2ptrain.manifest import Manifest

MOST_STORED_BYTES = MOST_TOKENIZER_BYTES
"""Largest file that is stored and sent to peers: a minute at 10 Mbit/s. Guess: upload rates of real runs, and sizes of
initial weights, would settle it."""


INDEX = "index"
"""Name of the file that has the digests of the text's shards."""
WEIGHTS_OPTION = "--weights"
SETTINGS = "settings"
"""Name of the file that exports of a continued model need: ``published_settings``."""

FILES_FOLDER = "files"
"""Folder of stored files in a run's directory and in a peer's home."""


class NamedFile(NamedTuple):
    """File that a manifest names by digest."""

    what: str
    """``index``, ``tokenizer``, ``template``, ``settings`` or ``weights``; of several weights with a number."""
    option: str
    """Option by which an owner names the file; empty if there is none."""
    sha256: str

    @property
    def is_needed(self) -> bool:
        """Whether training needs it; the others only show and export text."""
        return self.what == INDEX or self.option == WEIGHTS_OPTION


def named_files(manifest: Manifest) -> list[NamedFile]:
    """Return the files that the manifest names by digest, first the one that is needed first."""
    found, template = [], getattr(manifest.corpus, "template", "")
    if manifest.corpus.kind == "shards":
        found.append(NamedFile(INDEX, "", manifest.corpus.root))
    if manifest.tokenizer.kind == "file":
        found.append(NamedFile("tokenizer", "", manifest.tokenizer.sha256))
    if template not in ("", CHATML):
        found.append(NamedFile("template", "", template))
    if manifest.model.init is not None and manifest.model.init.settings is not None:
        found.append(NamedFile(SETTINGS, "", manifest.model.init.settings))
    return [*found, *named_weights(manifest)]


def named_weights(manifest: Manifest) -> list[NamedFile]:
    """Return the files of initial weights that the manifest names by digest, in the order of the shards."""
    init = manifest.model.init
    if init is None or init.kind != "file":
        return []
    count = len(init.sha256)
    names = ["weights"] if count == 1 else [f"weights {number} of {count}" for number in range(1, count + 1)]
    return [NamedFile(name, WEIGHTS_OPTION, digest) for name, digest in zip(names, init.sha256, strict=True)]


def stored(place: Path, sha256: str) -> Path | None:
    """Return a stored file of a run's directory or a peer's home; None if it has none."""
    return FileStore(place / FILES_FOLDER).find(sha256)


MADE_AGAIN = "make it again with `p2ptrain init NEW_RUN` and the same text, and sign that run"
"""Remedy for a run's author."""


def kept(run: Path, sha256: str, what: str) -> Path:
    """Return a file in the directory of an author's run. Raises CorpusError if it is not there, or was edited."""
    path = stored(run, sha256)
    if path is None:
        place = run / FILES_FOLDER / sha256
        fault = "was edited" if files.exists(place) else "is missing"
        raise CorpusError(
            f"The run's {what}, {printable(place)}, {fault}.", f"Restore it from a copy, or {MADE_AGAIN}."
        )
    return path


class FileStore:
    """Files by digest in one directory, which is created with the first file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find(self, sha256: str) -> Path | None:
        """Return the path of a stored file; None if it is missing, damaged or not readable."""
        path = self._directory / sha256
        try:
            if path.stat().st_size > MOST_STORED_BYTES:
                return None
            check_digest(path, sha256, "stored")
        except (OSError, CorpusError):
            return None
        return path

    def add(self, sha256: str, data: bytes) -> Path:
        """Store a file's content. Raises ValueError if it has another digest, HomeError if it cannot be written."""
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ValueError(f"expected data with sha256 {sha256}")
        path = self._directory / sha256
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            files.replace(path, data)
        except OSError as error:
            raise HomeError(f"{path} cannot be written: {error.strerror}.", files.remedy(error, "")) from error
        return path

    def adopt(self, file: NamedFile, path: Path) -> Path | None:
        """Store an owner's file; None if it is too large. Raises CorpusError if it is not the file that the run names.

        A file that is too large is not read here.
        """
        try:
            if path.stat().st_size > MOST_STORED_BYTES:
                return None
        except OSError:  # check_digest reports the cause
            pass
        check_digest(path, file.sha256, file.what)
        if (stored := self.find(file.sha256)) is not None:
            return stored
        try:
            return self.add(file.sha256, path.read_bytes())
        except (OSError, ValueError):
            raise CorpusError(f"{path} changed while it was read.", "Start again when it no longer changes.") from None
