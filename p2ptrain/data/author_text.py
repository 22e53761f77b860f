"""Text that an author names for a run: files, folders and data sets of the hub, as lists of files to read."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Literal

from p2ptrain.base import files
from p2ptrain.base.errors import CorpusError
from p2ptrain.base.options import HUB
from p2ptrain.base.text import UserPath, printable
from p2ptrain.data.dialogues import DEFAULT_MESSAGES, has_column, has_messages
from p2ptrain.data.hub import HubFile, HubText, split_files
from p2ptrain.data.hub_weights import commit_of
from p2ptrain.data.sources import BINARY_HEAD_BYTES, check_readable
from p2ptrain.data.unpacking import UNPACK, first_line

TABLES = (".csv", ".tsv")
"""File extensions of tables."""
JSON_LINES = (".jsonl", ".ndjson")
DEFAULT_COLUMN = "text"
"""Column of the text if none is named: the usual name on the hub."""


@dataclass(frozen=True, slots=True)
class LocalFile:
    """File of this machine."""

    path: Path
    format: str
    """``text``, ``jsonl`` or ``parquet``."""

    def __str__(self) -> str:
        return f"{self.path}"

    def open(self, mode: Literal["rb"] = "rb") -> IO[bytes]:
        return self.path.open(mode)

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    @property
    def identity(self) -> list[Any]:
        """What changes if the file does."""
        found = self.path.stat()
        return [str(self.path.absolute()), found.st_size, found.st_mtime_ns]


SourceFile = LocalFile | HubFile


@dataclass(frozen=True, slots=True)
class Source:
    """One ``--corpus``: its files, in the order in which they are read."""

    name: str
    """For people."""
    files: Sequence[SourceFile]
    column: str
    """Column of the text or of the messages in jsonl and parquet."""
    is_dialogues: bool
    is_hub: bool = False
    skipped: tuple[str, ...] = ()
    """Files of a folder that are not text, and links that lead nowhere or back."""

    @property
    def formats(self) -> str:
        return " and ".join(dict.fromkeys(each.format for each in self.files))

    @property
    def warnings(self) -> list[str]:
        """Sentences, without their full stops, on files that are not read, or not as they might be meant."""
        found = []
        if self.skipped:
            more = f" and {len(self.skipped) - 3:,} more" if len(self.skipped) > 3 else ""
            names = f"{', '.join(self.skipped[:3])}{more}"
            found.append(f"{self.name} has {len(self.skipped):,} files that are not text and were skipped: {names}")
        for file in self.files:
            if isinstance(file, LocalFile) and file.format == "text" and file.path.suffix.lower() in TABLES:
                name = printable(f"{file}")
                return [*found, f"{name} is read as plain text; to use a column of a table, convert it to jsonl first"]
        return found

    @property
    def identity(self) -> list[Any]:
        """What changes if another text would be read."""
        return [self.column, self.is_dialogues, [[each.format, *each.identity] for each in self.files]]


def find_source(named: str, column: str, wants_dialogues: bool) -> Source:
    """Return the files of a ``--corpus``.

    Args:
        named: a file, a folder or ``hf:OWNER/NAME[@REVISION][:CONFIG[:SPLIT]]``.
        column: of the text or the messages; empty: by its usual name.
        wants_dialogues: whether a chat template was named.

    Raises:
        CorpusError: unreadable, empty, or of no known format.
        WeightsError: the hub does not tell the data set's commit.
    """
    if named.startswith(HUB):
        spec = hub_text(named)
        return _described(spec.title, split_files(spec), column, wants_dialogues, is_hub=True)
    path = UserPath(named)
    if not files.is_dir(path):
        check_readable(path, "corpus")
        return _described(printable(path), [LocalFile(path, detected_format(path))], column, wants_dialogues)
    found, skipped = _in_folder(path)
    if not found:
        raise CorpusError(f"The folder {printable(path)} has no text.", "Name a folder with text, jsonl or parquet.")
    return _described(printable(path), found, column, wants_dialogues, skipped=skipped)


def hub_text(named: str) -> HubText:
    """Return the data set that ``hf:OWNER/NAME[@REVISION][:CONFIG[:SPLIT]]`` names. Raises WeightsError."""
    place, _, rest = named.removeprefix(HUB).partition(":")
    name, _, revision = place.partition("@")
    config, _, split = rest.partition(":")
    return HubText(name, commit_of(name, revision, "dataset"), config or "default", split or "train")


def _described(
    name: str,
    found: Sequence[SourceFile],
    column: str,
    wants_dialogues: bool,
    is_hub: bool = False,
    skipped: tuple[str, ...] = (),
) -> Source:
    rows = next((each for each in found if each.format != "text"), None)
    if rows is None:
        if column not in ("", DEFAULT_COLUMN):
            raise CorpusError(
                f"{name} is plain text, which has no column {column!r}.",
                "Omit --text-field, or name a jsonl or parquet file.",
            )
        if wants_dialogues:
            raise CorpusError(
                f"{name} is plain text, and a chat template is for dialogues.",
                "Omit --template, or name a jsonl or parquet file with dialogues.",
            )
        return Source(name, found, "", is_dialogues=False, is_hub=is_hub, skipped=skipped)
    chosen = column or _usual_column(rows, wants_dialogues)
    is_dialogues = wants_dialogues or has_messages(rows, rows.format, chosen)
    is_dialogues = is_dialogues or (not column and chosen == DEFAULT_MESSAGES)
    if is_dialogues and (plain := next((each for each in found if each.format == "text"), None)) is not None:
        raise CorpusError(
            f"{name} has dialogues, and {printable(f'{plain}')} in it is plain text.",
            "Move the plain text elsewhere: a run is taught either.",
        )
    return Source(name, found, chosen, is_dialogues, is_hub, skipped)


def _usual_column(file: SourceFile, wants_dialogues: bool) -> str:
    """Return the usual column of dialogues if a file has it, also if it holds something else and there is no text."""
    is_chat = wants_dialogues or has_messages(file, file.format, DEFAULT_MESSAGES)
    if not is_chat and has_column(file, file.format, DEFAULT_MESSAGES):
        is_chat = not has_column(file, file.format, DEFAULT_COLUMN)
    return DEFAULT_MESSAGES if is_chat else DEFAULT_COLUMN


def _in_folder(folder: Path) -> tuple[list[LocalFile], tuple[str, ...]]:
    """Return the files of a folder and of those in it, and the names of those that are not text.

    Their order is random, but depends on their paths in the folder alone: ``init`` stops when the run's budget is
    covered, and a folder's first files by name may all be in one language.
    """
    found: list[LocalFile] = []
    skipped: list[str] = []
    paths, dead = _visible(folder)
    for path in sorted(
        paths, key=lambda path: sha256(path.relative_to(folder).as_posix().encode(errors="surrogateescape")).digest()
    ):
        check_readable(path, "corpus", may_be_empty=True)
        if not path.stat().st_size:
            continue
        try:
            kind = detected_format(path)
        except CorpusError:
            kind = ""
        if not kind or (kind == "text" and _is_binary(path)):
            skipped.append(str(path.relative_to(folder)))
        else:
            found.append(LocalFile(path, kind))
    return found, (
        *skipped,
        *(f"{path.relative_to(folder)} (a link that leads nowhere or back)" for path in sorted(dead)),
    )


def _visible(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files of a folder and of those in it, links followed, and the links that lead nowhere or back."""
    found: list[Path] = []
    dead: list[Path] = []
    for place, folders, names in os.walk(folder, followlinks=True):
        above = {each.resolve() for each in (Path(place), *Path(place).parents)}
        inside = {Path(place, name): name in folders for name in (*folders, *names) if not name.startswith(".")}
        lost = {each for each in inside if each.is_symlink() and (not each.exists() or each.resolve() in above)}
        dead += lost
        found += [each for each, is_folder in inside.items() if not is_folder and each not in lost]
        folders[:] = [each.name for each, is_folder in inside.items() if is_folder and each not in lost]
    return found, dead


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(BINARY_HEAD_BYTES)


def detected_format(path: Path) -> str:
    """Return text, jsonl or parquet, by the file's first bytes, or by a name such as ``rows.jsonl.gz``.

    Raises:
        CorpusError: unreadable, packed text, or JSON that is not one object per line.
    """
    head = first_line(path)
    if head.line.startswith(b"PAR1"):
        return "parquet"
    if any(suffix in JSON_LINES for suffix in path.suffixes) or _is_object(head.line):
        return "jsonl"
    if head.is_packed:
        raise CorpusError(f"{printable(path)} is packed, and its content is not jsonl.", UNPACK)
    if path.suffix == ".json":
        raise CorpusError(
            f"{printable(path)} is JSON, but does not have one object per line.",
            "Convert it to one object per line (jsonl), for example with jq -c '.[]' FILE > corpus.jsonl",
        )
    return "text"


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
