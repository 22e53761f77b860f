"""Sensors: running programs, battery, temperatures and the computer's users, read in a thread beside the loop.

Only what the settings ask for is read, every ``PERIOD_S``. A value that this system does not give is a fault that the
owner sees in one line; the peer trains on.

==========================  ========================================================================================
option                      source
==========================  ========================================================================================
pause_while                 names of all processes but our own, by psutil
pause_on_battery            psutil
pause_above_celsius         the processor's sensors, by psutil; all cards', by nvidia-smi where it is installed
pause_while_active_minutes  ``IdleHint`` of logind, by loginctl: the desktop reports it, or the terminals' last input
==========================  ========================================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import psutil

from p2ptrain.base.daemon_thread import DaemonThread
from p2ptrain.base.system_tool import ToolError, output_of
from p2ptrain.base.text import one_line
from p2ptrain.ports import Clock
from peer.owner.resting import Readings
from peer.owner.settings import Settings

T = TypeVar("T")

PERIOD_S = 5.0
"""Seconds between two readings, and so the delay until the peer yields. Reading the names of 80 processes takes 13 ms.
Guess: how soon volunteers expect a game to have the machine."""
CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal", "acpitz")
"""Names of the processor's sensors in Linux, most exact first: Intel, AMD, ARM, and the firmware's thermal zone."""
NAME_BYTES = 15
"""Length at which Linux cuts the name of a process (``TASK_COMM_LEN`` in linux/sched.h, without its NUL)."""
PLAUSIBLE_CELSIUS = (1.0, 150.0)
"""Range of real temperatures; missing sensors show values like 0, -128 or 255."""


class Sensors:
    """The sensors of one peer, read while ``run`` runs."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.readings = Readings()
        self._clock = clock
        self._settings = Settings()
        self._edited = asyncio.Event()
        self._thread = DaemonThread("sensors")

    async def run(self) -> None:
        """Read the sensors until cancelled."""
        self.readings = Readings(at=self._clock())
        with self._thread:
            while True:
                self._edited.clear()
                self.readings = await self._thread.call(self.read)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._edited.wait(), PERIOD_S)

    def watch(self, settings: Settings) -> None:
        """Read from now on what these settings need, beginning at once."""
        if settings is not self._settings:
            self._settings = settings
            self._edited.set()

    def read(self) -> Readings:
        """Read the sensors once, with a deadline for each program that is called."""
        settings, faults = self._settings, dict[str, str]()

        def value(option: str, sensor: Callable[[], T]) -> T | None:
            if not getattr(settings, option):
                return None
            try:
                return sensor()
            except Exception as error:  # psutil on odd hardware raises nearly anything
                faults[option] = one_line(str(error) or type(error).__name__)
                return None

        return Readings(
            programs=value("pause_while", lambda: running(settings.pause_while)) or frozenset(),
            on_battery=value("pause_on_battery", is_on_battery),
            celsius=value("pause_above_celsius", temperature),
            is_active=value("pause_while_active_minutes", is_in_use),
            faults=faults,
            at=self._clock(),
        )


def running(wanted: Iterable[str]) -> frozenset[str]:
    """Return the wanted names that processes other than this one and its children have, case and ``.exe`` ignored.

    A name may be whole, or cut as ``ps -e`` shows it.
    """
    me = psutil.Process()
    own = {me.pid, *(each.pid for each in me.children(recursive=True))}
    listed = {each.info["name"] or "" for each in psutil.process_iter(["name"]) if each.pid not in own}
    names = {_plain(name) for each in listed for name in (each, _cut(each))}
    # psutil completes a name from the command line, unless a program has changed that
    cut = {_plain(each) for each in listed if len(os.fsencode(each)) == NAME_BYTES}
    return frozenset(each for each in wanted if _plain(each) in names or _plain(_cut(each)) in cut)


def _plain(name: str) -> str:
    return name.casefold().removesuffix(".exe")


def _cut(name: str) -> str:
    return os.fsdecode(os.fsencode(name)[:NAME_BYTES])


def is_on_battery() -> bool:
    """Return whether the battery feeds this computer. Raises ToolError if it is unknown."""
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    if battery is None or battery.power_plugged is None:
        raise ToolError("this system shows no battery")
    return not battery.power_plugged


def temperature() -> float:
    """Return the °C of the processor or of an NVIDIA card, whichever is hotter.

    Raises ToolError if both, or those of the cards, are unknown.
    """
    chips = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    found = [next(filter(None, (_plausible(each.current for each in chips.get(name, ())) for name in CPU_SENSORS)), [])]
    if shutil.which("nvidia-smi") is not None:
        lines = output_of("nvidia-smi", "--query-gpu=temperature.gpu", "--format=csv,noheader,nounits").split()
        found.append(_plausible(float(each) for each in lines if each.isdecimal()))
        if not found[-1]:
            raise ToolError("nvidia-smi shows no temperature")
    if not any(found):
        raise ToolError("this system shows no temperature of the processor")
    return max(max(each) for each in found if each)


def _plausible(values: Iterable[float]) -> list[float]:
    lowest, highest = PLAUSIBLE_CELSIUS
    return [float(each) for each in values if lowest <= each <= highest]


def is_in_use() -> bool:
    """Return whether somebody uses this computer, by any keyboard, screen or terminal. Raises ToolError."""
    try:
        hint = output_of("loginctl", "show-user", "--property=IdleHint", "--value").strip()
    except ToolError as error:
        raise ToolError(f"this system does not report whether somebody uses it ({error})") from None
    if hint not in ("yes", "no"):
        raise ToolError("this system does not report whether somebody uses it")
    return hint == "no"
