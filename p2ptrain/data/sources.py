"""Sources of a corpus's text: the package itself, the Hugging Face hub at a revision, or a file with a given digest.

Every source is an iterator of chunks of at most about a megabyte, so memory is bounded for any corpus. The ``datasets``
library streams rows of the hub and of jsonl or parquet files; plain text needs only Python. A manifest comes from a
stranger and never contains a path: the owner names the file, and its digest must be the manifest's.
"""

from __future__ import annotations

import glob
import hashlib
import io
import lzma
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from p2ptrain.base.errors import CorpusError

if TYPE_CHECKING:
    from p2ptrain.manifest import Corpus as CorpusSpec
    from p2ptrain.manifest import HubCorpus

PIECE_CHARACTERS = 1 << 20
"""Characters read at once. Part of the token stream's definition: a tokenizer may join words differently at a cut."""

BUILTIN_DIGESTS = {"shakespeare": "2351fe17efb0c9982030b513ac35819deca6548a8a2ebb9d47c2aacb56f92e44"}
"""SHA-256 of the unpacked text of every corpus in ``corpora/``."""

INSTALL_DATASETS = "Install it: pip install 'p2ptrain[data]'"


class TextChunk(NamedTuple):
    """Consecutive text of one document."""

    text: str
    ends_document: bool


def read_pieces(spec: CorpusSpec, data: Path | None) -> Iterator[TextChunk]:
    """Yield the whole text of a corpus, in order.

    Args:
        spec: the manifest's section.
        data: the file the owner named, for kind "file".

    Raises:
        CorpusError: at once or while iterating; names the source that failed.
    """
    if spec.kind == "builtin":
        return _builtin_pieces(spec.name)
    if spec.kind == "hub":
        return _hub_pieces(spec)
    if data is None:
        raise CorpusError(
            f"This run's corpus is a {spec.format} file with sha256 {spec.sha256}, but no file was given.",
            "Get that file from the run's author and pass it with --data FILE.",
        )
    check_digest(data, spec.sha256, "corpus")
    if spec.format == "text":
        return _text_file_pieces(data)
    return _row_file_pieces(data, spec.format, spec.text_field)


def check_digest(path: Path, expected: str, what: str) -> None:
    """Raise CorpusError unless ``path`` is a readable file with the SHA-256 ``expected``."""
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CorpusError(
            f"The {what} file {path} cannot be read: {error.strerror}.",
            "Check its name and permissions.",
        ) from error
    if found != expected:
        raise CorpusError(
            f"{path} is not this run's {what}: its sha256 is {found}, but the run names {expected}.",
            "Get the file that this run was started with, unchanged and uncompressed.",
        )


def _builtin_pieces(name: str) -> Iterator[TextChunk]:
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
    return _text_pieces(io.TextIOWrapper(io.BytesIO(text), encoding="utf-8", newline=""))


def _text_file_pieces(path: Path) -> Iterator[TextChunk]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            yield from _text_pieces(file)
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{path} is not UTF-8 text: {error.reason} (byte 0x{error.object[error.start]:02x}).",
            "Name a text file in UTF-8, as the run needs.",
        ) from error
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error.strerror}.", "Check its disk and permissions.") from error


def _text_pieces(file: TextIO) -> Iterator[TextChunk]:
    """Yield one document in chunks that end at line ends, or anywhere within lines that are longer than a chunk."""
    while text := file.read(PIECE_CHARACTERS):
        yield TextChunk(text + file.readline(PIECE_CHARACTERS), ends_document=False)


def _row_file_pieces(path: Path, file_format: str, text_field: str) -> Iterator[TextChunk]:
    datasets = _import_datasets(f"A corpus in {file_format} form")
    builder = {"jsonl": "json", "parquet": "parquet"}[file_format]
    try:
        rows = datasets.load_dataset(
            builder, data_files=glob.escape(str(path.resolve())), split="train", streaming=True
        )
        yield from _row_pieces(rows, text_field, str(path))
    except StopIteration:  # datasets raises it for a file without rows
        return
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise CorpusError(
            f"{path} cannot be read as {file_format} ({error}).",
            f"Name a {file_format} file whose rows have the field {text_field!r}, as the run needs.",
        ) from error


def _hub_pieces(spec: HubCorpus) -> Iterator[TextChunk]:
    datasets = _import_datasets(f"The hub corpus {spec.name}")
    if Path(spec.name).exists():  # datasets would read it, and a stranger must not name local folders
        raise CorpusError(
            f"The run's corpus is {spec.name} on the hub, but a folder here has the same name.",
            "Start from another directory.",
        )
    where = f"{spec.name} (configuration {spec.config}, split {spec.split}, revision {spec.revision})"
    try:
        rows = datasets.load_dataset(spec.name, spec.config, split=spec.split, revision=spec.revision, streaming=True)
        yield from _row_pieces(rows, spec.text_field, where)
    except CorpusError:
        raise
    except Exception as error:  # also errors of datasets and of the HTTP library that it uses
        raise CorpusError(
            f"The corpus {where} could not be streamed from the Hugging Face hub ({error}).",
            "Check the internet connection (and HF_ENDPOINT, HF_HUB_OFFLINE if set), and that the dataset is public"
            " or you are logged in (`hf auth login`); then start again.",
        ) from error


def _row_pieces(rows: Iterable[Mapping[str, Any]], text_field: str, where: str) -> Iterator[TextChunk]:
    """Yield one document per row, a long one in several chunks; skip rows without text."""
    for row in rows:
        if text_field not in row:
            raise CorpusError(
                f"The rows of {where} have no field {text_field!r}; they have {', '.join(map(repr, row))}.",
                "Ask the run's author: corpus.text_field names the wrong field.",
            )
        text = row[text_field]
        if text is None or text == "":
            continue
        if not isinstance(text, str):
            raise CorpusError(
                f"The field {text_field!r} of {where} holds {type(text).__name__}, not text.",
                "Ask the run's author: corpus.text_field names the wrong field.",
            )
        for start in range(0, len(text), PIECE_CHARACTERS):
            end = start + PIECE_CHARACTERS
            yield TextChunk(text[start:end], ends_document=end >= len(text))


def _import_datasets(purpose: str) -> Any:
    """Import the optional ``datasets`` library; done late because it takes seconds."""
    try:
        import datasets
    except ImportError as error:
        raise CorpusError(f"{purpose} needs the package datasets, which is not installed.", INSTALL_DATASETS) from error
    return datasets
