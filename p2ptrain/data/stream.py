"""Corpus as one long array of token ids, on disk and memory-mapped.

The stream is built once per (corpus, tokenizer) and machine: text chunks are tokenized into a ``.npy`` file of the
narrowest unsigned type that holds the vocabulary, with a few megabytes of memory for any corpus. The file gets its
final name only when it is complete and on the disk (temporary name, fsync, rename), and its header states its length,
so an incomplete file is recognized and built again. A source that can continue in the middle saves its position beside
the incomplete file, and the next build continues from there (``Unfinished``). A lock file keeps two peers of one
machine from building the same stream at once.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from filelock import FileLock

from p2ptrain.base import files
from p2ptrain.base.errors import CorpusError, HomeError
from p2ptrain.data.sources import PIECE_CHARACTERS, TextChunk
from p2ptrain.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

BORDER_CHARACTERS = 4096
"""Last part of a chunk that is searched for a border of words; words of natural languages are far shorter."""

CONTEXT_CHARACTERS = 64
"""Text before a chunk that is encoded with it, so that the tokenizer sees the middle of a document, not its start."""

BORDERS = (re.compile(r"(?<=\w)(?= \w)"), re.compile(r"(?<=\S\n)(?=\w)"))
"""Places where every usual tokenizer separates words: before a single space, else after a line end."""


class Unfinished:
    """A stream that is being built, and the position from which a later build can continue."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._dtype = dtype
        self._note = path.with_suffix(".resume")
        self.path = path.with_suffix(".part")
        self.tokens = 0
        """Tokens in the file so far."""
        self.position: dict[str, Any] | None = None
        """Position of the source at these tokens when the build began; None at its start."""

    def open(self) -> BinaryIO:
        """Open the file for appending after the tokens of the saved position, if any. Raises OSError."""
        try:
            saved = json.loads(self._note.read_bytes())
            file: BinaryIO = self.path.open("r+b")
        except (FileNotFoundError, ValueError):
            saved, file = {}, self.path.open("wb")
        _write_header(file, 0, self._dtype)
        start = file.tell()
        end = start + saved.get("tokens", 0) * self._dtype.itemsize
        if saved and file.seek(0, os.SEEK_END) >= end:
            self.tokens, self.position = saved["tokens"], saved["position"]
        else:
            self.forget()
            end = start
        file.truncate(end)
        file.seek(end)
        self._file = file
        return file

    def save(self, position: dict[str, Any]) -> None:
        """Note that the tokens written so far end at a position of the source. Raises OSError."""
        self._file.flush()
        os.fsync(self._file.fileno())
        saved = {"tokens": self.tokens, "position": position}
        files.replace(self._note, json.dumps(saved).encode())

    def forget(self) -> None:
        """Let the next build begin anew."""
        self._note.unlink(missing_ok=True)

    def leave(self) -> None:
        """Remove the file, unless a later build can continue it."""
        if not files.exists(self._note):
            self.path.unlink(missing_ok=True)


def open_stream(
    directory: Path,  # cache, shared by all peers of this machine
    key: str,  # from ``stream_key``: identifies corpus and tokenizer
    vocabulary_size: int,
    build: Callable[[Unfinished], Iterator[np.ndarray]],  # called only if the stream is not cached
) -> np.ndarray:
    """Return the token stream ``key``, [tokens] ids, memory-mapped and read-only; build it if it is not cached.

    Raises:
        CorpusError: from ``build``, or if it yields nothing.
        HomeError: the cache directory cannot be written or is full.
    """
    path = stream_path(directory, key)
    dtype = token_type(vocabulary_size)
    try:
        tokens = _map(path, dtype)
        if tokens is not None:
            return tokens
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):  # the system releases it when its holder dies
            tokens = _map(path, dtype)  # another peer may have built it during the wait
            if tokens is None:
                logger.info("building the token stream %s", path)
                _write(path, build, Unfinished(path, dtype), dtype)
                tokens = _map(path, dtype)
    except OSError as error:
        remedy = files.remedy(error, "set XDG_CACHE_HOME to another directory")
        raise HomeError(
            f"The token cache {directory} cannot be written: {files.cause(error)}.",
            f"{remedy} Nothing was lost; start again.",
        ) from error
    if tokens is None:
        raise HomeError(f"The token cache {path} vanished while it was opened.", "Start again.")
    return tokens


def cache_directory() -> Path:
    """Return the directory of token streams, which all peers of this user share. Raises HomeError."""
    return files.expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "p2ptrain"


def stream_path(directory: Path, key: str) -> Path:
    return directory / f"{key}.npy"


def token_type(vocabulary_size: int) -> np.dtype:
    """Return the narrowest unsigned integer type that holds every id."""
    return np.min_scalar_type(vocabulary_size - 1)


class EncodedText(NamedTuple):
    """Ids of consecutive text of one document."""

    ids: np.ndarray
    text_bytes: int
    """Bytes of that text as UTF-8; of a text that the limit cuts, in proportion to its ids."""
    ends_document: bool
    position: dict[str, Any] | None
    """Position of the source after these ids, if it can continue there."""


def tokenize(
    pieces: Iterable[TextChunk],
    tokenizer: Tokenizer,
    most_tokens: int | None,
    prefix: Sequence[int] = (),  # ids before each document
) -> Iterator[EncodedText]:
    """Yield the ids of all chunks in order, a separator after each document, at most ``most_tokens`` in total.

    The ids are those of whole documents, if the tokenizer separates words at ``BORDERS``.
    """
    left, begins_document = most_tokens, True
    if left == 0:
        return
    for batch in _batches(_cut_between_words(pieces)):
        for cut, ids in zip(batch, _encode(batch, tokenizer), strict=True):
            if begins_document and prefix:
                ids = np.insert(ids, 0, prefix)
            begins_document = cut.ends_document
            if cut.ends_document and tokenizer.separator is not None:
                ids = np.append(ids, np.asarray(tokenizer.separator, dtype=ids.dtype))
            text_bytes = len(cut.text.encode(errors="replace"))
            if left is not None:
                whole, ids = len(ids), ids[:left]
                text_bytes = text_bytes * len(ids) // max(1, whole)
                left -= len(ids)
            yield EncodedText(ids, text_bytes, cut.ends_document, cut.position)
            if left == 0:
                return


class _Cut(NamedTuple):
    """Consecutive text of one document, cut between words."""

    context: str  # text just before, empty at the document's start
    text: str
    ends_document: bool
    position: dict[str, Any] | None = None  # of the document's end


def _cut_between_words(pieces: Iterable[TextChunk]) -> Iterator[_Cut]:
    context = held = ""
    for piece in pieces:
        text = held + piece.text
        end = len(text) if piece.ends_document else _border(text)
        yield _Cut(context, text[:end], piece.ends_document, piece.position if piece.ends_document else None)
        held = text[end:]
        context = "" if piece.ends_document else text[max(0, end - CONTEXT_CHARACTERS) : end]
    if held:
        yield _Cut(context, held, ends_document=False)


def _border(text: str) -> int:
    """Return the last border of words in ``text``; its end if there is none."""
    start = max(0, len(text) - BORDER_CHARACTERS)
    for border in BORDERS:
        if places := [found.start() for found in border.finditer(text, start)]:
            return places[-1]
    return len(text)


def _encode(batch: list[_Cut], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the ids of each text as they are after its context."""
    contexts = iter(tokenizer.encode_batch([cut.context for cut in batch if cut.context]))
    for cut, ids in zip(batch, tokenizer.encode_batch([cut.context + cut.text for cut in batch]), strict=True):
        before = next(contexts) if cut.context else ids[:0]
        if np.array_equal(ids[: len(before)], before):
            yield ids[len(before) :]
        else:  # the tokenizer joins both sides of the border
            yield tokenizer.encode_batch([cut.text])[0]


def _batches(cuts: Iterable[_Cut]) -> Iterator[list[_Cut]]:
    """Group texts to about ``PIECE_CHARACTERS``, so that a fast tokenizer can use several threads."""
    batch: list[_Cut] = []
    characters = 0
    for cut in cuts:
        batch.append(cut)
        characters += len(cut.text)
        if characters >= PIECE_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _map(path: Path, dtype: np.dtype) -> np.ndarray | None:
    """Map the stream at ``path``; None if it does not exist or is incomplete."""
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        return None
    except (ValueError, EOFError):  # shorter than its header says, or no header
        logger.warning("the token stream %s is incomplete and is built again", path)
        return None
    return tokens if tokens.ndim == 1 and tokens.dtype == dtype and len(tokens) else None


def _write(
    path: Path, build: Callable[[Unfinished], Iterator[np.ndarray]], unfinished: Unfinished, dtype: np.dtype
) -> None:
    try:
        with unfinished.open() as file:
            for ids in build(unfinished):
                file.write(ids.astype(dtype, copy=False).tobytes())
                unfinished.tokens += len(ids)
            if unfinished.tokens == 0:
                raise CorpusError("The corpus is empty.", "Use a corpus that contains text.")
            end = file.tell()
            file.seek(0)
            _write_header(file, unfinished.tokens, dtype)
            assert file.tell() == end - unfinished.tokens * dtype.itemsize, "numpy no longer pads the header"
            file.flush()
            os.fsync(file.fileno())
        unfinished.path.replace(path)
        unfinished.forget()
        files.sync(path.parent)
    finally:
        unfinished.leave()


def _write_header(file: BinaryIO, count: int, dtype: np.dtype) -> None:
    """Write a header whose length does not depend on ``count``: numpy pads it so that the array may grow in place."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)
