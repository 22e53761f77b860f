"""Sources of a corpus's text: the package itself, the Hugging Face hub at a revision, or a file with a given digest.

Every source is an iterator of chunks of at most about a megabyte, so memory is bounded for any corpus. ``rows`` reads
jsonl and parquet; ``hub`` finds and opens files of the hub. A manifest comes from a stranger and never contains a path:
the owner names the file, and its digest must be the manifest's.
"""

from __future__ import annotations

import codecs
import contextlib
import copy
import hashlib
import io
import lzma
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from p2ptrain.base import files
from p2ptrain.base.errors import CorpusError, WeightsError
from p2ptrain.base.text import one_line, printable
from p2ptrain.data.hub import split_files
from p2ptrain.data.rows import TextCounts, jsonl_rows, parquet_rows, texts
from p2ptrain.data.unpacking import UnreadableError

if TYPE_CHECKING:
    from p2ptrain.manifest import Corpus as CorpusSpec
    from p2ptrain.manifest import HubCorpus
    from p2ptrain.manifest.sources import FileCorpus

PIECE_CHARACTERS = 1 << 18
"""Characters read at once: encoding takes 50 MB for them, and ten times as much where a tokenizer lengthens them as far
as it may (measured). Part of the token stream's definition: a tokenizer may join words differently at a cut."""

BUILTIN_DIGESTS = {"shakespeare": "2351fe17efb0c9982030b513ac35819deca6548a8a2ebb9d47c2aacb56f92e44"}
"""SHA-256 of the unpacked text of every corpus in ``corpora/``."""

INIT_WITH_FILES = "p2ptrain init NEW_RUN --corpus FILE --tokenizer FILE"
"""Command that begins a run for an author's own files; either option may be omitted."""

EMPTY = hashlib.sha256().hexdigest()
"""SHA-256 of an empty file, which no run can use."""

SAVED_CHARACTERS = 8 << 20
"""Characters of a hub's data set between two saved positions. Guess: how long slow links take to send them again would
settle it."""


BINARY_HEAD_BYTES = 8_000
"""Beginning of a file in which a zero byte means binary data: as much as git's ``buffer_is_binary`` looks at."""

COUNTED = ("rows", "skipped", "examples")
"""Fields of ``TextCounts`` that are counted while a text is read."""


class InterruptedCorpusError(CorpusError):
    """A source stopped midway for a reason that may pass; the next start continues from the last saved position."""


class TextChunk(NamedTuple):
    """Consecutive text of one document."""

    text: str
    ends_document: bool
    position: dict[str, Any] | None = None
    """JSON object from which ``read_pieces`` continues after this chunk, with some chunks of a data set of the hub."""


def read_pieces(
    spec: CorpusSpec, data: Path | None, counts: TextCounts | None = None, position: dict[str, Any] | None = None
) -> Iterator[TextChunk]:
    """Yield the whole text of a corpus, in order.

    Args:
        spec: the manifest's section.
        data: the file the owner named, for kind "file".
        counts: rows are counted here while the text is read.
        position: of the last chunk that is not wanted again.

    Raises:
        CorpusError: at once or while iterating; names the source that failed.
        InterruptedCorpusError: likewise, and reading can continue from the last position.
    """
    counts = counts if counts is not None else TextCounts()
    if spec.kind == "builtin":
        return _text_pieces(_builtin_text(spec.name))
    if spec.kind == "hub":
        return _hub_pieces(spec, counts, position)
    data = named_data(spec, data)
    return file_pieces(data, spec.format, spec.text_field, counts)


def file_pieces(path: Path, file_format: str, text_field: str, counts: TextCounts) -> Iterator[TextChunk]:
    """Yield the whole text of a local file, in order.

    Args:
        path: UTF-8 text, or rows with a column of text.
        file_format: text, jsonl or parquet.
        text_field: the column.
        counts: rows are counted here while the text is read.

    Raises CorpusError.
    """
    counts.where = printable(path)
    if file_format == "text":
        return _text_file_pieces(path)
    if file_format == "jsonl":
        return _cut(text for _, text in texts(jsonl_rows(path, text_field), "line", counts))
    return _cut(text for _, text in texts(parquet_rows(path, text_field), "row", counts))


def named_data(spec: FileCorpus, data: Path | None) -> Path:
    """Return the owner's file. Raises CorpusError if none was given, or it is not the one that the run names."""
    if data is None:
        raise CorpusError(
            f"This run's corpus is a {spec.format} file with sha256 {spec.sha256}, but no file was given.",
            "Get that file from the run's author and pass it with --data FILE.",
        )
    check_digest(data, spec.sha256, "corpus")
    return data


@contextlib.contextmanager
def unchanged(path: Path) -> Iterator[None]:
    """Raise CorpusError if the file is written to, replaced or removed during the context.

    The digest is computed before the text is read, so it does not hold for a file that changes in between.
    """
    before = _identity(path)
    try:
        yield
    except (CorpusError, WeightsError) as error:
        if _identity(path) == before:
            raise
        raise _changed(path) from error  # the change explains whatever was wrong
    if _identity(path) != before:
        raise _changed(path)


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _changed(path: Path) -> CorpusError:
    return CorpusError(
        f"{printable(path)} changed while it was read.",
        "Let the program that writes it finish, then start again with the file that the run names.",
    )


def file_digest(path: Path, what: str) -> str:
    """Return the SHA-256 of a file. Raises CorpusError if it is empty or not a readable regular file."""
    try:
        if path.is_dir():
            raise CorpusError(
                f"The {what} {printable(path)} is a folder, and a run uses one file.",
                f"Join its files into one, as by cat {path}/* > all.txt, and name that."
                if what == "corpus"
                else "Name the file in it.",
            )
        if path.exists() and not path.is_file():
            raise CorpusError(
                f"The {what} {printable(path)} is a pipe or a device, which can be read only once.",
                "Write its content to a file, and name that.",
            )
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CorpusError(
            f"The {what} file {printable(path)} cannot be read: {error.strerror}.", files.remedy(error, "")
        ) from error
    if digest == EMPTY:
        raise CorpusError(f"The {what} {printable(path)} is an empty file.", "Name the whole file.")
    return digest


def check_digest(path: Path, expected: str, what: str) -> None:
    """Raise CorpusError unless ``path`` is a readable file with the SHA-256 ``expected``."""
    found = file_digest(path, what)
    if found != expected:
        raise CorpusError(
            f"{path} is not this run's {what}: its sha256 is {found}, but the run names {expected}.",
            "Get the file that this run was started with, unchanged and uncompressed. To use this one, begin another "
            f"run: {INIT_WITH_FILES}",
        )


def _builtin_text(name: str) -> TextIO:
    if name not in BUILTIN_DIGESTS:
        raise CorpusError(
            f"There is no built-in corpus {name!r}.",
            f"Update p2ptrain if the run was made with a newer version; this one ships {', '.join(BUILTIN_DIGESTS)}.",
        )
    packed = resources.files("p2ptrain.data").joinpath("corpora", f"{name}.txt.xz").read_bytes()
    try:
        text = lzma.decompress(packed)
    except lzma.LZMAError:
        text = b""
    if hashlib.sha256(text).hexdigest() != BUILTIN_DIGESTS[name]:
        raise CorpusError(f"The built-in corpus {name} is damaged.", "Install p2ptrain again.")
    return io.TextIOWrapper(io.BytesIO(text), encoding="utf-8", newline="")


def _text_file_pieces(path: Path) -> Iterator[TextChunk]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from _text_pieces(file)
    except UnicodeDecodeError as error:
        if _is_binary(path):
            raise CorpusError(
                f"{path} is not a text file.",
                "Name a file of plain text, jsonl or parquet; convert other formats first.",
            ) from error
        raise CorpusError(
            f"{path} is not UTF-8 text: {error.reason} (byte 0x{error.object[error.start]:02x}).",
            "Use a text file in UTF-8; iconv converts from other encodings.",
        ) from error
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error.strerror}.", files.remedy(error, "")) from error


def _is_binary(path: Path) -> bool:
    """Return whether a file that is not UTF-8 begins with zero bytes, but not as UTF-16 or UTF-32."""
    head = b""
    with contextlib.suppress(OSError), path.open("rb") as file:
        head = file.read(BINARY_HEAD_BYTES)
    return b"\0" in head and not head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE))


def _text_pieces(file: TextIO) -> Iterator[TextChunk]:
    """Yield one document in chunks that end at line ends, or anywhere within lines that are longer than a chunk."""
    while text := file.read(PIECE_CHARACTERS):
        text += file.readline(PIECE_CHARACTERS)
        yield TextChunk(text, ends_document=False)


def hub_name(spec: HubCorpus) -> str:
    """Return the name of a data set's split in messages."""
    return f"{spec.name} (configuration {spec.config}, split {spec.split}, revision {spec.revision})"


def _hub_pieces(spec: HubCorpus, counts: TextCounts, position: dict[str, Any] | None) -> Iterator[TextChunk]:
    counts.where = hub_name(spec)
    place = {"file": 0, "row": 0}
    if position is not None:
        place = {name: position[name] for name in place}
        counts.rows, counts.skipped, counts.examples = (position[name] for name in COUNTED)
    characters = 0
    with hub_errors(counts.where, "reading continues near where it stopped"):
        for chunk in _cut(_hub_texts(spec, counts, place)):
            characters += len(chunk.text)
            if characters < SAVED_CHARACTERS or not chunk.ends_document:
                yield chunk
            else:
                saved = {**place, **{name: copy.copy(getattr(counts, name)) for name in COUNTED}}
                yield chunk._replace(position=saved)
                characters = 0


@contextlib.contextmanager
def hub_errors(where: str, then: str) -> Iterator[None]:
    """Turn the errors of reading a data set into InterruptedCorpusError, except other CorpusErrors.

    Args:
        where: name of the data set in messages.
        then: what happens when the owner starts again.
    """
    try:
        yield
    except Exception as error:  # also errors of the hub's client and of the HTTP library that it uses
        if isinstance(error, CorpusError) and not isinstance(error, UnreadableError):
            raise
        why = error.problem.rstrip(".") if isinstance(error, UnreadableError) else f"{type(error).__name__}: {error}"
        raise InterruptedCorpusError(
            f"The corpus {where} could not be streamed from the Hugging Face hub ({one_line(why)}).",
            "Check the internet connection (and HF_ENDPOINT, HF_HUB_OFFLINE if set), and that the dataset is public"
            f" or you are logged in (`hf auth login`); then start again: {then}. If it"
            " stops there again, tell the run's author that the data set is damaged.",
        ) from error


def _hub_texts(spec: HubCorpus, counts: TextCounts, place: dict[str, int]) -> Iterator[str]:
    """Yield the texts after ``place``, which follows: index of the file, and number of the row that was yielded."""
    for index, file in enumerate(split_files(spec)):
        if index >= place["file"]:
            after = place["row"] if index == place["file"] else 0
            read, unit = (jsonl_rows, "line") if file.format == "jsonl" else (parquet_rows, "row")
            rows = read(file, spec.text_field, after)
            for number, text in texts(rows, f"{one_line(file.path)}, {unit}", counts, is_remote=True):
                place.update(file=index, row=number)
                yield text


def _cut(documents: Iterable[str]) -> Iterator[TextChunk]:
    """Yield the chunks of every document."""
    for text in documents:
        for start in range(0, len(text), PIECE_CHARACTERS):
            end = start + PIECE_CHARACTERS
            yield TextChunk(text[start:end], ends_document=end >= len(text))
