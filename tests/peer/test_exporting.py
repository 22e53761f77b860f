"""``p2ptrain export``: the whole model or nothing, for every destination."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from p2ptrain import checkpoint
from p2ptrain.base.errors import UserError
from p2ptrain.manifest import SignedManifest
from p2ptrain.train.model import flat_model
from peer.home import Home
from peer.model import export

WHOLE = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def home(tmp_path: Path, signed_run: Callable[..., SignedManifest]) -> Home:
    """Return the home of a peer that has trained."""
    signed = signed_run()
    theta = flat_model(signed.manifest.model, 1, torch.device("cpu")).theta
    found = Home(tmp_path / "home")
    found.path.mkdir()
    found.save_manifest(signed)
    checkpoint.save(found.checkpoints, {"slow": theta}, {"step": 1})
    return found


@contextlib.contextmanager
def files_end_at(size_bytes: int) -> Iterator[None]:
    """Limit the length of files, which fails in every library at the same place as a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("is_there", [True, False])
def test_an_export_is_whole(
    home: Home, tmp_path: Path, is_there: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "out"
    if is_there:
        out.mkdir(parents=True)
        monkeypatch.chdir(out)
    export(home, Path() if is_there else out)
    assert names_in(out) == WHOLE
    assert names_in(out.parent) == {"out"}
    assert capfd.readouterr().err == ""  # no progress bar in a log
    with pytest.raises(UserError, match="exists and is not empty"):
        export(home, out)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_full_disk_leaves_nothing_and_the_next_try_is_as_the_first(
    home: Home, tmp_path: Path, is_there: bool
) -> None:
    out = tmp_path / "new" / "out"
    if is_there:
        out.mkdir(parents=True)
    with files_end_at(50_000), pytest.raises(UserError, match="out cannot be written: ") as caught:
        export(home, out)
    assert "free some space" in caught.value.remedy
    assert [path for path in (tmp_path / "new").rglob("*") if path != out] == []
    assert out.exists() is is_there
    export(home, out)
    assert names_in(out) == WHOLE


def test_a_full_disk_is_called_so(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tokenizer: object, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("p2ptrain.data.tokenizer.ByteTokenizer.save", full)
    with pytest.raises(UserError, match="out cannot be written: the disk is full"):
        export(home, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_to_where_we_may_not_even_look(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, status = tmp_path / "closed" / "out", Path.stat

    def closed(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path == out:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return status(path, follow_symlinks=follow_symlinks)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", closed)
        with pytest.raises(UserError, match="out cannot be written: Permission denied"):
            export(home, out)
    with pytest.raises(UserError, match="x cannot be written: File name too long"):
        export(home, tmp_path / ("x" * 300))
