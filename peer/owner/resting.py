"""Resting: why a peer yields to the other uses of its machine, by the running programs and the battery, as psutil says.

Only what the settings ask for is read. A value that this system does not give is a fault that the owner sees in one
line; the peer trains on.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import psutil

from p2ptrain.base.text import one_line
from p2ptrain.manifest import SETTINGS_FILE
from peer.owner.settings import Settings

T = TypeVar("T")

READ_S = 5.0
"""Seconds between two readings, and so the delay until the peer yields. Reading the names of 80 processes takes 13 ms.
Guess: how soon volunteers expect a game to have the machine."""
OLD_S = 30.0
"""Seconds without an answer of the system after which the last reading counts no more. Guess: how long a loaded machine
takes."""
CALM_S = 60.0
"""Seconds for which a reason must be absent before the peer rejoins, because leaving and joining cost more than a
short rest. Guess: how often volunteers' programs start and end."""
NAME_BYTES = 15
"""Length at which Linux cuts the name of a process (``TASK_COMM_LEN`` in linux/sched.h, without its NUL)."""


@dataclass(frozen=True, slots=True)
class Readings:
    programs: frozenset[str] = frozenset()
    """Those programs of ``pause_while`` that run, spelt as there."""
    on_battery: bool = False
    faults: Mapping[str, str] = field(default_factory=dict)
    """Settings that have no effect, each with the reason."""


UNKNOWN = Readings(faults=dict.fromkeys(("pause_while", "pause_on_battery"), f"no answer in {OLD_S:.0f} s"))
"""What counts while a read of the system hangs."""


class RestRule:
    """The reason to rest, from settings, readings and time; it makes a rest ``CALM_S`` longer than its cause."""

    def __init__(self) -> None:
        self._settings = Settings()
        self._why = ""
        self._calm_at = -math.inf

    def reason(self, settings: Settings, readings: Readings, now: float) -> str:
        """Return why the peer rests now, or "". Changed settings apply at once, without ``CALM_S``."""
        if settings is not self._settings:
            self._settings, self._why = settings, ""
        if why := _cause(settings, readings):
            self._why, self._calm_at = why, now + CALM_S
        elif now >= self._calm_at:
            self._why = ""
        return self._why


def _cause(settings: Settings, readings: Readings) -> str:
    if running := [each for each in settings.pause_while if each in readings.programs]:
        return f"{running[0]} is running (pause_while in {SETTINGS_FILE})"
    if settings.pause_on_battery and readings.on_battery:
        return f"this computer runs on its battery (pause_on_battery in {SETTINGS_FILE})"
    return ""


def read(settings: Settings) -> Readings:
    """Read once what the settings ask for; takes some ms, but a read of ``/proc`` can hang."""
    faults = dict[str, str]()

    def value(option: str, sensor: Callable[[], T], default: T) -> T:
        if not getattr(settings, option):
            return default
        try:
            return sensor()
        except Exception as error:  # psutil on odd hardware raises nearly anything
            faults[option] = one_line(str(error) or type(error).__name__)
            return default

    programs = value("pause_while", lambda: running(settings.pause_while), frozenset[str]())
    return Readings(programs, value("pause_on_battery", is_on_battery, False), faults)


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
    """Return whether the battery feeds this computer. Raises OSError if it is unknown."""
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    if battery is None or battery.power_plugged is None:
        raise OSError("this system shows no battery")
    return not battery.power_plugged
