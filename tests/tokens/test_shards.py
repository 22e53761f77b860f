"""Index, store and corpus of shards."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.base.errors import CorpusError, HomeError
from p2ptrain.tokens import index as indices
from p2ptrain.tokens import writing
from p2ptrain.tokens.corpus import ShardAwayError, ShardCorpus
from p2ptrain.tokens.index import ShardIndex, sequences_in
from p2ptrain.tokens.store import ShardStore
from p2ptrain.tokens.writing import ShardWriter

T = 8


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (indices, writing):
        monkeypatch.setattr(module, "SHARD_BYTES", 128)


def written(store: ShardStore, training: np.ndarray, held_out: np.ndarray, row_tokens: int = 0) -> ShardIndex:
    writer = ShardWriter(store, 2, row_tokens)
    for part in np.array_split(training, 7):
        writer.add(part, is_training=True)
    writer.add(held_out, is_training=False)
    return writer.finish(T)


def text(tokens: int) -> np.ndarray:
    return np.arange(tokens, dtype=np.uint16)


def test_training_reads_every_sequence_once_an_epoch_and_no_held_out_one(tmp_path: Path) -> None:
    store = ShardStore(tmp_path)
    index = written(store, text(300), 1000 + text(100))
    corpus = ShardCorpus(index, store, T)
    assert [each.tokens for each in index.training] == [64, 64, 64, 64, 44]
    assert [each.tokens for each in index.held_out] == [64, 36]
    batch = corpus.step_batch(1, "amber", 0, corpus.train_sequences)
    assert batch.shape == (corpus.train_sequences, T + 1)
    starts = sorted(batch[:, 0].tolist())
    assert starts == [64 * shard + T * each for shard in range(5) for each in range(7 if shard < 4 else 5)]
    assert (batch - batch[:, :1] == np.arange(T + 1)).all()
    read = [row.tolist() for part in corpus.validation_batches(10_000, 3) for row in part]
    assert [row[0] for row in read] == [
        1000 + 64 * shard + T * each for shard in (0, 1) for each in range(7 - 3 * shard)
    ]


def test_packed_rows_are_never_cut(tmp_path: Path) -> None:
    store = ShardStore(tmp_path)
    index = written(store, text(30 * 24), text(48), row_tokens=24)
    assert index.shard_tokens == 48
    corpus = ShardCorpus(index, store, 24)
    assert corpus.train_sequences == 30
    assert corpus.step_batch(1, "amber", 0, 30).shape == (30, 3, 24)


def test_the_same_ids_give_the_same_root_and_are_stored_once(tmp_path: Path) -> None:
    one = written(ShardStore(tmp_path / "one"), text(300), text(64))
    again = written(ShardStore(tmp_path / "one"), text(300), text(64))
    other = written(ShardStore(tmp_path / "two"), text(301), text(64))
    assert one == again
    assert one.root == hashlib.sha256(one.to_bytes()).hexdigest() != other.root
    assert len([*(tmp_path / "one").rglob("*")]) - len([*(tmp_path / "one").iterdir()]) == len(set(one.digests))


def test_an_index_is_read_as_it_was_written(tmp_path: Path) -> None:
    index = written(ShardStore(tmp_path), text(300), text(64))
    assert ShardIndex.from_bytes(index.to_bytes()) == index


@given(st.binary(max_size=200))
def test_no_bytes_of_strangers_make_an_index_that_is_not_consistent(data: bytes) -> None:
    for each in (data, indices.MAGIC + data):
        try:
            index = ShardIndex.from_bytes(each)
        except ValueError:
            continue
        assert index.to_bytes() == each


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    store = ShardStore(tmp_path)
    index = written(store, text(300), text(64))
    for digest in set(index.digests):
        store.path(digest).unlink()
    with pytest.raises(ShardAwayError) as away:
        ShardCorpus(index, store, T).step_batch(1, "amber", 0, 1)
    assert str(away.value) in index.digests


def test_a_store_refuses_what_has_another_digest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sha256"):
        ShardStore(tmp_path).add("0" * 64, b"false")
    assert not [*tmp_path.iterdir()]


def test_a_disk_that_does_not_take_it_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    digest = hashlib.sha256(b"ids").hexdigest()
    with pytest.raises(HomeError, match="cannot be stored"):
        ShardStore(tmp_path / "file").add(digest, b"ids")


def test_the_longest_unused_shards_are_dropped_first_and_those_in_use_never(tmp_path: Path) -> None:
    store = ShardStore(tmp_path)
    index = written(store, text(320), text(64))
    for age, each in enumerate(index.training):
        os.utime(store.path(each.digest), (1000 - age, 1000 - age))  # the later, the longer unused
    oldest = index.training[-1].digest
    assert store.drop(128 * 3, kept={oldest}) <= 128 * 3
    assert store.has(oldest)
    assert not store.has(index.training[-2].digest)


def test_a_shard_that_was_cut_is_missing(tmp_path: Path) -> None:
    store = ShardStore(tmp_path)
    index = written(store, text(64), text(64))
    with store.path(index.digests[0]).open("r+b") as file:
        file.truncate(20)
    assert store.map(index.digests[0], 2, 64) is None


def test_a_shard_that_was_overwritten_is_missing_and_removed(tmp_path: Path) -> None:
    store = ShardStore(tmp_path)
    index = written(store, text(64), text(64))
    store.path(index.digests[0]).write_bytes(bytes(128))
    assert store.map(index.digests[0], 2, 64) is None
    assert not store.has(index.digests[0])


@pytest.mark.parametrize(
    ("training", "held_out", "why"), [(5, 64, "too short"), (64, 8, "8 tokens of the text are held out")]
)
def test_a_short_text_is_refused(tmp_path: Path, training: int, held_out: int, why: str) -> None:
    with pytest.raises(CorpusError, match=why):
        written(ShardStore(tmp_path), text(training), text(held_out))


def test_sequences() -> None:
    assert [sequences_in(each, 8, False) for each in (0, 1, 8, 9, 17)] == [0, 0, 0, 1, 2]
    assert [sequences_in(each, 8, True) for each in (0, 7, 8, 16)] == [0, 0, 1, 2]
