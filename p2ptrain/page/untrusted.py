"""Strangers' words and numbers, made fit to be shown: bounded, printable, finite. Pure."""

from __future__ import annotations

MOST_NAME = 32
"""As a presence record's nickname."""
MOST_LINE = 240
MOST_SAMPLE = 2000
"""Characters."""


def words(text: object, most: int = MOST_LINE) -> str:
    """One line of printable text, cut: from a stranger it may hold anything."""
    line = "".join(each if each.isprintable() else " " for each in str(text)[: 4 * most])
    return " ".join(line.split())[:most]


def paragraph(text: str, most: int = MOST_SAMPLE) -> str:
    """Printable text of several lines, cut; no blank ones at its beginning."""
    return "".join(each if each.isprintable() or each == "\n" else " " for each in text[:most]).lstrip("\n")


def number(value: object, low: float = 0.0, high: float = 1e18) -> float | None:
    """A stranger's number within bounds; None where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if low <= value <= high else None  # also refuses nan, inf, and ints that no float holds
