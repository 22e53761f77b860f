"""Files that are complete or absent."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import NoReturn

import pytest

from p2ptrain.base import files


def test_a_file_is_replaced_with_its_permissions_and_nothing_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "key"
    files.replace(path, b"old")
    files.replace(path, b"new", mode=0o600)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary"
    files.replace(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_never_overwrites(tmp_path: Path) -> None:
    files.write_new(tmp_path / "key", b"mine", mode=0o600)
    with pytest.raises(FileExistsError):
        files.write_new(tmp_path / "key", b"other")
    assert (tmp_path / "key").read_bytes() == b"mine"


def test_a_full_disk_leaves_no_part_of_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            files.write_new(tmp_path / "key", b"mine")
    assert list(tmp_path.iterdir()) == []
    files.write_new(tmp_path / "key", b"mine")


def test_a_path_that_cannot_be_looked_at_does_not_count_as_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    there = [name for name in ("file", ".", "none", "file/below", "loop") if files.exists(tmp_path / name)]
    assert (there, files.is_dir(tmp_path), files.is_dir(tmp_path / "file")) == (["file", "."], True, False)

    def closed(path: Path) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", closed)
        for question in (files.exists, files.is_dir):
            with pytest.raises(PermissionError):
                question(tmp_path)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("no number"), "no number"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "it is not UTF-8 text"),
        (ValueError("too long"), "too long"),
    ],
)
def test_causes_are_told_without_pythons_words(error: OSError | ValueError, said: str) -> None:
    assert files.cause(error) == said


@pytest.mark.parametrize(("number", "said"), [(errno.EINVAL, None), (errno.ENOTSUP, None), (errno.EIO, "I/O")])
def test_a_directory_is_flushed_where_its_disk_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str | None
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(number, "I/O")

    (tmp_path / "file").touch()
    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(OSError, match=said) if said else contextlib.nullcontext():
        files.sync(tmp_path)
    with pytest.raises(OSError, match="I/O"):  # a file's content may be lost
        files.sync(tmp_path / "file")


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "Free some space on that disk, or go away."),
        (errno.EDQUOT, "Free some space on that disk, or go away."),
        (errno.EROFS, "Make that disk writable, or go away."),
        (errno.EACCES, "Check its owner and permissions, and those of its directory, or go away."),
        (errno.ENOENT, "Check the path and its disk, or go away."),
    ],
)
def test_each_cause_has_a_remedy_that_fits(number: int, said: str) -> None:
    assert files.remedy(OSError(number, ""), "go away") == said
    assert "go away" not in files.remedy(OSError(number, ""), "").lower()
