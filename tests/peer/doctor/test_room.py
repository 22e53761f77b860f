"""Disk space for a run's home and for its tokens, each on its own disk or both on one."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2ptrain.base.errors import HomeError
from p2ptrain.manifest import Manifest, parameter_count, preset, with_changes
from p2ptrain.tokens.store import ShardStore
from peer.doctor import machine
from peer.doctor.findings import FindingState
from peer.space import CHECKPOINT_BYTES, SPARE_BYTES, check_space, home_bytes, text_bytes, token_bytes

TOKENS = 100_000_000
CAP = 1e12


def run(vocabulary: int = 256, template: str = "") -> Manifest:
    corpus: dict[str, Any] = {"kind": "shards", "root": "ab" * 32, "training_tokens": TOKENS - 1000}
    corpus |= {"held_out_tokens": 1000, "template": template}
    changes = {"model.config.vocab_size": vocabulary, "tokenizer": {"kind": "bytes"}, "corpus": corpus}
    return with_changes(preset("demo", "ab" * 32), changes)


@pytest.fixture
def disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return the free bytes of two disks, the home's and the cache's."""
    free = {"home": 10**12, "cache": 10**12}
    status = Path.stat

    def of_its_own(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        found = status(path, follow_symlinks=follow_symlinks)
        return os.stat_result((*found[:2], 77, *found[3:])) if path == tmp_path / "cache" else found

    for name in free:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(Path, "stat", of_its_own)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[Path(path).name]))
    return free


def test_a_peer_does_not_start_without_space_for_a_checkpoint_and_warns_if_there_is_little(
    disks: dict[str, int], tmp_path: Path
) -> None:
    manifest, home, cache = run(), tmp_path / "home", tmp_path / "cache"
    each = CHECKPOINT_BYTES * parameter_count(manifest.model)
    assert check_space(home, manifest, ShardStore(cache), CAP) == []
    disks["home"] = each - 1
    with pytest.raises(HomeError, match=r"takes 7\.1 MB, but only 7\.1 MB are free at .*/home, so"):
        check_space(home, manifest, ShardStore(cache), CAP)
    disks["home"] = SPARE_BYTES + 3 * each
    (warning,) = check_space(home, manifest, ShardStore(cache), CAP)
    assert warning.startswith(f"1.0 GB are free at {home}, but the home may take 1.0 GB. ")
    assert machine.disk(home, ShardStore(cache), manifest).state is FindingState.BAD
    for step in (1, 2):
        (home / f"checkpoints/step-0000000{step}").mkdir(parents=True)
    assert check_space(home, manifest, ShardStore(cache), CAP) == []
    assert machine.disk(home, ShardStore(cache), manifest).state is FindingState.OK
    disks["cache"] = 2 * TOKENS - 1
    (warning,) = check_space(home, manifest, ShardStore(cache), CAP)
    assert warning.startswith(f"200.0 MB are free at {cache}, but the run's text may take 200.0 MB. ")


def test_checkpoints_and_tokens_may_share_a_disk(disks: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "home/cache").mkdir()
    needed = home_bytes(tmp_path / "home", run()) + 2 * TOKENS
    for free, warnings in ((needed - 1, 1), (needed, 0)):
        disks["home"] = disks["cache"] = free
        assert len(check_space(tmp_path / "home", run(), ShardStore(tmp_path / "home/cache"), CAP)) == warnings


@pytest.mark.parametrize(
    ("vocabulary", "template", "width"),
    [(256, "", 2), (65_536, "", 2), (65_537, "", 4), (16_384, "chatml", 2), (16_385, "chatml", 4)],
)
def test_text_needs_its_width_on_the_disk_of_the_cache(
    disks: dict[str, int], tmp_path: Path, vocabulary: int, template: str, width: int
) -> None:
    manifest, home, store = run(vocabulary, template), tmp_path / "home", ShardStore(tmp_path / "cache")
    for free, state in ((width * TOKENS, FindingState.OK), (width * TOKENS - 1, FindingState.BAD)):
        disks["cache"] = free
        found = machine.disk(home, store, manifest)
        assert found.state == state
    assert f"the run's text may take {width * 100:.1f} MB" in found.found
    assert "XDG_CACHE_HOME" in found.fix


def test_text_takes_no_more_than_its_cap(disks: dict[str, int], tmp_path: Path) -> None:
    store = ShardStore(tmp_path / "cache")
    data = bytes(1000)
    store.add(hashlib.sha256(data).hexdigest(), data)
    assert token_bytes(store, run(), CAP) == 2 * TOKENS
    assert token_bytes(store, run(), 5000) == 4000
    assert token_bytes(store, run(), 500) == 0
    assert text_bytes(None) > text_bytes(0.5) == 5e8


def test_the_shipped_text_needs_none(disks: dict[str, int], tmp_path: Path) -> None:
    disks["cache"] = 10**7
    found = machine.disk(tmp_path / "home", ShardStore(tmp_path / "cache"), preset("demo", "ab" * 32))
    assert found.state is FindingState.OK


def test_home_and_tokens_on_one_disk_must_both_fit(disks: dict[str, int], tmp_path: Path) -> None:
    home, manifest = tmp_path / "home", run()
    beside = ShardStore(home / "cache-to-be")
    disks["home"] = home_bytes(home, manifest) + 2 * TOKENS
    assert machine.disk(home, beside, manifest).state is FindingState.OK
    disks["home"] -= 1
    found = machine.disk(home, beside, manifest)
    assert found.state is FindingState.BAD
    assert "the home and the run's text may take 1.2 GB" in found.found


def test_directories_that_are_closed_to_us(
    disks: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for closed, fix in ("home", "--home"), ("cache", "XDG_CACHE_HOME"):
        monkeypatch.setattr(os, "access", lambda path, mode, closed=closed: path.name != closed)
        for manifest in (None, run()):
            found = machine.disk(tmp_path / "home", ShardStore(tmp_path / "cache"), manifest)
            assert (found.state, fix in found.fix) == (FindingState.BAD, True)
