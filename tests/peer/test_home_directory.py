"""Small files of a peer's home."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from p2ptrain.base.errors import HomeError
from p2ptrain.base.files import cache_directory
from p2ptrain.base.ids import RunId
from p2ptrain.manifest import SignedManifest
from peer.home import Addresses, Home, default_home

OWN = "/ip4/10.0.0.7/tcp/4001/p2p/me"
BOOTSTRAP = "/ip4/203.0.113.7/tcp/31337/p2p/bootstrap"


def test_the_lock_is_exclusive_and_released(tmp_path: Path) -> None:
    home = Home(tmp_path / "new" / "home")
    with home.locked(), pytest.raises(HomeError, match="Another process uses"), home.locked():
        pass
    with home.locked():
        assert home.path.is_dir()


def test_manifest_round_trip(tmp_path: Path, signed_run: Callable[..., SignedManifest]) -> None:
    home, signed = Home(tmp_path), signed_run()
    assert home.load_manifest(None) is None
    home.save_manifest(signed)
    assert home.load_manifest(signed.run_id) == signed
    with pytest.raises(HomeError, match="belongs to run"):
        home.load_manifest(RunId("0" * 64))


def test_addresses_round_trip(tmp_path: Path) -> None:
    home, addresses = Home(tmp_path), Addresses((OWN,), (BOOTSTRAP,), 4001)
    home.save_addresses(addresses)
    assert home.load_addresses() == addresses


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"own": 3, "joined_by": []}', "\x00", "null"])
def test_damaged_addresses_are_no_addresses(text: str, tmp_path: Path) -> None:
    (tmp_path / "addresses.json").write_text(text)
    assert Home(tmp_path).load_addresses() == Addresses((), ())


def test_a_link_names_this_peer_first_and_nobody_twice() -> None:
    assert Addresses((OWN, BOOTSTRAP), (BOOTSTRAP,)).link_addresses() == (OWN, BOOTSTRAP)
    assert Addresses((), (BOOTSTRAP,)).port == 0
    assert len(Addresses(tuple(map(str, range(40))), ()).link_addresses(most=16)) == 16


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path)
    home.save_summary({"tokens": 1})
    before = home.summary.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(HomeError, match="No space left"):
        home.save_summary({"tokens": 2})
    assert home.summary.read_bytes() == before
    assert list(tmp_path.iterdir()) == [home.summary]


def test_default_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/you")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_home(RunId("ab" * 32)) == Path("/home/you/.p2ptrain/abababababab")
    assert cache_directory() == Path("/home/you/.cache/p2ptrain")
    monkeypatch.setenv("XDG_CACHE_HOME", "/fast")
    assert cache_directory() == Path("/fast/p2ptrain")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/fast")
    assert cache_directory() == Path("/home/you/fast/p2ptrain")


@pytest.mark.parametrize("place", [cache_directory, lambda: default_home(RunId("ab" * 32))])
def test_a_user_without_a_home_directory_is_told_to_set_one(
    monkeypatch: pytest.MonkeyPatch, place: Callable[[], Path]
) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(HomeError, match=r"User \d+ has no home directory: HOME is not set.*\n  Set HOME to"):
        place()


def test_a_read_only_home_has_no_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(lock: object, **_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    (tmp_path / "lock").touch()
    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    assert not Home(tmp_path).is_inhabited()
    with (
        pytest.raises(HomeError, match=r"Read-only file system\.\n  Make that disk writable.* --home"),
        Home(tmp_path).locked(),
    ):
        pass


def test_a_disk_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")  # NFS without its lock service

    monkeypatch.setattr("fcntl.flock", refuse)
    with (
        pytest.raises(HomeError, match=r"No locks available\.\n  Choose another .* --home, on a local disk"),
        Home(tmp_path).locked(),
    ):
        pass
