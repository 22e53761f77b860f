"""What one peer left in its home: its event log, its summary, and what it said to its owner. Without torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from peer.lab.script import Part

Note = Mapping[str, Any]

LAST = 10
"""Exchanges whose distances are looked at, at the end: of the order of the outer steps within which a swarm that was
disturbed must be as it was."""

TOLD: Mapping[str, str] = {
    "told_not_saved": r"\[save\] NOT saved, ",
    "told_daemon": r"\[peers\] the network daemon died ",
    "told_wrong_clock": r"\[peers\] this machine's clock is .* (fast|slow) by ",
}
"""Figures, and the words of ``peer.lines`` that each looks for in what a peer printed."""


@dataclass(frozen=True, slots=True)
class Left:
    """What one peer left in its home."""

    part: Part
    peer_id: str
    notes: Sequence[Note]
    """Its whole event log, of all its processes."""
    summary: Mapping[str, Any] | None
    """Of its last process; None where that was killed, or never was."""
    said: frozenset[str] = frozenset()
    """Which of TOLD its processes printed."""

    def count(self, kind: str) -> int:
        return sum(note.get("kind") == kind for note in self.notes)

    def since(self, kind: str, time: float) -> int:
        """Notes of this kind that came after that (seconds since 1970)."""
        return sum(note.get("kind") == kind and float(note.get("time", 0.0)) >= time for note in self.notes)

    def most(self, kind: str, field: str) -> float | None:
        """The largest that its notes of this kind say of a field; None without any."""
        return max((note[field] for note in self.notes if note.get("kind") == kind and field in note), default=None)

    def saved_since(self, time: float) -> bool:
        """Whether a checkpoint was written after that in mid-run: the one that everybody writes at the end is none."""
        parted = min((float(note["time"]) for note in self.notes if _ends(note, time)), default=math.inf)
        return any(note.get("kind") == "saved" and time <= float(note.get("time", 0.0)) < parted for note in self.notes)

    def last_distance(self) -> float | None:
        """Median of ||theirs - ours|| / ||ours|| over its last exchanges; None without any."""
        found = [
            float(note["distance"]) for note in self.notes if note.get("kind") == "exchanged" and "distance" in note
        ]
        return median(found[-LAST:]) if found else None

    def exchanges(self) -> list[Exchange]:
        """All of them, in order."""
        return [_exchange(note) for note in self.notes if note.get("kind") == "exchanged" and "time" in note]

    def trained_at(self) -> float:
        """When it reached the run's end and began to gossip (seconds since 1970); never: infinity."""
        return min((float(note["time"]) for note in self.notes if _is(note, "trained")), default=math.inf)

    def step_at(self, time: float) -> int | None:
        """The outer step that it was in then, as far as it noted; None: it trained later."""
        steps = [int(note["step"]) for note in self.notes if _is(note, "progress") and note["time"] <= time]
        return steps[-1] if steps else None

    def learning_rates(self) -> list[tuple[float, float]]:
        """When (seconds since 1970), and the inner learning rate that it trained with then."""
        notes = [note for note in self.notes if _is(note, "progress") and "learning_rate" in note]
        return [(float(note["time"]), float(note["learning_rate"])) for note in notes]

    @property
    def last_time(self) -> float:
        """Of its last note (seconds since 1970); 0 without any."""
        return max((float(note.get("time", 0.0)) for note in self.notes), default=0.0)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One exchange, as one of the two noted it."""

    began: float
    """Seconds since 1970."""
    ended: float
    partner: str
    distance: float
    """||theirs - ours|| / ||ours|| before it."""
    is_relayed: bool


def read_left(part: Part, peer_id: str, home: Path) -> Left:
    """What lies in a home, its times as of a clock that is right; a peer that never came left nothing."""
    notes = [note for line in _bytes(home / "events.jsonl").splitlines() if isinstance(note := _parsed(line), dict)]
    for note in notes:
        if isinstance(note.get("time"), int | float):
            note["time"] -= part.settings.clock_off_s
    summary = _parsed(_bytes(home / "summary.json"))
    words = _bytes(home / "output.log").decode("utf-8", errors="replace")
    said = frozenset(name for name, pattern in TOLD.items() if re.search(pattern, words))
    return Left(part, peer_id, notes, summary if isinstance(summary, dict) else None, said)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:  # the last line of a killed process may be torn
        return None


def _is(note: Note, kind: str) -> bool:
    return note.get("kind") == kind and "time" in note


def _ends(note: Note, time: float) -> bool:
    """It is asked to leave, or at the run's end."""
    return (_is(note, "stopping") or _is(note, "trained")) and float(note["time"]) >= time


def _exchange(note: Note) -> Exchange:
    ended = float(note["time"])
    return Exchange(
        began=ended - float(note.get("seconds", 0.0)),
        ended=ended,
        partner=str(note.get("peer", "")),
        distance=float(note.get("distance", 0.0)),
        is_relayed=bool(note.get("relay")),
    )
