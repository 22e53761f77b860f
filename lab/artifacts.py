"""What one peer left in its home: its event log, its summary, and what it said to its owner. Without torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from lab.script import Part

Note = Mapping[str, Any]

LAST = 10
"""Exchanges whose distances are looked at, at the end: of the order of the outer steps within which a swarm that was
disturbed must be as it was."""

TOLD: Mapping[str, str] = {
    "told_not_saved": r"\[save\] NOT saved, ",
    "told_daemon": r"\[peers\] the network daemon died ",
    "told_banned": r"\[join\] others no longer exchange with this peer: the run's author has banned this peer",
    "told_not_invited": r"This run does not let this peer in: this peer shows no invite",
    "told_wrong_clock": r"\[peers\] this machine's clock is .* (fast|slow) by ",
}
"""Figures, and the words of ``peer.messages`` that each looks for in what a peer printed."""


@dataclass(frozen=True, slots=True)
class Artifacts:
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

    def first(self, kind: str, time: float) -> float | None:
        """When the first note of this kind came after that; None: none did."""
        times = (float(note["time"]) for note in self.notes if _is(note, kind))
        return min((each for each in times if each >= time), default=None)

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

    def exchanges(self) -> list[ExchangeArtifact]:
        """All of them, in order."""
        return [_exchange(note) for note in self.notes if note.get("kind") == "exchanged" and "time" in note]

    def broken(self) -> list[ExchangeArtifact]:
        """Those that came to nothing after both had agreed, in order."""
        return [_exchange(note) for note in self.notes if _is(note, "failed") and note.get("seconds")]

    def trained_at(self) -> float:
        """When it reached the run's end and began to gossip (seconds since 1970); never: infinity."""
        return min((float(note["time"]) for note in self.notes if _is(note, "trained")), default=math.inf)

    def progress(self) -> list[Progress]:
        """All that it told of its training, in order."""
        return [_progress(note) for note in self.notes if _is(note, "progress")]

    def step_at(self, time: float) -> int | None:
        """The outer step that it was in then, as far as it noted; None: it trained later."""
        steps = [each.step for each in self.progress() if each.time <= time]
        return steps[-1] if steps else None

    def learning_rates(self) -> list[tuple[float, float]]:
        """When (seconds since 1970), and the inner learning rate that it trained with then."""
        notes = [note for note in self.notes if _is(note, "progress") and "learning_rate" in note]
        return [(float(note["time"]), float(note["learning_rate"])) for note in notes]

    def steps(self) -> int:
        """Outer steps between its first word of them and its last; those that others' weights carried it over, too."""
        told = self.progress()
        return told[-1].step - told[0].step if told else 0

    def tokens_between(self, first: float, last: float) -> int:
        """Tokens it trained on between two moments (seconds since 1970), and for some seconds about them.

        Its last word before and its first after count: what it said in between is lost where its disk was full.
        """
        told = self.progress()
        begins = max((place for place, each in enumerate(told) if each.time <= first), default=0)
        ends = next((place for place, each in enumerate(told) if each.time >= last), len(told) - 1)
        steps = pairwise(each.tokens for each in told[begins : ends + 1])
        return sum(max(after - before, 0) for before, after in steps)  # a process that begins anew counts from less

    def uplink_share(self) -> float | None:
        """Payload bytes that its exchanges sent while it trained, over what its line carries upward from the first of
        them to the end of training; None where it has no rate, or made none."""
        over, mbit_s = min(self.trained_at(), self.last_time), self.part.settings.up_mbit_s
        made = [each for each in self.exchanges() if each.ended <= over]
        seconds = over - min((each.began for each in made), default=over)
        if mbit_s is None or seconds <= 0:
            return None
        return 8 * sum(each.sent_bytes for each in made) / (mbit_s * 1e6 * seconds)

    @property
    def last_time(self) -> float:
        """Of its last note (seconds since 1970); 0 without any."""
        return max((float(note.get("time", 0.0)) for note in self.notes), default=0.0)


@dataclass(frozen=True, slots=True)
class ExchangeArtifact:
    """One exchange, as one of the two noted it."""

    began: float
    """Seconds since 1970."""
    ended: float
    partner: str
    distance: float
    """||theirs - ours|| / ||ours|| before it."""
    is_relayed: bool
    sent_bytes: int
    """Of its payload."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One peer's word of its training."""

    time: float
    """Seconds since 1970."""
    step: int
    """Outer steps done."""
    tokens: int
    loss: float | None
    """Mean training loss of the last complete inner phase; None before the first."""


def read_left(part: Part, peer_id: str, home: Path) -> Artifacts:
    """What lies in a home, its times as of a clock that is right; a peer that never came left nothing."""
    notes = [note for line in _bytes(home / "events.jsonl").splitlines() if isinstance(note := _parsed(line), dict)]
    for note in notes:
        if isinstance(note.get("time"), int | float):
            note["time"] -= part.settings.clock_off_s
    summary = _parsed(_bytes(home / "summary.json"))
    words = _bytes(home / "output.log").decode("utf-8", errors="replace")
    said = frozenset(name for name, pattern in TOLD.items() if re.search(pattern, words))
    return Artifacts(part, peer_id, notes, summary if isinstance(summary, dict) else None, said)


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


def _exchange(note: Note) -> ExchangeArtifact:
    ended = float(note["time"])
    return ExchangeArtifact(
        began=ended - float(note.get("seconds", 0.0)),
        ended=ended,
        partner=str(note.get("peer", "")),
        distance=float(note.get("distance", 0.0)),
        is_relayed=bool(note.get("relay")),
        sent_bytes=int(note.get("sent_bytes", 0)),
    )


def _progress(note: Note) -> Progress:
    loss = note.get("loss")
    return Progress(
        float(note["time"]), int(note.get("step", 0)), int(note.get("tokens", 0)), None if loss is None else float(loss)
    )
