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

from p2ptrain.base import udp_filter
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
    assert {found[each]["state"] for each in ("versions", "device", "port", "memory", "disk", "cache")} == {"ok"}
    assert {found[each]["state"] for each in command.NETWORK_CHECKS} == {"skipped"}
    assert all("LINK" in found[each]["found"] for each in command.NETWORK_CHECKS)
    assert not (tmp_path / "new").exists()


def test_a_machine_without_the_udp_filter_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    for reason, state in ("", "ok"), ("Darwin has no seccomp", "note"):
        monkeypatch.setattr(udp_filter, "unavailable", lambda reason=reason: reason)
        found = findings("--home", str(tmp_path / "new"), "--port", str(free), expected=True)
        assert found["udp"]["state"] == state
        assert reason in found["udp"]["found"]


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

    def examine(link: object, home: object, port: int | None, local: bool, mirror: object) -> network.Examined:
        listened_at.append(port)
        return network.Examined([], None, {}, None)

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


def test_a_home_that_is_closed_to_us_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = Path.stat

    def closed(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if tmp_path in path.parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return status(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", closed)
    found = findings("--home", str(tmp_path / "home"), expected=False)
    assert "home cannot be used: Permission denied" in found["port"]["found"]
    assert found["disk"]["found"] == f"{tmp_path / 'home'} is not writable"
    assert all("choose a" in found[each]["fix"].lower() for each in ("port", "disk"))


def test_libraries_are_heard_again_afterwards(tmp_path: Path, free: int) -> None:
    findings("--home", str(tmp_path / "home"), "--port", str(free), expected=True)
    assert logging.getLogger("hivemind").isEnabledFor(logging.CRITICAL)


def test_a_link_that_is_none_is_a_finding(tmp_path: Path, free: int) -> None:
    found = findings("p2ptrain://abc", "--home", str(tmp_path), "--port", str(free), expected=False)
    assert (found["link"]["state"], found["clock"]["state"]) == ("bad", "skipped")


def test_whatever_a_check_raises_is_its_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int) -> None:
    def broken() -> list[Finding]:
        raise ImportError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(command.machine, "versions", broken)
    found = findings("--home", str(tmp_path), "--port", str(free), expected=False)
    assert "libcudart.so.12" in found["versions"]["found"]
    assert found["versions"]["fix"]


def test_the_homes_settings_count(
    signed_run: Callable[..., SignedManifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """Check that the doctor plans with the device and the memory with which the peer of this home would start."""
    monkeypatch.setattr(network, "examine", lambda *_: network.Examined([], signed_run(), {}, None))
    (tmp_path / "settings.toml").write_text("memory_gb = 0.25\n")
    link = f"p2ptrain://{'a' * 64}@/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    found = findings(link, "--home", str(tmp_path), "--port", str(free), expected=False)
    assert "memory_gb in settings.toml allows 0.25 GB" in found["memory"]["found"]
    (tmp_path / "settings.toml").write_text("memory_gb = lots\n")
    found = findings(link, "--home", str(tmp_path), "--port", str(free), expected=False)
    assert "settings.toml is faulty" in found["settings"]["found"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--team", "2"], "--team and --at belong together"),
        (["--team", "2", "--at", "8.8.8.8"], "8.8.8.8 is not an address of a private network"),
        (["--team", "2", "--at", "10.255.254.253"], "This computer has no address 10.255.254.253"),
    ],
)
def test_a_team_that_no_other_computer_can_join_is_told(tmp_path: Path, words: list[str], says: str) -> None:
    found = findings("--home", str(tmp_path / "home"), *words, expected=False)
    assert says in found["team"]["found"]


def test_where_other_computers_join_a_team_is_told_unless_the_port_is_taken(tmp_path: Path, free: int) -> None:
    words = ["--home", str(tmp_path / "home"), "--team", "2", "--at", f"127.0.0.1:{free}"]
    assert f"join at 127.0.0.1:{free} (lo)" in findings(*words, expected=True)["team"]["found"]
    with socket.create_server(("127.0.0.1", free)):
        found = findings(*words, expected=False)
    assert "cannot listen" in found["team"]["found"]
    assert f"ss -ltnp sport = :{free}" in found["team"]["fix"]
