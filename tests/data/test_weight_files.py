"""Files of initial weights on this machine: found by digest, stored if they are small, refused if they are pickles."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from p2ptrain.base.errors import CorpusError, WeightsError
from p2ptrain.data import file_store, weight_files
from p2ptrain.data.file_store import FileStore, named_files, named_weights
from p2ptrain.data.weight_files import adopt, check_option, find_named, local_weights, published_files
from p2ptrain.manifest import Manifest, preset, with_changes

SHARDS = [b"the first shard", b"the second shard"]
DIGESTS = [hashlib.sha256(each).hexdigest() for each in SHARDS]
HUB = {"kind": "hub", "name": "someone/model", "revision": "a" * 40}


@pytest.fixture
def manifest() -> Manifest:
    return with_changes(preset("demo", "ab" * 32), {"model.init": {"kind": "file", "sha256": DIGESTS}})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the shards in another order, and other files."""
    place = tmp_path / "model"
    place.mkdir()
    for name, content in (("b.safetensors", SHARDS[0]), ("a.safetensors", SHARDS[1]), ("c.safetensors", b"other")):
        (place / name).write_bytes(content)
    (place / "pipe.safetensors.d").mkdir()
    return place


def test_named_files_have_numbers(manifest: Manifest) -> None:
    assert [(each.what, each.option) for each in named_files(manifest)] == [
        ("weights 1 of 2", "--weights"),
        ("weights 2 of 2", "--weights"),
    ]
    single = with_changes(manifest, {"model.init": {"kind": "file", "sha256": DIGESTS[:1]}})
    assert [each.what for each in named_weights(single)] == ["weights"]
    assert named_weights(with_changes(manifest, {"model.init": HUB})) == []
    assert named_weights(with_changes(manifest, {"model.init": None})) == []


def test_a_folders_files_are_found_by_digest(manifest: Manifest, folder: Path, tmp_path: Path) -> None:
    store = FileStore(tmp_path / "files")
    assert local_weights(manifest, store, folder) == [folder / "b.safetensors", folder / "a.safetensors"]
    named = named_weights(manifest)
    assert adopt(named, find_named(named, store, folder), store)
    stored = [tmp_path / "files" / each for each in DIGESTS]
    assert local_weights(manifest, store, None) == stored
    assert local_weights(manifest, FileStore(tmp_path / "none"), tmp_path / "files") == stored


def test_large_weights_are_not_stored(manifest: Manifest, folder: Path, tmp_path: Path, monkeypatch: object) -> None:
    """Check that the limit is of all files together: each shard alone would be small enough."""
    monkeypatch.setattr(weight_files, "MOST_STORED_BYTES", len(SHARDS[0]) + len(SHARDS[1]) - 1)  # type: ignore[attr-defined]
    named, store = named_weights(manifest), FileStore(tmp_path / "files")
    assert not adopt(named, find_named(named, store, folder), store)
    assert not (tmp_path / "files").exists()
    assert file_store.MOST_STORED_BYTES > 10**6


def test_missing_files_are_named(manifest: Manifest, folder: Path, tmp_path: Path) -> None:
    (folder / "a.safetensors").write_bytes(b"changed")
    with pytest.raises(WeightsError, match=rf"lacks weights 2 of 2 \(sha256 {DIGESTS[1][:12]}…\)\.") as caught:
        local_weights(manifest, FileStore(tmp_path / "files"), folder)
    assert "--weights PATH" in caught.value.remedy
    with pytest.raises(WeightsError, match="lacks weights 1 of 2"):
        local_weights(manifest, FileStore(tmp_path / "files"), folder / "c.safetensors")
    with pytest.raises(CorpusError, match="cannot be read"):
        local_weights(manifest, FileStore(tmp_path / "files"), tmp_path / "nothing")


@pytest.mark.parametrize(("init", "said"), [(None, "are random ones"), (HUB, "those of someone/model of the hub")])
def test_an_option_without_use_is_refused(manifest: Manifest, init: object, said: str) -> None:
    with pytest.raises(WeightsError, match=said):
        check_option(with_changes(manifest, {"model.init": init}), Path("model"))
    check_option(manifest, Path("model"))
    check_option(with_changes(manifest, {"model.init": init}), None)


def test_published_files_are_one_or_the_shards_of_the_index(folder: Path) -> None:
    index = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [path.name for path in published_files(folder)] == ["a.safetensors", "b.safetensors"]
    (folder / "model.safetensors").write_bytes(b"")
    assert published_files(folder) == [folder / "model.safetensors"]
    assert published_files(folder / "c.safetensors") == [folder / "c.safetensors"]


@pytest.mark.parametrize("index", ["", "{}", '{"weight_map": {"x": "../secret.safetensors"}}', "[" * 100_000])
def test_a_broken_index_is_said(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsError, match=r"index\.json cannot be used"):
        published_files(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(WeightsError, match=r"has neither model\.safetensors nor .*, and pickles .* never loaded"):
        published_files(tmp_path)
