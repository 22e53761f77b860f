"""A peer as a service: the unit as systemd reads it, and the commands, against a systemctl of ours."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from p2ptrain.base import files
from p2ptrain.base.errors import UserError
from p2ptrain.manifest import SignedManifest
from peer import service as module
from peer.home import Home
from peer.saving import LAST_PATIENCE_S
from peer.service import STOP_S, service, service_name, unit_of, unit_word

ODD = Path('/home/me/it\'s 100 % "mine" $HOME \\ naïve')

SYSTEMCTL = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in
*daemon-reload*) [ -z "$BROKEN" ] || { echo "Failed to connect to bus: No medium found" >&2; exit 1; } ;;
esac
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A machine with our systemctl; what it was called with."""
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    (programs / "systemctl").write_text(SYSTEMCTL)
    (programs / "systemctl").chmod(0o755)
    for name, value in {"PATH": f"{programs}:/bin:/usr/bin", "CALLS": str(calls), "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    for name in module.CARRIED:
        monkeypatch.delenv(name, raising=False)
    return lambda: calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture
def home(tmp_path: Path, signed_run: Callable[..., SignedManifest]) -> Path:
    path = tmp_path / "my home"
    path.mkdir()
    Home(path).save_manifest(signed_run())
    return path


def ask(*words: str | Path) -> Result:
    return CliRunner().invoke(service, list(map(str, words)))


def refused(*words: str | Path) -> UserError:
    error = ask(*words).exception
    assert isinstance(error, UserError)
    return error


# --- the files --------------------------------------------------------------------------------------------------------


def test_names_are_unique_and_plain() -> None:
    assert service_name(ODD) == service_name(ODD)
    assert service_name(Path("/a/peer")) != service_name(Path("/b/peer"))
    assert all(each.isalnum() or each == "-" for each in service_name(ODD))
    assert service_name(Path("/")).startswith("p2ptrain-home-")


def test_words_of_a_unit_are_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/big disk/$x")
    monkeypatch.setattr(sys, "executable", "/opt/my env/bin/python")
    assert unit_word('a "b" \\ 100%') == '"a \\"b\\" \\\\ 100%%"'
    unit = unit_of(ODD).decode()
    start = next(line for line in unit.splitlines() if line.startswith("ExecStart="))
    assert start.startswith('ExecStart="/opt/my env/bin/python" "-P" "-m" "p2ptrain.cli" "peer" "--home" ')
    assert start.endswith('"/home/me/it\'s 100 %% \\"mine\\" $$HOME \\\\ naïve"')
    assert ' "XDG_CACHE_HOME=/big disk/$x"' in unit


def test_the_service_may_take_as_long_as_saving_may() -> None:
    assert STOP_S >= LAST_PATIENCE_S + 30
    assert f"TimeoutStopSec={STOP_S}\n" in unit_of(ODD).decode()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """Check that systemd parses the words as meant: it complains about a missing program by its full name."""
    content, path = unit_of(ODD), tmp_path / f"{service_name(ODD)}.service"
    path.write_bytes(content)
    verify = ["systemd-analyze", "--user", "--man=no", "verify", str(path)]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(verify, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if path.name in line]) == (0, [])
    path.write_bytes(content.replace(b"Restart=on-failure", b"Restrat=on-failure"))
    done = subprocess.run(verify, capture_output=True, text=True, env=environment, check=False)
    assert "Restrat" in done.stderr


# --- the commands -----------------------------------------------------------------------------------------------------


def test_a_service_is_installed_shown_and_removed(
    machine: Callable[[], list[str]], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", "/big disk")
    monkeypatch.chdir(tmp_path)
    done = ask("install", "my home")
    assert done.exception is None, done.exception
    assert "loginctl enable-linger" in done.output
    assert "p2ptrain service uninstall 'my home'" in done.output
    [unit] = (tmp_path / ".config/systemd/user").iterdir()
    text = unit.read_text()
    assert f'ExecStart="{sys.executable}" "-P" "-m" "p2ptrain.cli" "peer" "--home" "{home}"\n' in text
    assert '"HF_HOME=/big disk"' in text
    name = f"{service_name(home)}.service"
    assert [call.split()[1:] for call in machine()] == [
        ["reset-failed", name],
        ["daemon-reload"],
        ["enable", name],
        ["restart", name],
    ]
    assert ask("uninstall", home).exception is None
    assert machine()[-1] == f"--user disable --now {name}"
    assert not unit.exists()
    assert "There is no service for" in refused("uninstall", home).problem
    assert "p2ptrain service install" in refused("uninstall", home).remedy


def test_a_peer_that_runs_is_not_doubled(machine: Callable[[], list[str]], home: Path) -> None:
    for stop in "finish", "service uninstall":
        with files.locked(home):
            error = refused("install", home)
            assert "already" in error.problem
            assert error.remedy.endswith(f"p2ptrain {stop} '{home}'")
        ask("install", home)


def test_a_home_without_a_peer_and_a_run_are_refused(machine: Callable[[], list[str]], tmp_path: Path) -> None:
    assert "There is no peer in" in refused("install", tmp_path / "none").problem
    (tmp_path / "run.key").touch()
    assert "the directory of a run" in refused("install", tmp_path).problem
    assert machine() == []


def test_a_systemctl_that_fails_says_why_and_what_to_do(
    machine: Callable[[], list[str]], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKEN", "1")
    error = refused("install", home)
    assert error.problem.endswith(" daemon-reload` failed: systemctl: Failed to connect to bus: No medium found.")
    assert "Log in as this user directly" in error.remedy
    assert "There is no service for" in refused("uninstall", home).problem


def test_without_a_service_manager_cron_is_named(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    home = home.rename(tmp_path / "100 % mine")
    error = refused("install", home)
    assert "no systemd" in error.problem
    line = error.remedy.partition("this line: ")[2]
    assert shlex.split(line.replace("\\%", "%"))[-2:] == ["--home", str(home)]
    assert (line.startswith("@reboot "), "%" in line.replace("\\%", "")) == (True, False)
    assert not (tmp_path / ".config").exists()


@pytest.mark.parametrize("name", [b"home\xff", b"home\x01", b"home\n"])
def test_names_that_systemd_does_not_take_are_refused(
    name: bytes, machine: Callable[[], list[str]], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = home.rename(home.with_name(os.fsdecode(name)))
    error = refused("install", odd)
    assert "\ufffd has characters that systemd refuses." in error.problem
    assert error.problem.isprintable()
    monkeypatch.setenv("HF_HOME", str(odd))
    assert refused("install", odd.rename(home)).problem == error.problem
    assert machine() == []


def test_a_unit_that_cannot_be_written_is_named(machine: Callable[[], list[str]], home: Path, tmp_path: Path) -> None:
    (tmp_path / ".config").write_text("a file")
    assert "cannot be written" in refused("install", home).problem
    assert not [call for call in machine() if "enable" in call]
