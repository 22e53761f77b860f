"""Runs that are made of small texts, and what is in their shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from p2ptrain.data.figures import TextSummary, read_summary
from p2ptrain.data.file_store import stored
from p2ptrain.data.own_text import Wanted, create
from p2ptrain.manifest import Manifest
from p2ptrain.tokens.corpus import ShardCorpus
from p2ptrain.tokens.index import Shard, ShardIndex
from p2ptrain.tokens.opened import open_corpus
from p2ptrain.tokens.store import ShardStore

T = 16
NEARLY_NONE = 1e-9
"""Share of the held-out text by which only the end of a short text is held out."""


@dataclass(frozen=True)
class Built:
    """A run of an author's text."""

    run: Path
    manifest: Manifest
    corpus: ShardCorpus
    summary: TextSummary

    @property
    def index(self) -> ShardIndex:
        return self.corpus.index

    @property
    def training(self) -> np.ndarray:
        return self._ids(self.index.training)

    @property
    def held_out(self) -> np.ndarray:
        return self._ids(self.index.held_out)

    @property
    def ids(self) -> list[int]:
        """All ids, of which only the end is held out."""
        return [*self.training.tolist(), *self.held_out.tolist()]

    def _ids(self, shards: list[Shard]) -> np.ndarray:
        parts = [self.corpus.store.map(each.digest, self.index.id_bytes, each.tokens) for each in shards]
        return np.concatenate(parts)  # type: ignore[arg-type]


def build(
    run: Path,
    *corpora: object,
    tell: Callable[[int, float], None] = lambda tokens, share: None,
    **wanted: Any,
) -> Built:
    """Make a run of texts, in sequences of T tokens and with the end held out, unless something else is wanted."""
    fields = {"preset": "demo", "sequence_length": T, "held_out": NEARLY_NONE, **wanted}
    create(run, Wanted([str(each) for each in corpora], **fields), tell)
    return opened(run)


def opened(run: Path) -> Built:
    from p2ptrain.manifest import read_run

    manifest = read_run(run)
    assert manifest.corpus.kind == "shards"
    corpus = open_corpus(manifest, ShardStore(run / "shards"), stored(run, manifest.corpus.root))
    summary = read_summary(run)
    assert summary is not None
    return Built(run, manifest, corpus, summary)
