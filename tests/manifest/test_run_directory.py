"""A run's directory through its life: init, sign, edit, sign again."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import NoReturn

import pytest

from p2ptrain.base.errors import ManifestError
from p2ptrain.base.ids import PROTOCOL_VERSION
from p2ptrain.framing import MAX_MANIFEST_BYTES
from p2ptrain.manifest import (
    KEY_FILE,
    MANIFEST_FILE,
    PRESETS,
    SIGNED_FILE,
    create_run,
    load_run,
    parse_toml,
    read_run,
    sign_run,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An unsigned demo run."""
    create_run(tmp_path / "run", "demo")
    return tmp_path / "run"


def edit(run: Path, old: str, new: str) -> None:
    path = run / MANIFEST_FILE
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_signed_as_it_is(tmp_path: Path, name: str) -> None:
    manifest = create_run(tmp_path / "deep" / "run", name)
    signing = sign_run(tmp_path / "deep" / "run")
    assert signing.previous is None
    assert signing.signed.manifest == manifest
    assert load_run(tmp_path / "deep" / "run") == signing.signed


def test_the_key_is_private_from_the_start(run: Path) -> None:
    assert stat.S_IMODE((run / KEY_FILE).stat().st_mode) == 0o600
    assert b"PRIVATE KEY" in (run / KEY_FILE).read_bytes()


def test_two_runs_have_two_keys(tmp_path: Path) -> None:
    one, two = (create_run(tmp_path / name, "demo") for name in "ab")
    assert one.run.public_key != two.run.public_key


def test_changes_replace_numbers_of_the_preset(tmp_path: Path) -> None:
    create_run(tmp_path, "demo", {"run.seed": 3, "run.tokens": 700_000})
    written = parse_toml((tmp_path / MANIFEST_FILE).read_text())
    assert (written.run.seed, written.run.tokens) == (3, 700_000)


@pytest.mark.parametrize("name", [MANIFEST_FILE, KEY_FILE, SIGNED_FILE])
def test_init_never_overwrites_a_run(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("precious")
    with pytest.raises(ManifestError, match="already holds a run"):
        create_run(tmp_path, "demo")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "precious"


def test_init_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ManifestError, match="Cannot write into"):
        create_run(tmp_path / "file" / "run", "demo")


def test_init_where_we_may_not_even_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(path: Path, **how: bool) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", closed)
        with pytest.raises(ManifestError, match=r"Cannot write into .*Permission denied"):
            create_run(tmp_path / "closed" / "run", "demo")
    with pytest.raises(ManifestError, match=r"Cannot write into .*name too long"):
        create_run(tmp_path / ("x" * 300), "demo")


@pytest.mark.parametrize("fits", [0, 1])
def test_init_on_a_full_disk_leaves_nothing_and_the_next_try_is_as_the_first(
    tmp_path: Path, fits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def full(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) > fits:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(ManifestError, match="No space left"):
            create_run(tmp_path, "demo")
    assert list(tmp_path.iterdir()) == []
    written.clear()
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(ManifestError, match="No space left"):
            create_run(tmp_path / "a" / "run", "demo")
    assert list(tmp_path.iterdir()) == []
    create_run(tmp_path, "demo")
    sign_run(tmp_path)


def test_an_unknown_preset_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ManifestError) as caught:
        create_run(tmp_path / "run", "demoo")
    assert "Did you mean demo?" in caught.value.remedy
    assert not (tmp_path / "run").exists()


def test_signing_twice_changes_nothing(run: Path) -> None:
    first = sign_run(run)
    content = (run / SIGNED_FILE).read_bytes()
    second = sign_run(run)
    assert second.previous == first.signed.run_id == second.signed.run_id
    assert (run / SIGNED_FILE).read_bytes() == content


def test_a_comment_is_no_edit(run: Path) -> None:
    signed = sign_run(run).signed
    edit(run, "[outer]", "# my notes\n[outer]")
    assert load_run(run) == signed


def test_an_edit_after_signing_is_refused_and_its_fields_named(run: Path) -> None:
    sign_run(run)
    edit(run, "seed = 1", "seed = 2")
    edit(run, 'schedule = "cosine"', 'schedule = "constant"')
    with pytest.raises(ManifestError) as caught:
        load_run(run)
    assert "run.seed: 1 -> 2" in caught.value.problem
    assert "training.schedule: 'cosine' -> 'constant'" in caught.value.problem
    assert f"p2ptrain sign {run}" in caught.value.remedy


def test_signing_an_edit_makes_another_run(run: Path) -> None:
    before = sign_run(run).signed
    edit(run, "seed = 1", "seed = 2")
    after = sign_run(run)
    assert after.previous == before.run_id != after.signed.run_id
    assert load_run(run) == after.signed
    assert sorted(path.name for path in run.iterdir()) == [SIGNED_FILE, MANIFEST_FILE, KEY_FILE]


def test_an_unsigned_run_says_how_to_sign(run: Path) -> None:
    with pytest.raises(ManifestError) as caught:
        load_run(run)
    assert f"p2ptrain sign {run}" in caught.value.remedy


def test_the_signed_file_alone_is_enough(run: Path) -> None:
    signed = sign_run(run).signed
    (run / MANIFEST_FILE).unlink()
    (run / KEY_FILE).unlink()
    assert load_run(run) == signed


def test_a_damaged_signed_file_is_refused_and_signed_afresh(run: Path) -> None:
    content = (sign_run(run).signed).to_bytes()
    (run / SIGNED_FILE).write_bytes(content[:-5])
    with pytest.raises(ManifestError, match=f"^{re.escape(str(run / SIGNED_FILE))} cannot be used:\n.*damaged"):
        load_run(run)
    assert sign_run(run).previous is None
    assert (run / SIGNED_FILE).read_bytes() == content


def test_another_protocol_version_is_refused(run: Path) -> None:
    sign_run(run)
    edit(run, f"protocol = {PROTOCOL_VERSION}", "protocol = 999")
    for refused in (load_run, sign_run):
        with pytest.raises(ManifestError, match=f"version 999, this p2ptrain uses {PROTOCOL_VERSION}"):
            refused(run)


@pytest.mark.parametrize("text", ["x = ", "[run]", "x" * (MAX_MANIFEST_BYTES + 1)])
def test_a_faulty_manifest_is_named_by_its_path(run: Path, text: str) -> None:
    (run / MANIFEST_FILE).write_text(text)
    with pytest.raises(ManifestError, match=f"^{re.escape(str(run / MANIFEST_FILE))} cannot be used:\n"):
        sign_run(run)


def test_sign_without_manifest_or_key(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"holds no manifest\.toml"):
        sign_run(tmp_path)
    (run / KEY_FILE).unlink()
    with pytest.raises(ManifestError, match=r"holds no run\.key"):
        sign_run(run)


def test_sign_with_a_broken_or_foreign_key(run: Path, tmp_path: Path) -> None:
    create_run(tmp_path / "other", "demo")
    (run / KEY_FILE).write_bytes((tmp_path / "other" / KEY_FILE).read_bytes())
    with pytest.raises(ManifestError, match=r"run\.public_key is"):
        sign_run(run)
    (run / KEY_FILE).write_text("no key")
    with pytest.raises(ManifestError, match="not an unencrypted PEM private key"):
        sign_run(run)


def test_a_manifest_that_is_no_text(run: Path) -> None:
    (run / MANIFEST_FILE).write_bytes(b"\xff\xfe")
    with pytest.raises(ManifestError, match="Cannot read"):
        sign_run(run)


def test_a_failed_write_leaves_the_old_signature(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sign_run(run).signed.to_bytes()
    edit(run, "seed = 1", "seed = 2")

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(ManifestError, match="No space left"):
        sign_run(run)
    assert (run / SIGNED_FILE).read_bytes() == before
    assert len(list(run.iterdir())) == 3


def test_the_mark_that_some_editors_begin_with_is_no_fault(run: Path) -> None:
    path = run / MANIFEST_FILE
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert sign_run(run).signed == load_run(run)


@pytest.mark.parametrize("name", ["run\n2", "\x1b[31mred", "caf\udce9"])
def test_a_name_with_invisible_characters_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ManifestError, match="invisible characters"):
        create_run(tmp_path / name, "demo")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("name", "said"), [("run", "There is no directory"), ("my.toml", "Cannot read")])
def test_a_run_that_is_not_there(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(ManifestError, match=rf"{said} .*{name}") as caught:
        read_run(tmp_path / name)
    assert ("p2ptrain init" in caught.value.remedy) == (name == "run")
