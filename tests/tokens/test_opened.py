"""Opening of a run's text: the shipped one, and an author's by its index."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from p2ptrain.base.errors import CorpusError, ManifestError
from p2ptrain.manifest import Manifest, preset, with_changes
from p2ptrain.tokens import builtin
from p2ptrain.tokens.corpus import ShardCorpus
from p2ptrain.tokens.index import ShardIndex
from p2ptrain.tokens.opened import open_corpus
from p2ptrain.tokens.store import ShardStore
from p2ptrain.tokens.writing import ShardWriter

T = 64


def manifest(**changes: object) -> Manifest:
    dotted = {path.replace("__", "."): value for path, value in changes.items()}
    return with_changes(preset("demo", "ab" * 32), {"training.sequence_length": T, **dotted})


def written(store: ShardStore, row_tokens: int = 0, largest: int = 255) -> ShardIndex:
    writer = ShardWriter(store, 2, row_tokens)
    writer.add(np.arange(100 * T) % largest + 1, is_training=True)
    writer.add(np.arange(10 * T) % largest + 1, is_training=False)
    return writer.finish(row_tokens or T)


def section(index: ShardIndex, **fields: object) -> dict[str, object]:
    sizes = {"training_tokens": index.training_tokens, "held_out_tokens": index.held_out_tokens}
    return {"kind": "shards", "root": index.root, **sizes, **fields}


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., ShardCorpus]:
    """Return ``opened(index, fields of the section)``."""

    def build(index: ShardIndex, data: bytes | None = None, **fields: object) -> ShardCorpus:
        path = tmp_path / "index"
        path.write_bytes(index.to_bytes() if data is None else data)
        return open_corpus(manifest(corpus=section(index, **fields)), ShardStore(tmp_path / "store"), path)

    return build


def test_the_shipped_text_has_the_same_root_everywhere(tmp_path: Path) -> None:
    corpus = open_corpus(manifest(), ShardStore(tmp_path), None)
    assert corpus.index.root == "bd603450cc621f6c9fcc7671321a7cbea44b9d1fd1405681aa7292ed5134c5a8"
    assert corpus.held_out_tokens == pytest.approx(0.05 * corpus.train_tokens, rel=0.1)
    text = builtin.text("shakespeare").tobytes()
    for row in torch.cat([corpus.step_batch(1, "amber", 7, 4), next(corpus.validation_batches(256, 4))]).tolist():
        pieces = ((bytes(row[:at]), bytes(row[at:])) for at in range(T + 1))
        assert any(first in text and second in text for first, second in pieces), "at most one border of regions in it"


def test_held_out_text_comes_from_all_regions_and_is_not_trained_on() -> None:
    text = np.arange(100_000)
    parts = builtin.regions(text, T, 0.1)
    assert len(parts.held_out) > 10
    assert not {*parts.held_out.flatten()} & {*parts.training.flatten()}
    assert {*np.diff(parts.held_out[:, 0])} == {len(text) // len(parts.held_out)}


def test_shards_that_are_gone_are_written_again(tmp_path: Path) -> None:
    store = ShardStore(tmp_path)
    digest = open_corpus(manifest(), store, None).index.digests[0]
    store.path(digest).unlink()
    open_corpus(manifest(), store, None)
    assert store.has(digest)


def test_an_authors_text_is_read_by_its_index(tmp_path: Path, opened: Callable[..., ShardCorpus]) -> None:
    corpus = opened(written(ShardStore(tmp_path / "store")))
    assert corpus.train_sequences == 99
    assert corpus.step_batch(1, "amber", 0, 3).shape == (3, T + 1)


def test_an_index_that_is_not_here_is_named(tmp_path: Path) -> None:
    index = written(ShardStore(tmp_path))
    with pytest.raises(CorpusError, match="index of the run's text is not on this machine"):
        open_corpus(manifest(corpus=section(index)), ShardStore(tmp_path), None)
    with pytest.raises(CorpusError, match="cannot be read"):
        open_corpus(manifest(corpus=section(index)), ShardStore(tmp_path), tmp_path / "nowhere")


def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, opened: Callable[..., ShardCorpus]) -> None:
    store = ShardStore(tmp_path / "store")
    index, rows = written(store), written(store, row_tokens=T)
    with pytest.raises(CorpusError, match="is no index of a text"):
        opened(index, b"what")
    with pytest.raises(CorpusError, match="is the index of another text"):
        opened(index, written(store, largest=9).to_bytes())
    with pytest.raises(ManifestError, match="7 training and 640 held-out tokens, and its index has 6,400 and 640"):
        opened(index, training_tokens=7)
    with pytest.raises(ManifestError, match="text is plain text, and its manifest says rows of 64 tokens"):
        opened(index, template="chatml")
    with pytest.raises(ManifestError, match="text is rows of 64 tokens, and its manifest says plain text"):
        opened(rows)
    with pytest.raises(ManifestError, match="text is rows of 32 tokens"):
        opened(written(store, row_tokens=32), template="chatml")
    assert opened(rows, template="chatml").is_packed


def test_an_id_that_the_model_lacks_is_refused_when_it_is_read(
    tmp_path: Path, opened: Callable[..., ShardCorpus]
) -> None:
    corpus = opened(written(ShardStore(tmp_path / "store"), largest=300))
    with pytest.raises(CorpusError, match="has the id 300, and the model has only 256"):
        corpus.step_batch(1, "amber", 0, 1)


def test_a_text_without_a_sequence_is_refused(tmp_path: Path, opened: Callable[..., ShardCorpus]) -> None:
    writer = ShardWriter(ShardStore(tmp_path / "store"), 2)
    writer.add(np.zeros(9 * T), is_training=True)
    writer.add(np.zeros(T), is_training=False)
    with pytest.raises(CorpusError, match="held-out part has no sequence of 64 tokens"):
        opened(writer.finish(8))
    with pytest.raises(CorpusError, match="too short"):
        builtin.regions(np.zeros(100), T, 0.1)
