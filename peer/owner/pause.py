"""``HOME/paused.json``: exists while the owner has paused the peer, so that a pause outlives the process.

A missing or damaged file means not paused, because a peer that is paused forever without a reason would be worse. The
end of a pause is wall-clock time in seconds since 1970; infinity means until ``p2ptrain resume``.
"""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path

from p2ptrain.base import files
from p2ptrain.base.errors import HomeError
from p2ptrain.base.text import LIFETIME_UNITS, lifetime_s

FILE = "paused.json"
MAX_BYTES = 256
LONGEST_S = 365 * 86_400
"""Longest pause with an end, in seconds: a year, as of an invite; a later end is a typing error."""


class PauseFile:
    """The pause file of one home, written by one thread."""

    def __init__(self, home: Path) -> None:
        self.path = home / FILE

    def load(self) -> tuple[float | None, str]:
        """Return until when an earlier process was paused (None: it was not), and what is wrong with the file or ""."""
        try:
            with self.path.open("rb") as file:
                document = json.loads(file.read(MAX_BYTES))
        except FileNotFoundError:
            return None, ""
        except OSError as error:
            return None, f"{self.path} cannot be read: {error.strerror}; the peer is not paused"
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict) or document.get("paused") is not True:
            return None, f"{self.path} is damaged; the peer is not paused"
        until = end_of(document.get("until"))
        return until, "" if until is not None else f"{self.path} is damaged; the peer is not paused"

    def keep(self, until: float | None) -> str:
        """Save the pause for the next start; return why that failed, or ""."""
        try:
            if until is not None:
                end = {"until": until} if math.isfinite(until) else {}
                files.replace(self.path, json.dumps({"paused": True, **end}).encode() + b"\n")
            else:
                self.path.unlink(missing_ok=True)
        except OSError as error:
            if until is not None:
                return f"{self.path} cannot be written: {error.strerror}; the next start will not be paused"
            return f"{self.path} cannot be removed: {error.strerror}; the next start will be paused"
        return ""


def end_of(value: object) -> float | None:
    """Return the end of a pause as written in JSON; infinity for none; None if the value is not a possible time."""
    match value:
        case None:
            return math.inf
        case bool():
            return None
        case int() | float() if 0 <= value < 1e11:
            return float(value)
    return None


def span_s(duration: str | None) -> float | None:
    """Return the seconds of ``--for``; None without it. Raises HomeError."""
    if duration is None:
        return None
    span = lifetime_s(duration)
    if not 0 < span <= LONGEST_S:
        raise HomeError(
            f"{duration[:40]!r} is not a duration of a pause.",
            f"Write it like {LIFETIME_UNITS}, at most 365d, or omit --for to pause until p2ptrain resume",
        )
    return span


def end_in_words(until: float, now: datetime) -> str:
    """Return `` until 18:00``, with the date unless it is today; empty for a pause without an end."""
    if not math.isfinite(until):
        return ""
    end = datetime.fromtimestamp(until)
    return f" until {end:%H:%M}" if end.date() == now.date() else f" until {end:%Y-%m-%d %H:%M}"
