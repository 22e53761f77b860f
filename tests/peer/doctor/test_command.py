"""The doctor's command line, on this machine alone."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from p2ptrain.base.errors import UserError
from p2ptrain.manifest import SignedManifest
from peer.doctor import command, network
from peer.doctor.command import doctor
from peer.doctor.findings import Finding
from peer.home import Addresses, Home


@pytest.fixture
def free() -> int:
    """Return a port below the kernel's ephemeral ones, so that it stays free."""
    for port in random.sample(range(20_000, 30_000), 50):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


def findings(*arguments: str, expected: bool) -> dict[str, dict[str, str]]:
    done = CliRunner().invoke(doctor, [*arguments, "--local", "--device", "cpu", "--json"], standalone_mode=False)
    assert done.exception is None
    document = json.loads(done.output)
    assert document["ok"] is expected
    assert done.return_value == int(not expected)
    return {each["check"]: each for each in document["findings"]}


def test_without_a_link_it_looks_at_this_machine_and_says_what_it_left_out(tmp_path: Path, free: int) -> None:
    found = findings("--home", str(tmp_path / "new"), "--port", str(free), expected=True)
    assert {found[each]["state"] for each in ("device", "port", "memory", "disk")} == {"ok"}
    assert {found[each]["state"] for each in command.NETWORK_CHECKS} == {"skipped"}
    assert all("LINK" in found[each]["found"] for each in command.NETWORK_CHECKS)
    assert not (tmp_path / "new").exists()


def test_a_port_in_use_is_named_and_mended(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = findings("--home", str(tmp_path), "--port", str(port), expected=False)
    assert (found["port"]["state"], str(port) in found["port"]["found"]) == ("bad", True)
    assert str(port) in found["port"]["fix"]


@pytest.mark.parametrize("whose", ["the default", "of last time"])
def test_a_port_that_nobody_named_may_be_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str) -> None:
    """Check a default port in use: a peer would take another one, and so does the doctor for its dial-back test."""
    listened_at: list[int | None] = []

    def examine(link: object, port: int | None, local: bool) -> network.Examined:
        listened_at.append(port)
        return network.Examined([], None)

    monkeypatch.setattr(network, "examine", examine)
    link = f"p2ptrain://{'a' * 64}@/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if whose == "the default":
            monkeypatch.setattr(command, "DEFAULT_PORT", port)
        else:
            Home(tmp_path).save_addresses(Addresses((), (), port))
        found = findings(link, "--home", str(tmp_path), expected=True)
        assert (found["port"]["state"], str(port) in found["port"]["found"]) == ("note", True)
        findings(link, "--home", str(tmp_path), "--port", str(port), expected=False)
    findings(link, "--home", str(tmp_path), "--port", str(port), expected=True)
    with Home(tmp_path).locked():
        findings(link, "--home", str(tmp_path), expected=True)
    assert listened_at == [0, None, port, None]


def test_a_peer_that_lives_here_may_have_its_port(tmp_path: Path) -> None:
    with Home(tmp_path).locked():
        assert findings("--home", str(tmp_path), expected=True)["port"]["state"] == "note"
    assert not Home(tmp_path).is_inhabited()


def test_a_home_that_is_closed_to_us(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = Path.stat

    def closed(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if tmp_path in path.parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return status(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", closed)
    with pytest.raises(UserError, match=r"cannot be used: Permission denied"):
        doctor(["--home", str(tmp_path / "home"), "--local"], standalone_mode=False)


def test_libraries_are_heard_again_afterwards(tmp_path: Path, free: int) -> None:
    findings("--home", str(tmp_path / "home"), "--port", str(free), expected=True)
    assert logging.getLogger("hivemind").isEnabledFor(logging.CRITICAL)


def test_whatever_a_check_raises_is_its_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int) -> None:
    def broken(name: str) -> Finding:
        raise ImportError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(command.machine, "device", broken)
    found = findings("--home", str(tmp_path), "--port", str(free), expected=False)
    assert "libcudart.so.12" in found["device"]["found"]
    assert found["device"]["fix"]


def test_the_homes_settings_count(
    signed_run: Callable[..., SignedManifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """Check that the doctor plans with the device and the memory with which the peer of this home would start."""
    monkeypatch.setattr(network, "examine", lambda *_: network.Examined([], signed_run()))
    (tmp_path / "settings.toml").write_text("memory_gb = 0.25\n")
    link = f"p2ptrain://{'a' * 64}@/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    found = findings(link, "--home", str(tmp_path), "--port", str(free), expected=False)
    assert "memory_gb in settings.toml allows 0.25 GB" in found["memory"]["found"]
    (tmp_path / "settings.toml").write_text("memory_gb = lots\n")
    with pytest.raises(UserError, match=r"settings\.toml is faulty"):
        doctor([link, "--home", str(tmp_path), "--local"], standalone_mode=False)
