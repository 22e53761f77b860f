"""Rows of a run's shards as text, with what training predicts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from p2ptrain.base.errors import CorpusError
from p2ptrain.base.text import printable
from p2ptrain.data.file_store import MADE_AGAIN, kept
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
    tokenizer = tokenizer_of(manifest, kept(run, spec.sha256, "tokenizer") if spec.kind == "file" else None)
    if corpus.kind == "builtin":
        parts = builtin.regions(builtin.text(corpus.name), length, corpus.validation_fraction)
        ids, is_packed = parts.training.reshape(-1), False
    else:
        opened = open_corpus(manifest, ShardStore(run / SHARDS_FOLDER), kept(run, corpus.root, "index of shards"))
        ids, is_packed = _first(opened.index, opened.store), opened.is_packed
    for start in range(0, min(count, len(ids) // length) * length, length):
        row = ids[start : start + length]
        yield _packed(row, tokenizer) if is_packed else [ShownPart(tokenizer.shown(row.tolist()), True)]


def _first(index: ShardIndex, store: ShardStore) -> np.ndarray:
    shard = index.training[0]
    ids = store.map(shard.digest, index.id_bytes, shard.tokens) if store.is_whole(shard.digest) else None
    if ids is None:
        raise CorpusError(
            f"The run's first shard, {printable(store.path(shard.digest))}, is missing or was edited.",
            f"Restore {printable(store.directory)} from a copy, or {MADE_AGAIN}.",
        )
    return ids


def _packed(codes: np.ndarray, tokenizer: Tokenizer) -> list[ShownPart]:
    """Return the parts of a row of dialogues, each dialogue on a line of its own."""
    flags = codes & COUNTS
    borders = np.flatnonzero((np.diff(flags) != 0) | (codes[1:] & BEGINS > 0)) + 1
    parts: list[ShownPart] = []
    for part in np.split(codes, borders):
        new = "\n" if part[0] & BEGINS and parts else ""
        parts.append(ShownPart(new + tokenizer.shown((part >> FLAG_BITS).tolist()), bool(part[0] & COUNTS)))
    last = int(np.flatnonzero(codes & BEGINS)[-1])
    if not (codes[last:] & COUNTS).any():
        parts[-1] = ShownPart(f"\n({len(codes) - last:,} tokens of padding)", False)
    return parts
