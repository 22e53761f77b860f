"""Checks of a run's text and tokenizer before the run is signed or served, with the sentences that a peer would print.

Only files of this machine are read, and of a long text only the beginning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from p2ptrain.base.errors import CorpusError, HomeError
from p2ptrain.data.chat_template import CHATML, Dialogue
from p2ptrain.data.chat_tokens import ChatEncoder
from p2ptrain.data.corpus import (
    HASHED_BYTES,
    check_named,
    check_vocabulary,
    has_stream,
    key_of,
    read_summary,
    split_of,
)
from p2ptrain.data.dialogues import characters, read_dialogues
from p2ptrain.data.fidelity import FidelityCheck
from p2ptrain.data.packed_stream import load_template, rows_of_dialogues, run_warnings, template_name
from p2ptrain.data.rows import TextCounts
from p2ptrain.data.sources import TextChunk, read_pieces
from p2ptrain.data.stream import cache_directory, stream_path, tokenize
from p2ptrain.data.tokenizer import Tokenizer, tokenizer_of
from p2ptrain.manifest.fitting import repetition

if TYPE_CHECKING:
    from p2ptrain.manifest import Manifest

TRIED_CHARACTERS = 4 << 20
"""Characters of the text that are tokenized: seconds on one core. Guess: the time that this takes on rented servers."""


def check_text(
    manifest: Manifest, data: Path | None, tokenizer_file: Path | None, template_file: Path | None = None
) -> list[str]:
    """Check the run's files as far as they are here: a bad one would otherwise stop every peer at its first start.

    Args:
        data: the corpus, if the run names it by digest and it is here.
        tokenizer_file: the tokenizer.json, likewise.
        template_file: the chat template, likewise.

    Returns:
        Warnings for the author, without their last full stops; the first sentence of each stands alone.

    Raises:
        CorpusError: the text, the tokenizer or the chat template is not the named one, unusable or empty, or the text
            is too short.
        ManifestError: the tokenizer has more ids than the model.
    """
    cached = _cached(manifest)
    check_named(manifest, data, tokenizer_file, cached is not None, template_file)
    tokenizer: Tokenizer | None = None
    if manifest.tokenizer.kind == "bytes" or tokenizer_file is not None:
        tokenizer = tokenizer_of(manifest, tokenizer_file)
        check_vocabulary(manifest, tokenizer)
    if cached is None:
        try:
            cached = (None, []) if data is None else _tried(manifest, tokenizer, data, template_file)
        except CorpusError as error:
            if not isinstance(error.__cause__, ImportError):
                raise
            return [f"the text was not checked: {error.problem.rstrip('.')}"]  # a bootstrap can do without the package
    tokens, found = cached
    if tokens is None:
        return found
    split = split_of(manifest, tokens)
    repeated = repetition(manifest, split.train_tokens)
    return found if repeated is None else [*found, repeated]


def _cached(manifest: Manifest) -> tuple[int | None, list[str]] | None:
    """Return tokens and warnings of the run's token stream in the cache; None if there is none."""
    with contextlib.suppress(HomeError, OSError, ValueError, EOFError):  # damaged: the next peer builds it again
        cache = cache_directory()
        if has_stream(manifest, cache):
            path = stream_path(cache, key_of(manifest))
            summary = read_summary(manifest, cache)
            tokens = len(np.load(path, mmap_mode="r", allow_pickle=False))
            return tokens, [] if summary is None else summary.warnings
    return None


def _tried(
    manifest: Manifest, tokenizer: Tokenizer | None, data: Path, template_file: Path | None
) -> tuple[int | None, list[str]]:
    """Tokenize the beginning of the text; return its tokens, None unless it is all of the text, and warnings."""
    with contextlib.suppress(OSError):  # reading reports it
        if data.stat().st_size > HASHED_BYTES:
            return None, [f"the corpus was not checked, as it is larger than {HASHED_BYTES >> 30} GiB"]
    counts = TextCounts()
    if template_name(manifest.corpus):
        return _tried_dialogues(manifest, tokenizer, data, template_file, counts)
    pieces = iter(read_pieces(manifest.corpus, data, counts))
    beginning = _first(pieces, TRIED_CHARACTERS)
    most = None if manifest.corpus.kind == "builtin" else manifest.corpus.max_tokens
    if tokenizer is None:
        tokens, found = None, []
        for _ in beginning:
            pass
    else:
        check = FidelityCheck(tokenizer, counts)
        chunks = tokenize(check.reading(beginning), tokenizer, most, tokenizer.prefix)
        tokens = sum(len(chunk.ids) for chunk in check.writing(chunks))
        found = list(check.warnings())
    if tokens != most and next(pieces, None) is not None:
        return None, found
    counts.check()
    return tokens, found


def _tried_dialogues(
    manifest: Manifest, tokenizer: Tokenizer | None, data: Path, template_file: Path | None, counts: TextCounts
) -> tuple[int | None, list[str]]:
    """Render and tokenize the first dialogues, if tokenizer and template are here; see ``_tried``."""
    assert manifest.corpus.kind != "builtin"  # which has no template
    dialogues = read_dialogues(manifest.corpus, data, counts)
    beginning = _first_dialogues(dialogues, TRIED_CHARACTERS)
    if tokenizer is None or (template_name(manifest.corpus) != CHATML and template_file is None):
        for _ in beginning:
            pass
        return None, []
    check = FidelityCheck(tokenizer, counts, is_packed=True)
    most = manifest.corpus.max_tokens
    with load_template(manifest.corpus, tokenizer, template_file) as template:
        encoder = ChatEncoder(template, tokenizer)
        length, is_hub = manifest.training.sequence_length, manifest.corpus.kind == "hub"
        rows = rows_of_dialogues(length, tokenizer, encoder, beginning, counts, check, most, is_hub)
        tokens = sum(map(len, rows))
    found = [*run_warnings(counts, manifest), *check.warnings()]
    return (None if next(dialogues, None) is not None else tokens), found


def _first_dialogues(dialogues: Iterable[Dialogue], most: int) -> Iterator[Dialogue]:
    """Yield dialogues until they hold that many characters."""
    left = most
    for each in dialogues:
        yield each
        left -= sum(map(characters, each.messages))
        if left <= 0:
            return


def _first(pieces: Iterable[TextChunk], characters: int) -> Iterator[TextChunk]:
    """Yield pieces until they hold that many characters."""
    left = characters
    for piece in pieces:
        yield piece
        left -= len(piece.text)
        if left <= 0:
            return
