"""Rows of a run's shards as text, with what training predicts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from p2ptrain.base.errors import CorpusError
from p2ptrain.base.text import printable
from p2ptrain.data.file_store import stored
from p2ptrain.data.tokenizer import Tokenizer, tokenizer_of
from p2ptrain.data.unfinished import SHARDS_FOLDER
from p2ptrain.tokens import builtin
from p2ptrain.tokens.index import ShardIndex
from p2ptrain.tokens.opened import open_corpus
from p2ptrain.tokens.packing import BEGINS, COUNTS, FLAG_BITS
from p2ptrain.tokens.store import ShardStore

if TYPE_CHECKING:
    from p2ptrain.manifest import Manifest


class ShownPart(NamedTuple):
    """Consecutive tokens that are all predicted, or none of them."""

    text: str
    counts: bool


def shown_rows(manifest: Manifest, run: Path, count: int) -> Iterator[list[ShownPart]]:
    """Yield the first rows of the first shard. Raises CorpusError if a file of the run is not in its directory."""
    length, corpus, spec = manifest.training.sequence_length, manifest.corpus, manifest.tokenizer
    tokenizer = tokenizer_of(manifest, stored(run, spec.sha256) if spec.kind == "file" else None)
    if corpus.kind == "builtin":
        parts = builtin.regions(builtin.text(corpus.name), length, corpus.validation_fraction)
        ids, is_packed = parts.training.reshape(-1), False
    else:
        opened = open_corpus(manifest, ShardStore(run / SHARDS_FOLDER), stored(run, corpus.root))
        ids, is_packed = _first(opened.index, opened.store), opened.is_packed
    for start in range(0, min(count, len(ids) // length) * length, length):
        row = ids[start : start + length]
        yield _packed(row, tokenizer) if is_packed else [ShownPart(_text(row, tokenizer), True)]


def _first(index: ShardIndex, store: ShardStore) -> np.ndarray:
    shard = index.training[0]
    ids = store.map(shard.digest, index.id_bytes, shard.tokens)
    if ids is None:
        raise CorpusError(
            f"The run's first shard is not in {printable(store.directory)}.",
            "Restore that folder from a copy, or make it again with `p2ptrain init NEW_RUN` and the same text.",
        )
    return ids


def _packed(codes: np.ndarray, tokenizer: Tokenizer) -> list[ShownPart]:
    """Return the parts of a row of dialogues, each dialogue on a line of its own."""
    flags = codes & COUNTS
    borders = np.flatnonzero((np.diff(flags) != 0) | (codes[1:] & BEGINS > 0)) + 1
    parts: list[ShownPart] = []
    for part in np.split(codes, borders):
        new = "\n" if part[0] & BEGINS and parts else ""
        parts.append(ShownPart(new + _text(part >> FLAG_BITS, tokenizer), bool(part[0] & COUNTS)))
    last = int(np.flatnonzero(codes & BEGINS)[-1])
    if not (codes[last:] & COUNTS).any():
        parts[-1] = ShownPart(f"\n({len(codes) - last:,} tokens of padding)", False)
    return parts


def _text(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    """Return a text in which separators and other special tokens are seen."""
    marks = tokenizer.marks
    places = np.flatnonzero(np.isin(ids, [*marks]))
    found, start = [], 0
    for place in (*places.tolist(), len(ids)):
        found.append(tokenizer.decode(ids[start:place].tolist()))
        found.append(marks[int(ids[place])] if place < len(ids) else "")
        start = place + 1
    return "".join(found)
