"""When a peer rests for other uses of its machine, and what the system tells of them."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from peer.owner.resting import CALM_S, Readings, RestRule, is_on_battery, read, running
from peer.owner.settings import Settings

ALL = Settings(pause_while=["Steam", "blender"], pause_on_battery=True)
CALM = Readings()


@pytest.mark.parametrize(
    ("readings", "said"),
    [
        (CALM, ""),
        (replace(CALM, programs=frozenset({"Steam"})), "Steam is running (pause_while in settings.toml)"),
        (replace(CALM, on_battery=True), "this computer runs on its battery (pause_on_battery in settings.toml)"),
    ],
)
def test_each_reading_has_its_reason_and_only_if_it_was_asked_for(readings: Readings, said: str) -> None:
    assert RestRule().reason(ALL, readings, 1000.0) == said
    assert RestRule().reason(Settings(), readings, 1000.0) == ""


def test_a_rest_ends_a_minute_after_its_reason() -> None:
    rule, now = RestRule(), 1000.0
    busy = replace(CALM, on_battery=True)
    why = rule.reason(ALL, busy, now)
    assert rule.reason(ALL, CALM, now + CALM_S - 1) == why
    assert rule.reason(ALL, busy, now + CALM_S) == why
    assert rule.reason(ALL, CALM, now + 2 * CALM_S - 1) == why
    assert rule.reason(ALL, CALM, now + 2 * CALM_S) == ""


def test_an_edit_counts_at_once() -> None:
    rule, now = RestRule(), 1000.0
    assert rule.reason(ALL, replace(CALM, programs=frozenset({"Steam"})), now)
    edited = ALL.model_copy(update={"pause_while": ["blender"]})
    assert rule.reason(edited, replace(CALM, programs=frozenset({"Steam"})), now + 1) == ""


def test_a_running_program_is_found_whatever_its_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "Game.exe"
    program.write_text("#!/bin/sh\nread line\n")
    program.chmod(0o755)
    names = ["game", "GAME.EXE", "no such program"]
    with subprocess.Popen([program], stdin=subprocess.PIPE):
        assert running(names) == frozenset()  # our own child
        monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [])
        assert running(names) == {"game", "GAME.EXE"}
    assert running(names) == frozenset()


def test_long_names_are_found_whole_and_as_ps_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ["gnome-terminal-server", "plasma-systemmo", "日本語の端末エミュレータ"]
    processes = [SimpleNamespace(pid=-1, info={"name": each}) for each in listed]
    monkeypatch.setattr(psutil, "process_iter", lambda _: processes)
    found = {"Gnome-Terminal-", "gnome-terminal-server", "plasma-systemmo", "plasma-systemmonitor", "日本語の端"}
    assert running({*found, "gnome-terminal-client", "gnome-terminal", "plasma-system", "日本語"}) == found


@pytest.mark.parametrize(("plugged", "expected"), [(True, False), (False, True)])
def test_a_battery_tells_whether_it_is_used(monkeypatch: pytest.MonkeyPatch, plugged: bool, expected: bool) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: SimpleNamespace(power_plugged=plugged), raising=False)
    assert is_on_battery() is expected


@pytest.mark.parametrize("battery", [None, SimpleNamespace(power_plugged=None)])
def test_without_a_battery_it_cannot_be_told(monkeypatch: pytest.MonkeyPatch, battery: object) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    with pytest.raises(OSError, match="no battery"):
        is_on_battery()


def test_only_what_was_asked_for_is_read_and_a_fault_stops_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("odd hardware")

    monkeypatch.setattr(psutil, "sensors_battery", broken, raising=False)
    assert read(Settings()) == Readings()
    readings = read(Settings(pause_on_battery=True, pause_while=["no such program"]))
    assert readings == Readings(faults={"pause_on_battery": "odd hardware"})
