"""Resting: why a peer yields to the other uses of its machine, decided from readings of its sensors. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from p2ptrain.manifest import SETTINGS_FILE
from peer.owner.settings import Settings

CALM_S = 60.0
"""Seconds for which a reason must be absent before the peer rejoins, because leaving and joining cost more than a
short rest. Guess: how often volunteers' programs start and end."""
COOLED_CELSIUS = 10.0
"""Difference between the temperatures at which a rest begins and ends. Guess: temperature curves of
processors."""
STALE_S = 60.0
"""Age in seconds from which readings no longer count: the sensors' thread is stuck in the kernel."""
SILENT = f"the sensors have not answered for {STALE_S:.0f} s"
SENSED = ("pause_while", "pause_on_battery", "pause_above_celsius", "pause_while_active_minutes")
"""Settings that need the sensors' thread."""


@dataclass(frozen=True, slots=True)
class Readings:
    """Values that the sensors gave last; None if a value was not asked for or is unknown."""

    at: float = -math.inf
    """Time of the monotonic clock, in seconds."""
    programs: frozenset[str] = frozenset()
    """Those programs of ``pause_while`` that run, spelt as there."""
    on_battery: bool | None = None
    celsius: float | None = None
    """Temperature of the processor."""
    is_active: bool | None = None
    """Whether somebody uses this computer now, as the system sees it."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """Settings that have no effect, each with the reason."""


def current(readings: Readings, settings: Settings, now: float) -> Readings:
    """Return the readings, or, if they are too old, none and a fault for each setting that needs them."""
    if now - readings.at <= STALE_S:
        return readings
    return Readings(faults={option: SILENT for option in SENSED if getattr(settings, option)})


class RestRule:
    """The reason to rest, from settings, readings and time; it keeps what makes a rest longer than its cause."""

    def __init__(self) -> None:
        self._settings = Settings()
        self._why = ""
        self._is_hot = False
        self._calm_at = -math.inf
        self._active_at = -math.inf

    def reason(self, settings: Settings, readings: Readings, now: float) -> str:
        """Return why the peer rests now, or "". Changed settings apply at once, without ``CALM_S``.

        Args:
            readings: ``current`` ones.
        """
        if settings is not self._settings:
            self._settings, self._why, self._is_hot = settings, "", False
        if why := self._cause(settings, readings, now):
            self._why, self._calm_at = why, now + CALM_S
        elif now >= self._calm_at:
            self._why = ""
        return self._why

    def _cause(self, settings: Settings, readings: Readings, now: float) -> str:
        if readings.is_active:
            self._active_at = now
        if running := [each for each in settings.pause_while if each in readings.programs]:
            return f"{running[0]} is running (pause_while in {SETTINGS_FILE})"
        minutes = settings.pause_while_active_minutes
        if now - self._active_at < 60 * minutes:
            span = "minute" if minutes == 1 else f"{minutes} minutes"
            return f"somebody used this computer in the last {span} (pause_while_active_minutes in {SETTINGS_FILE})"
        if settings.pause_on_battery and readings.on_battery:
            return f"this computer runs on its battery (pause_on_battery in {SETTINGS_FILE})"
        return self._heat(settings.pause_above_celsius, readings.celsius)

    def _heat(self, highest: float, celsius: float | None) -> str:
        limit = highest - COOLED_CELSIUS if self._is_hot else highest
        self._is_hot = bool(highest) and celsius is not None and celsius > limit
        if not self._is_hot:
            return ""
        until = f"training resumes at {highest - COOLED_CELSIUS:g} °C"
        return f"the computer has {celsius:.0f} °C; {until} (pause_above_celsius in {SETTINGS_FILE})"
