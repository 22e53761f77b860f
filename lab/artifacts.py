"""Artifacts: the files that one peer leaves in its home. Event log, summary and printed output."""

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

from lab.script import ScriptedPeer
from p2ptrain.admission import Refusal

Note = Mapping[str, Any]

LAST = 10
"""Number of exchanges, at the end, whose distances count: roughly the outer steps in which a disturbed swarm must
recover."""

TOLD_BY_NOTE: Mapping[str, tuple[str, str]] = {
    "told_daemon": ("p2pd died", ""),
    "told_banned": ("put out", Refusal.BANNED),
    "told_wrong_clock": ("wrong clock", ""),
    "told_clock_jumped": ("clock jumped", ""),
    "told_network_changed": ("network changed", ""),
    "told_same_identity": ("same identity", ""),
    "told_narrow_path": ("narrow path", ""),
}
"""Figures of what owners were told, with the kind of note that says so and the reason in it, if one is required."""

TOLD_BY_OUTPUT: Mapping[str, str] = {
    "told_not_saved": r"\[save\] NOT saved, ",
    "told_not_invited": rf"This run does not let this peer in: {Refusal.NO_INVITE}",
}
"""Figures of what owners were told, with a pattern for printed output where the event log may lack it: a failing disk
holds the log, too, and a peer that is not admitted ends with an error instead of a note."""

TOLD = (*TOLD_BY_OUTPUT, *TOLD_BY_NOTE)
"""All figures of what owners were told."""


@dataclass(frozen=True, slots=True)
class Artifacts:
    """Files that one peer left in its home."""

    peer: ScriptedPeer
    peer_id: str
    notes: Sequence[Note]
    """Event log of all its processes."""
    summary: Mapping[str, Any] | None
    """Summary of its last process; None if that was killed or never ran."""
    said: frozenset[str] = frozenset()
    """Figures of TOLD that hold for its processes."""

    def count(self, kind: str) -> int:
        return sum(note.get("kind") == kind for note in self.notes)

    def since(self, kind: str, time: float) -> int:
        """Count the notes of a kind at or after a time (seconds since 1970)."""
        return sum(note.get("kind") == kind and float(note.get("time", 0.0)) >= time for note in self.notes)

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        """Return the notes of a kind, in order."""
        return [note for note in self.notes if _is(note, kind)]

    def first(self, kind: str, time: float) -> float | None:
        """Return the time of the first note of a kind at or after a time; None without one."""
        times = (float(note["time"]) for note in self.notes if _is(note, kind))
        return min((each for each in times if each >= time), default=None)

    def last_of(self, kind: str) -> float | None:
        """Return the time of the last note of a kind; None without one."""
        return max((float(note["time"]) for note in self.notes if _is(note, kind)), default=None)

    def most(self, kind: str, field: str) -> float | None:
        """Return the largest value of a field in notes of a kind; None without any."""
        return max((note[field] for note in self.notes if note.get("kind") == kind and field in note), default=None)

    def saved_since(self, time: float) -> bool:
        """Return whether a checkpoint was written after a time and before the peer began to stop, when every peer
        writes one.
        """
        parted = min((float(note["time"]) for note in self.notes if _ends(note, time)), default=math.inf)
        return any(note.get("kind") == "saved" and time <= float(note.get("time", 0.0)) < parted for note in self.notes)

    def last_distance(self) -> float | None:
        """Return the median of ||theirs - ours|| / ||ours|| over the last exchanges; None without any."""
        found = [
            float(note["distance"]) for note in self.notes if note.get("kind") == "exchanged" and "distance" in note
        ]
        return median(found[-LAST:]) if found else None

    def exchanges(self) -> list[ExchangeArtifact]:
        """Return all completed exchanges, in order."""
        return [_exchange(note) for note in self.notes if note.get("kind") == "exchanged" and "time" in note]

    def broken(self) -> list[ExchangeArtifact]:
        """Return the exchanges that failed after both sides had agreed, in order."""
        return [_exchange(note) for note in self.notes if _is(note, "failed") and note.get("seconds")]

    def trained_at(self) -> float:
        """Return when the peer reached the run's end and began the final gossip (seconds since 1970); infinity if
        never.
        """
        return min((float(note["time"]) for note in self.notes if _is(note, "trained")), default=math.inf)

    def progress(self) -> list[Progress]:
        """Return the progress notes, in order."""
        return [_progress(note) for note in self.notes if _is(note, "progress")]

    def step_at(self, time: float) -> int | None:
        """Return the outer step of the last progress note up to a time; None without one."""
        steps = [each.step for each in self.progress() if each.time <= time]
        return steps[-1] if steps else None

    def learning_rates(self) -> list[tuple[float, float]]:
        """Return pairs of time (seconds since 1970) and inner learning rate."""
        notes = [note for note in self.notes if _is(note, "progress") and "learning_rate" in note]
        return [(float(note["time"]), float(note["learning_rate"])) for note in notes]

    def steps(self) -> int:
        """Return the outer steps from the first progress note to the last, including those skipped by a weight
        download.
        """
        notes = self.progress()
        return notes[-1].step - notes[0].step if notes else 0

    def tokens_between(self, first: float, last: float) -> int:
        """Return the tokens trained on between two times (seconds since 1970), to within a few seconds.

        The last note before and the first note after the interval count: notes in between are lost if the disk is full.
        """
        notes = self.progress()
        begins = max((place for place, each in enumerate(notes) if each.time <= first), default=0)
        ends = next((place for place, each in enumerate(notes) if each.time >= last), len(notes) - 1)
        steps = pairwise(each.tokens for each in notes[begins : ends + 1])
        return sum(max(after - before, 0) for before, after in steps)  # a new process may count from less

    def uplink_share(self) -> float | None:
        """Return the payload bytes sent while training over what the uplink carries from the first exchange to the end
        of training.

        None if the link has no rate or the peer made no exchange.
        """
        over, mbit_s = min(self.trained_at(), self.last_time), self.peer.settings.up_mbit_s
        made = [each for each in self.exchanges() if each.ended <= over]
        seconds = over - min((each.began for each in made), default=over)
        if mbit_s is None or seconds <= 0:
            return None
        return 8 * sum(each.sent_bytes for each in made) / (mbit_s * 1e6 * seconds)

    @property
    def last_time(self) -> float:
        """Time of the last note (seconds since 1970); 0 without any."""
        return max((float(note.get("time", 0.0)) for note in self.notes), default=0.0)


@dataclass(frozen=True, slots=True)
class ExchangeArtifact:
    """One exchange, as one of its two peers noted it."""

    began: float
    """Seconds since 1970."""
    ended: float
    partner: str
    distance: float
    """||theirs - ours|| / ||ours|| before the exchange."""
    is_relayed: bool
    is_punched: bool
    """Whether it went directly between two peers that nobody can dial."""
    sent_bytes: int
    """Bytes of the sent payload."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One progress note of a peer."""

    time: float
    """Seconds since 1970."""
    step: int
    """Outer steps done."""
    tokens: int
    loss: float | None
    """Mean training loss of the last complete inner phase; None before the first."""


def read_artifacts(peer: ScriptedPeer, peer_id: str, home: Path) -> Artifacts:
    """Read a home and correct its times by the peer's clock error; the home of a peer that never started is empty."""
    notes = [note for line in _bytes(home / "events.jsonl").splitlines() if isinstance(note := _parsed(line), dict)]
    for note in notes:
        if isinstance(note.get("time"), int | float):
            note["time"] -= peer.settings.clock_off_s
    summary = _parsed(_bytes(home / "summary.json"))
    words = _bytes(home / "output.log").decode("utf-8", errors="replace")
    printed = {name for name, pattern in TOLD_BY_OUTPUT.items() if re.search(pattern, words)}
    noted = {name for name, sought in TOLD_BY_NOTE.items() if any(_tells(note, *sought) for note in notes)}
    said = frozenset(printed | noted)
    return Artifacts(peer, peer_id, notes, summary if isinstance(summary, dict) else None, said)


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


def _tells(note: Note, kind: str, why: str) -> bool:
    return note.get("kind") == kind and (not why or note.get("why") == why)


def _ends(note: Note, time: float) -> bool:
    """Return whether a note says that the peer was asked to leave or reached the run's end."""
    return (_is(note, "stopping") or _is(note, "trained")) and float(note["time"]) >= time


def _exchange(note: Note) -> ExchangeArtifact:
    ended = float(note["time"])
    return ExchangeArtifact(
        began=ended - float(note.get("seconds", 0.0)),
        ended=ended,
        partner=str(note.get("peer", "")),
        distance=float(note.get("distance", 0.0)),
        is_relayed=bool(note.get("relay")),
        is_punched=bool(note.get("punched")),
        sent_bytes=int(note.get("sent_bytes", 0)),
    )


def _progress(note: Note) -> Progress:
    loss = note.get("loss")
    return Progress(
        float(note["time"]), int(note.get("step", 0)), int(note.get("tokens", 0)), None if loss is None else float(loss)
    )
