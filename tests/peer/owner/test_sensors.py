"""What this system tells, through psutil and through programs that stand in for nvidia-smi and loginctl."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from p2ptrain.base.system_tool import ToolError
from peer.owner import sensors as sensors_module
from peer.owner.sensors import Sensors, is_in_use, is_on_battery, running, temperature
from peer.owner.settings import Settings


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, found before others."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


# --- sensors ----------------------------------------------------------------------------------------------------------


def test_a_running_program_is_found_whatever_its_case(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tools, "Game.exe", "#!/bin/sh\nread line\n")
    names = ["game", "GAME.EXE", "no such program"]
    with subprocess.Popen([tools / "Game.exe"], stdin=subprocess.PIPE):
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
    with pytest.raises(ToolError, match="no battery"):
        is_on_battery()


def chips(monkeypatch: pytest.MonkeyPatch, **values: list[float]) -> None:
    found = {name: [SimpleNamespace(current=each) for each in listed] for name, listed in values.items()}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: found, raising=False)


def test_the_hottest_plausible_sensor_of_the_processor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    chips(monkeypatch, acpitz=[28.0], k10temp=[0.0, 62.0, 65.5, 255.0, float("nan")], nvme=[80.0])
    assert temperature() == 65.5


def test_a_missing_temperature_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    chips(monkeypatch, nvme=[50.0])
    with pytest.raises(ToolError, match="no temperature of the processor"):
        temperature()


@pytest.mark.parametrize("cpu", [[60.0], []])
def test_the_hottest_card_counts_too(tools: Path, monkeypatch: pytest.MonkeyPatch, cpu: list[float]) -> None:
    chips(monkeypatch, k10temp=cpu)
    write(tools, "nvidia-smi", "#!/bin/sh\n[ $1 = --query-gpu=temperature.gpu ] && printf '55\\n84\\n'\n")
    assert temperature() == 84.0


@pytest.mark.parametrize("script", ["echo '[N/A]'", "echo 'Driver/library version mismatch'; exit 18"])
def test_a_card_whose_temperature_is_unknown_is_a_fault(
    tools: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    chips(monkeypatch, k10temp=[60.0])
    write(tools, "nvidia-smi", f"#!/bin/sh\n{script}\n")
    with pytest.raises(ToolError, match="nvidia-smi"):
        temperature()


@pytest.mark.parametrize(("told", "expected"), [("yes", False), ("no", True)])
def test_logind_tells_whether_somebody_is_here(tools: Path, told: str, expected: bool) -> None:
    write(tools, "loginctl", f"#!/bin/sh\n[ $1 = show-user ] && echo {told}\n")
    assert is_in_use() is expected


@pytest.mark.parametrize("script", ["echo", "echo maybe", "echo 'System has not been booted with systemd'; exit 1"])
def test_where_the_system_is_silent_about_its_users_one_line_says_so(tools: Path, script: str) -> None:
    write(tools, "loginctl", f"#!/bin/sh\n{script}\n")
    with pytest.raises(ToolError, match="this system does not report whether somebody uses it"):
        is_in_use()


def test_only_what_was_asked_for_is_read_and_a_fault_stops_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> None:
        raise RuntimeError("odd hardware")

    monkeypatch.setattr(psutil, "sensors_battery", broken, raising=False)
    monkeypatch.setattr(psutil, "process_iter", broken)
    chips(monkeypatch, k10temp=[71.0])
    sensors = Sensors(clock=lambda: 7.0)
    assert sensors.read().faults == {}
    sensors.watch(Settings(pause_on_battery=True, pause_above_celsius=80.0))
    readings = sensors.read()
    assert readings.faults == {"pause_on_battery": "odd hardware"}
    assert (readings.at, readings.celsius, readings.on_battery) == (7.0, 71.0, None)


@contextlib.asynccontextmanager
async def running_sensors(sensors: Sensors) -> AsyncIterator[None]:
    running = asyncio.create_task(sensors.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait([running])


def test_the_thread_reads_at_once_after_an_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    chips(monkeypatch, k10temp=[71.0])
    read = threading.Event()
    sensors = Sensors()
    once = sensors.read

    def reads() -> Any:
        found = once()
        if found.celsius:
            read.set()
        return found

    sensors.read = reads  # type: ignore[method-assign]

    async def scene() -> None:
        async with running_sensors(sensors):
            sensors.watch(Settings(pause_above_celsius=80.0))
            assert await asyncio.to_thread(read.wait, sensors_module.PERIOD_S * 10)

    asyncio.run(scene())
