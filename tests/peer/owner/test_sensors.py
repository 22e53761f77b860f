"""What this system tells, through psutil and through programs that stand in for nvidia-smi and loginctl."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
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
from peer.owner.power_cap import PowerCap
from peer.owner.sensors import Sensors, is_in_use, is_on_battery, running, temperatures
from peer.owner.settings import Settings

CARD = "GPU-0a1b"
FILE = f"{CARD}.json"

NVIDIA = """#!/bin/sh
echo "$*" >>{folder}/calls
case "$*" in
*temperature.gpu*) cat {folder}/celsius ;;
*power.limit*) cat {folder}/watts ;;
*"-pl "*)
    if [ -e {folder}/forbidden ]; then echo "Insufficient Permissions"; exit 4; fi
    if [ -e {folder}/unsupported ]; then echo "Setting power management limit is not supported"; exit 0; fi
    if [ "$4" -gt 450 ]; then echo "Provided power limit $4.00 W is not a valid power limit"; exit 2; fi
    echo "$4.00" >{folder}/watts ;;
esac
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, the only ones to be found; the card has 71 °C and 350 W."""
    folder = tmp_path / "tools"
    folder.mkdir()
    write(folder, "nvidia-smi", NVIDIA.format(folder=folder))
    (folder / "celsius").write_text("71\n")
    (folder / "watts").write_text("350.00\n")
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


def test_the_hottest_plausible_sensor_of_processor_and_card_counts(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chips(monkeypatch, acpitz=[28.0], k10temp=[0.0, 62.0, 65.5, 255.0, float("nan")], nvme=[80.0])
    assert temperatures([]) == {"the processor": 65.5}
    assert temperatures([CARD]) == {"the processor": 65.5, "the graphics card": 71.0}
    chips(monkeypatch)
    assert temperatures([CARD]) == {"the graphics card": 71.0}


@pytest.mark.parametrize("told", ["[N/A]", "", "255", "nan"])
def test_a_missing_temperature_is_a_fault(tools: Path, monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    chips(monkeypatch, coretemp=[50.0])
    (tools / "celsius").write_text(told)
    with pytest.raises(ToolError, match="no temperature of the graphics card"):
        temperatures([CARD])
    chips(monkeypatch, nvme=[50.0])
    with pytest.raises(ToolError, match="no temperature of the processor"):
        temperatures([])


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
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("odd hardware")

    monkeypatch.setattr(psutil, "sensors_battery", broken, raising=False)
    monkeypatch.setattr(psutil, "process_iter", broken)
    chips(monkeypatch)
    sensors = Sensors(tmp_path, clock=lambda: 7.0)
    sensors.train_on([CARD])
    assert sensors.read().faults == {}
    assert not (tools / "calls").exists()
    sensors.watch(Settings(pause_on_battery=True, pause_above_celsius=80.0))
    readings = sensors.read()
    assert readings.faults == {"pause_on_battery": "odd hardware"}
    assert (readings.at, readings.celsius, readings.on_battery) == (7.0, {"the graphics card": 71.0}, None)


@contextlib.asynccontextmanager
async def running_sensors(sensors: Sensors) -> AsyncIterator[None]:
    running = asyncio.create_task(sensors.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait([running])


def test_the_thread_reads_at_once_after_an_edit_and_puts_the_limit_back(tools: Path, tmp_path: Path) -> None:
    read = threading.Event()
    sensors = Sensors(tmp_path)
    sensors.train_on([CARD])
    once = sensors.read

    def reads() -> Any:
        found = once()
        if found.celsius:
            read.set()
        return found

    sensors.read = reads  # type: ignore[method-assign]

    async def scene() -> None:
        async with running_sensors(sensors):
            sensors.watch(Settings(pause_above_celsius=80.0, gpu_watts=200))
            assert await asyncio.to_thread(read.wait, sensors_module.PERIOD_S * 10)
            assert (tools / "watts").read_text() == "200.00\n"

    asyncio.run(scene())
    assert sensors.left_capped == ""
    assert (tools / "watts").read_text() == "350.00\n"
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize(("gpu_watts", "said"), [(0, ""), (200, f"sudo nvidia-smi -i {CARD} -pl 350")])
def test_sensors_that_are_stuck_at_the_end_say_how_to_put_the_limit_back(
    gpu_watts: int, said: str, tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_stuck, goes_on = threading.Event(), threading.Event()

    def stuck() -> bool:
        is_stuck.set()
        return goes_on.wait(60)

    monkeypatch.setattr(sensors_module, "is_on_battery", stuck)
    monkeypatch.setattr(sensors_module, "JOIN_S", 0.1)
    sensors = Sensors(tmp_path)
    sensors.train_on([CARD])
    sensors.watch(Settings(gpu_watts=gpu_watts, pause_on_battery=True))

    async def scene() -> None:
        async with running_sensors(sensors):
            assert await asyncio.to_thread(is_stuck.wait, 60)

    asyncio.run(scene())
    why = sensors.left_capped
    goes_on.set()
    sensors._thread._thread.join()
    assert why.endswith(said)
    assert bool(why) is bool(said)
    assert watts(tools) == 350  # by the thread itself


TWO_CARDS = """#!/bin/sh
watts={folder}/watts.$2
case "$*" in
*temperature.gpu*) cat {folder}/celsius.$2 ;;
*power.limit*) cat $watts ;;
*"-pl "*) echo "$4.00" >$watts ;;
esac
"""


def test_the_cards_of_a_peer_share_the_limit_and_the_hottest_counts(tools: Path, tmp_path: Path) -> None:
    cards = {"GPU-1": 60, "GPU-2": 75}
    write(tools, "nvidia-smi", TWO_CARDS.format(folder=tools))
    for card, celsius in cards.items():
        (tools / f"watts.{card}").write_text("350.00\n")
        (tools / f"celsius.{card}").write_text(f"{celsius}\n")

    def limits() -> list[float]:
        return [float((tools / f"watts.{card}").read_text()) for card in cards]

    sensors = Sensors(tmp_path)
    sensors.train_on(list(cards))
    sensors.watch(Settings(pause_above_celsius=80.0, gpu_watts=500))
    readings = sensors.read()
    assert readings.faults == {}
    assert readings.celsius["the graphics card"] == 75
    assert limits() == [250, 250]
    sensors.watch(Settings())
    assert sensors.read().faults == {}
    assert limits() == [350, 350]
    (tools / "celsius.GPU-1").write_text("[N/A]\n")
    with pytest.raises(ToolError, match="graphics card"):
        temperatures(list(cards))


# --- the card's power limit -------------------------------------------------------------------------------------------


def watts(tools: Path) -> float:
    return float((tools / "watts").read_text())


def test_a_cap_is_set_once_and_the_earlier_limit_comes_back(tools: Path, tmp_path: Path) -> None:
    cap = PowerCap(tmp_path, CARD)
    assert cap.apply(0) == ""
    assert not (tools / "calls").exists()
    assert [cap.apply(200), cap.apply(200), cap.apply(250)] == ["", "", ""]
    assert watts(tools) == 250
    assert (tools / "calls").read_text().count("-pl") == 2
    assert cap.apply(0) == ""
    assert watts(tools) == 350
    assert not (tmp_path / FILE).exists()


def test_after_sigkill_the_next_start_knows_the_earlier_limit(tools: Path, tmp_path: Path) -> None:
    assert PowerCap(tmp_path, CARD).apply(200) == ""
    again = PowerCap(tmp_path, CARD)
    assert again.apply(250) == ""
    again.release()
    assert (watts(tools), again.left_capped) == (350, "")
    assert PowerCap(tmp_path, CARD).apply(200) == ""
    assert PowerCap(tmp_path, None).apply(0) == ""  # it trains on the CPU now
    assert watts(tools) == 350


def test_without_permission_one_sentence_says_what_to_do(tools: Path, tmp_path: Path) -> None:
    (tools / "forbidden").touch()
    cap = PowerCap(tmp_path, CARD)
    said = f"only an administrator may set the limit; do so with: sudo nvidia-smi -i {CARD} -pl 200"
    assert [cap.apply(200), cap.apply(200)] == [said, said]
    assert (tools / "calls").read_text().count("-pl") == 1
    assert not (tmp_path / FILE).exists()
    cap.release()
    assert (watts(tools), cap.left_capped) == (350, "")


def test_a_limit_that_the_card_refuses_changes_nothing(tools: Path, tmp_path: Path) -> None:
    cap = PowerCap(tmp_path, CARD)
    assert cap.apply(500) == "nvidia-smi: Provided power limit 500.00 W is not a valid power limit"
    (tools / "unsupported").touch()
    assert cap.apply(300) == "the card did not take the limit"
    (tools / "watts").write_text("[N/A]")
    assert cap.apply(310) == "the card does not report its power limit"
    assert PowerCap(tmp_path, None).apply(200) == "this peer does not train on an NVIDIA card"
    assert not (tmp_path / FILE).exists()


def test_a_limit_that_cannot_be_put_back_is_told_and_kept_for_the_next_start(tools: Path, tmp_path: Path) -> None:
    cap = PowerCap(tmp_path, CARD)
    cap.apply(200)
    (tools / "forbidden").touch()
    cap.release()
    assert cap.left_capped.endswith(f"put the limit back with: sudo nvidia-smi -i {CARD} -pl 350")
    (tools / "forbidden").unlink()
    PowerCap(tmp_path, CARD).apply(0)
    assert watts(tools) == 350


def test_the_limits_of_killed_peers_cards_come_back_too(tools: Path, tmp_path: Path) -> None:
    PowerCap(tmp_path, CARD).apply(200)
    other = PowerCap(tmp_path, "GPU-other")
    assert other.apply(260) == ""
    other.release()
    pairs = re.findall("-i (GPU-[a-z0-9]+) -pl ([0-9]+)", (tools / "calls").read_text())
    assert pairs == [(CARD, "200"), ("GPU-other", "260"), (CARD, "350"), ("GPU-other", "200")]


def test_of_two_peers_on_a_card_one_caps_it_and_the_other_takes_over(tools: Path, tmp_path: Path) -> None:
    first, second = PowerCap(tmp_path, CARD), PowerCap(tmp_path, CARD)
    assert first.apply(200) == ""
    for _ in range(2):
        assert second.apply(250) == "another peer on this computer sets this card's limit"
    second.release()  # it ends
    assert watts(tools) == 200
    assert second.apply(260) == "another peer on this computer sets this card's limit"
    first.release()
    assert watts(tools) == 350
    assert second.apply(260) == ""
    assert watts(tools) == 260
    second.release()
    assert watts(tools) == 350


def test_a_cap_that_fails_leaves_the_card_to_others(tools: Path, tmp_path: Path) -> None:
    assert PowerCap(tmp_path, CARD).apply(500)
    other = PowerCap(tmp_path, CARD)
    assert other.apply(300) == ""
    other.release()
    assert watts(tools) == 350


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"watts": -5}', b'{"watts": "5"}', b'{"watts": NaN}', b"[" * 9999]
)
def test_a_damaged_file_puts_nothing_back(tools: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    PowerCap(tmp_path, CARD).apply(0)
    assert not (tools / "calls").exists()


def test_a_directory_that_cannot_be_written_caps_nothing(tools: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cap = PowerCap(tmp_path / "file", CARD)
    assert f"{FILE} cannot be written" in cap.apply(200)
    assert watts(tools) == 350


def test_the_file_says_what_is_to_be_put_back(tools: Path, tmp_path: Path) -> None:
    PowerCap(tmp_path, CARD).apply(200)
    assert json.loads((tmp_path / FILE).read_text()) == {"watts": 350.0}
