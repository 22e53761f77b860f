"""Mirrors of a run's text: a folder that a web server can serve, and a data set of the hub."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from p2ptrain.base.errors import CorpusError, UserError
from p2ptrain.data.file_store import FileStore
from p2ptrain.manifest import create_run
from p2ptrain.net.shard_mirror import Mirror
from p2ptrain.tokens.index import ShardIndex
from p2ptrain.tokens.store import ShardStore
from p2ptrain.tokens.writing import ShardWriter
from peer.trained import publish_tokens, publishing


@pytest.fixture
def index(tmp_path: Path) -> ShardIndex:
    """The index of the run in the folder ``run``."""
    store = ShardStore(tmp_path / "run" / "shards")
    writer = ShardWriter(store, 2)
    writer.add(np.arange(9000) % 251, is_training=True)
    writer.add(np.arange(2000) % 251, is_training=False)
    found = writer.finish(256)
    tokens = {"training_tokens": found.training_tokens, "held_out_tokens": found.held_out_tokens}
    store.directory.rename(tmp_path / "shards")
    store.directory.parent.rmdir()
    create_run(tmp_path / "run", "demo", {"corpus": {"kind": "shards", "root": found.root, **tokens}})
    (tmp_path / "shards").rename(store.directory)
    FileStore(tmp_path / "run" / "files").add(found.root, found.to_bytes())
    return found


def publish(*words: str | Path) -> Any:
    return CliRunner().invoke(publish_tokens.publish_tokens, [str(each) for each in words])


def test_a_folder_is_a_mirror(index: ShardIndex, tmp_path: Path) -> None:
    done = publish(tmp_path / "run", tmp_path / "mirror")
    assert done.exit_code == 0, done.output
    assert "corpus.mirror" in done.output
    mirror = Mirror(str(tmp_path / "mirror"), is_own=False)
    assert asyncio.run(mirror.fetch(index.root)) == index.to_bytes()
    store = ShardStore(tmp_path / "run" / "shards")
    for digest in index.digests:
        assert asyncio.run(mirror.fetch(digest)) == store.path(digest).read_bytes()
    damaged = tmp_path / "mirror" / index.root[:2] / index.root
    damaged.write_bytes(b"half")
    assert publish(tmp_path / "run", tmp_path / "mirror").exit_code == 0
    assert damaged.read_bytes() == index.to_bytes()


def test_what_was_edited_is_not_published(index: ShardIndex, tmp_path: Path) -> None:
    ShardStore(tmp_path / "run" / "shards").path(index.digests[0]).write_bytes(b"edited")
    done = publish(tmp_path / "run", tmp_path / "mirror")
    assert isinstance(done.exception, CorpusError)
    assert not (tmp_path / "mirror").exists()


def test_a_text_that_ships_with_the_package_needs_no_mirror(tmp_path: Path) -> None:
    create_run(tmp_path / "run", "demo")
    assert isinstance(publish(tmp_path / "run", tmp_path / "mirror").exception, CorpusError)


def test_a_data_set_gets_the_shards_and_their_index(
    index: ShardIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[Any] = []
    there: set[str] = set()

    class Api:
        def create_repo(self, name: str, **named: Any) -> None:
            created.append((name, named))

        def create_commit(self, name: str, added: list[tuple[str, Path]], **_: Any) -> None:
            for path, file in added:
                assert hashlib.sha256(file.read_bytes()).hexdigest() == path[3:]
                there.add(path)

    leftover = ShardStore(tmp_path / "run" / "shards").path("f" * 64)
    leftover.parent.mkdir(exist_ok=True)
    leftover.write_bytes(b"of another text")
    hub = SimpleNamespace(HfApi=Api, CommitOperationAdd=lambda path, file: (path, file))
    monkeypatch.setattr("p2ptrain.data.hub.huggingface_hub", lambda: hub)
    monkeypatch.setattr(publishing, "check_login", lambda: None)
    done = publish(tmp_path / "run", "hf:someone/text", "--public")
    assert done.exit_code == 0, done.output
    assert created == [("someone/text", {"repo_type": "dataset", "private": False, "exist_ok": True})]
    assert there == {f"{digest[:2]}/{digest}" for digest in (index.root, *index.digests)}
    assert isinstance(publish(tmp_path / "run", "hf:text").exception, UserError)
