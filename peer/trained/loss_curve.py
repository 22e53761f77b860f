"""Held-out losses that a peer noted while it trained, read back from its event log."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOST_LINE_BYTES = 1 << 16
"""Longest line that is read; notes are far shorter."""

KINDS = ("started", "held out", "final loss")
"""Kinds of notes that carry a held-out loss."""


@dataclass(frozen=True, slots=True)
class LossReading:
    """Held-out loss at one point of the run."""

    progress: float
    """Tokens of all peers, as the peer estimated them."""
    loss: float
    """Nats per token."""
    tokens: int
    """Held-out tokens that were read."""


def read_curve(events: Path) -> list[LossReading]:
    """Return the readings in an event log and in its older part, by progress; of several at one point the longest.

    Lines that are torn or no notes are skipped. A log that cannot be read has no readings.
    """
    found: dict[float, LossReading] = {}
    for path in (events.with_suffix(".1.jsonl"), events):
        for reading in _readings(path):
            known = found.get(reading.progress)
            if known is None or reading.tokens >= known.tokens:
                found[reading.progress] = reading
    return [found[progress] for progress in sorted(found)]


def _readings(path: Path) -> Iterator[LossReading]:
    try:
        with path.open("rb") as file:
            while line := file.readline(MOST_LINE_BYTES):
                if b'"loss"' in line and (reading := _reading(line)) is not None:
                    yield reading
    except OSError:
        return


def _reading(line: bytes) -> LossReading | None:
    try:
        note = json.loads(line)
        if note["kind"] not in KINDS:
            return None
        reading = LossReading(float(note["progress"]), float(note["loss"]), int(note["read"]))
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return reading if math.isfinite(reading.loss) and math.isfinite(reading.progress) and reading.tokens > 0 else None


def thinned(curve: list[LossReading], most: int) -> list[LossReading]:
    """Return at most ``most`` readings, evenly spaced, the first and the last among them."""
    if len(curve) <= most:
        return curve
    places = [round(place * (len(curve) - 1) / (most - 1)) for place in range(most)]
    return [curve[place] for place in places]
