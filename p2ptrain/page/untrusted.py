"""Sanitizing of strangers' text and numbers for display: bounded, printable, finite. Pure."""

from __future__ import annotations

MOST_NAME = 32
"""Maximum characters of a name, as of a presence record's nickname."""
MOST_LINE = 240
MOST_SAMPLE = 2000


def words(text: object, most: int = MOST_LINE) -> str:
    """Return one line of printable text, truncated."""
    line = "".join(each if each.isprintable() else " " for each in str(text)[: 4 * most])
    return " ".join(line.split())[:most]


def paragraph(text: str, most: int = MOST_SAMPLE) -> str:
    """Return printable text of several lines, truncated, without leading blank lines."""
    return "".join(each if each.isprintable() or each == "\n" else " " for each in text[:most]).lstrip("\n")


def number(value: object, low: float = 0.0, high: float = 1e18) -> float | None:
    """Return a stranger's number if it is one and within bounds, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if low <= value <= high else None  # also rejects nan, inf and integers beyond a float's range
