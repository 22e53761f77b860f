"""The sweep removes our socket folders whose owner is dead, and nothing else."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from p2ptrain.base.errors import DeviceError
from p2ptrain.net.p2pd.socket_folder import SocketFolder, sweep


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parent")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(folder))
    monkeypatch.setattr("p2ptrain.net.p2pd.socket_folder.LONGEST_PARENT", 1000)
    return folder


def test_a_folder_in_use_is_kept_until_it_is_released(parent: Path):
    folder = SocketFolder.create()
    assert folder.path.parent == parent
    assert sweep(parent) == []
    os.close(folder._lock)  # what the kernel does when the owner dies
    folder._lock = None
    assert sweep(parent) == [folder.path]
    assert list(parent.iterdir()) == []


def test_a_new_start_sweeps_what_the_dead_left(parent: Path):
    dead = SocketFolder.create()
    os.close(dead._lock)
    dead._lock = None
    alive = SocketFolder.create()
    assert list(parent.iterdir()) == [alive.path]
    alive.remove()
    alive.remove()
    assert list(parent.iterdir()) == []


def test_other_things_are_left_alone(parent: Path):
    (parent / "p2ptrain.notes").mkdir()
    (parent / "p2ptrain.notes" / "diary.txt").write_text("mine")
    (parent / "p2ptrain.notes" / "lock").touch()
    (parent / "p2ptrain.file").write_text("mine")
    (parent / "other").mkdir()
    (parent / "p2ptrain.link").symlink_to(parent / "other")
    before = sorted(parent.iterdir())
    assert sweep(parent) == []
    assert sorted(parent.iterdir()) == before


def test_a_folder_that_a_cleaner_went_through_is_still_in_use(parent: Path):
    """Check that nothing in the folder says that it is in use: cleaners remove files, and its age may be anything."""
    folder = SocketFolder.create()
    for entry in folder.path.iterdir():
        entry.unlink()
    os.utime(folder.path, (1.0, 1.0))
    assert sweep(parent) == []
    folder.remove()


def test_without_locks_a_folder_is_made_and_none_is_removed(parent: Path, monkeypatch: pytest.MonkeyPatch):
    def none(lock: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")  # as NFS may answer

    monkeypatch.setattr("p2ptrain.net.p2pd.socket_folder.fcntl.flock", none)
    folder = SocketFolder.create()
    assert sweep(parent) == []
    folder.remove()
    assert list(parent.iterdir()) == []


@pytest.mark.parametrize("call", ["tempfile.mkdtemp", "p2ptrain.net.p2pd.socket_folder.socket.socket.bind"])
def test_a_directory_that_takes_no_sockets_is_told_with_a_remedy(
    parent: Path, monkeypatch: pytest.MonkeyPatch, call: str
):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")  # as exFAT answers bind(2)

    monkeypatch.setattr(call, refuse)
    with pytest.raises(DeviceError, match=r"no sockets in .*: Operation not permitted\.\n  Set TMPDIR to"):
        SocketFolder.create()
    assert list(parent.iterdir()) == []


def test_what_was_swept_while_it_was_made_is_made_again(parent: Path, monkeypatch: pytest.MonkeyPatch):
    swept: list[Path] = []
    true = fcntl.flock

    def flock(lock: int, how: int) -> None:
        if how == fcntl.LOCK_EX and not swept:
            swept.extend(sweep(parent))  # another process, just before we get the lock
        true(lock, how)

    monkeypatch.setattr("p2ptrain.net.p2pd.socket_folder.fcntl.flock", flock)
    folder = SocketFolder.create()
    assert len(swept) == 1
    assert list(parent.iterdir()) == [folder.path]
    folder.remove()
