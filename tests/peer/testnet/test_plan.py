"""Folder layout and commands of a testnet."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from small_corpus import corpus_of

from p2ptrain.base.errors import HomeError, ManifestError, UserError
from p2ptrain.data.file_store import FileStore, stored
from p2ptrain.data.published_settings import PublishedSettings
from p2ptrain.manifest import create_run, load_run, preset, render_toml, sign_run, with_changes
from p2ptrain.manifest.document import differences
from p2ptrain.tokens.store import ShardStore
from peer.model import run_settings
from peer.testnet.plan import MARKER, chosen_manifest, claimed, lay_out

DEMO = preset("demo", "ab" * 32)
TWO = ["peer-1", "peer-2"]


def test_a_fresh_testnet_has_a_run_a_twin_and_homes(tmp_path: Path) -> None:
    plan = lay_out(tmp_path, chosen_manifest("demo", None, seed=7), TWO, solo=True)
    assert load_run(plan.run) == plan.signed
    assert plan.signed.manifest.run.seed == 7
    assert [trainer.name for trainer in plan.trainers] == ["peer-1", "peer-2", "solo"]
    assert len({trainer.peer_id for trainer in plan.trainers}) == 3
    assert plan.solo is not None
    twin = plan.solo.home.load_manifest(None)
    assert twin is not None
    assert twin == load_run(tmp_path / "solo-run")
    for all_peers, alone in (
        (DEMO.run.tokens, twin.manifest.run.tokens),
        (DEMO.training.warmup_tokens, twin.manifest.training.warmup_tokens),
    ):
        assert alone == all_peers / 2
    changed = {line.partition(":")[0] for line in differences(plan.signed.manifest, twin.manifest)}
    budget = {"run.tokens", "training.warmup_tokens"}
    assert changed == {"outer.recipe", "outer.exchanges_per_step", "run.public_key", *budget}


def test_homes_and_bootstrap_get_the_files_and_find_the_shards(tmp_path: Path) -> None:
    """Check also the settings of a continued model, without which exports would lack pad token and chat template."""
    source = tmp_path / "source"
    store = FileStore(source / "files")
    corpus = corpus_of(np.arange(300, dtype=np.uint16), np.arange(200, dtype=np.uint16), DEMO.training.sequence_length)
    index, settings = corpus.index, PublishedSettings(pad=3).to_bytes()
    digest = hashlib.sha256(settings).hexdigest()
    store.add(digest, settings)
    named = {"kind": "shards", "root": index.root, "training_tokens": 300, "held_out_tokens": 200}
    manifest = with_changes(
        DEMO, {"corpus": named, "model.init": {"kind": "file", "sha256": ["ab" * 32], "settings": digest}}
    )
    with pytest.raises(ManifestError, match=f"index, files/{index.root}, is not beside"):
        lay_out(tmp_path / "incomplete", manifest, TWO, source=source)
    with pytest.raises(ManifestError, match=f"files/{index.root}, is not beside"):
        lay_out(tmp_path / "nowhere", manifest, TWO)
    store.add(index.root, index.to_bytes())
    ShardStore(source / "shards").add(index.digests[0], corpus.store.shards[index.digests[0]])  # type: ignore[attr-defined]
    plan = lay_out(tmp_path / "out", manifest, TWO, True, source=source)
    assert [run_settings(each.home, plan.signed).pad for each in plan.peers] == [3, 3]
    for place in (plan.run, *(each.home.path for each in plan.trainers)):
        assert stored(place, index.root) is not None
    assert ShardStore(plan.shards).has(index.digests[0])
    with claimed(tmp_path / "out2"):
        plan = lay_out(tmp_path / "out2", manifest, TWO, source=source)
    with claimed(tmp_path / "out2"):
        pass
    assert ShardStore(source / "shards").has(index.digests[0])


def test_the_twin_keeps_the_codec_of_pseudo_gradients(tmp_path: Path) -> None:
    sparse = with_changes(DEMO, {"outer.recipe": "swarm_gradients", "codec.gradients": "topk"})
    plan = lay_out(tmp_path, sparse, TWO, solo=True)
    assert plan.solo is not None
    twin = plan.solo.home.load_manifest(None)
    assert twin is not None
    assert (twin.manifest.outer.recipe, twin.manifest.codec) == ("local", sparse.codec)


def test_without_a_solo_run_or_a_seed(tmp_path: Path) -> None:
    plan = lay_out(tmp_path, DEMO, TWO)
    assert plan.solo is None
    assert plan.trainers == plan.peers
    assert plan.signed.manifest.run.seed == DEMO.run.seed


def test_a_testnet_of_a_private_run_is_open_and_a_scenario_is_not(tmp_path: Path) -> None:
    private = with_changes(DEMO, {"admission.policy": "invite"})
    (tmp_path / "mine.toml").write_text(render_toml(private))
    assert chosen_manifest("demo", tmp_path / "mine.toml").admission.policy == "open"
    assert lay_out(tmp_path, private, TWO).signed.manifest.admission.policy == "invite"


def test_a_manifest_comes_from_a_file_or_a_run(tmp_path: Path) -> None:
    own = with_changes(DEMO, {"run.name": "mine"})
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "mine.toml").write_text(render_toml(own), encoding=encoding)
        assert chosen_manifest("demo", tmp_path / "mine.toml") == own
    created = create_run(tmp_path / "run", "llama-15m")
    assert chosen_manifest("demo", tmp_path / "run") == created
    sign_run(tmp_path / "run")
    (tmp_path / "run" / "manifest.toml").unlink()
    assert chosen_manifest("demo", tmp_path / "run") == created


@pytest.mark.parametrize("source", ["missing.toml", "empty", "x" * 300])
def test_a_manifest_that_cannot_be_read_is_named(source: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ManifestError, match=source):
        chosen_manifest("demo", tmp_path / source)


def test_a_manifest_where_we_may_not_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(path: Path, **how: bool) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "stat", closed)
    with pytest.raises(ManifestError, match=r"Cannot read .*run: .*Permission denied"):
        chosen_manifest("demo", tmp_path / "run")


def test_a_recipe_without_exchanges_is_no_swarm(tmp_path: Path) -> None:
    alone = with_changes(DEMO, {"outer.recipe": "local", "outer.exchanges_per_step": 0})
    (tmp_path / "alone.toml").write_text(render_toml(alone))
    with pytest.raises(ManifestError, match="makes no exchanges"):
        chosen_manifest("demo", tmp_path / "alone.toml")


def test_an_earlier_testnet_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with claimed(out):
        (out / "peer-1").mkdir()
        (out / "peer-1" / "old").write_text("")
        (out / "summary.json").write_text("")
    with claimed(out):
        assert sorted(entry.name for entry in out.iterdir()) == [MARKER, "lock"]
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="mine exists and is not empty"), claimed(mine):
        pass
    assert (mine / "thesis.txt").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError), claimed(tmp_path / "file"):
        pass


def test_one_testnet_at_a_time(tmp_path: Path) -> None:
    with (
        claimed(tmp_path / "out"),
        pytest.raises(HomeError, match="Another process uses"),
        claimed(tmp_path / "out"),
    ):
        pass


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HomeError, match="cannot be used"), claimed(tmp_path / "file" / "out"):
        pass
