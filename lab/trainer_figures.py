"""Figures of peers whose trainers died: how soon and how well they recovered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lab.artifacts import Artifacts

DIED, RETURNED = "trainer died", "trainer returned"
"""Notes of a peer whose trainer died, and of its next one."""


def trainer_figures(one: Artifacts, everybody: Sequence[Artifacts]) -> dict[str, Any]:
    """Return the figures of one peer; those of a peer whose trainer never died are 0 or None."""
    returned = one.last_of(RETURNED)
    others = [each for each in everybody if each is not one and each.peer.settings.lie is None]
    return {
        "trainers_died": one.count(DIED),
        "trainers_returned": one.count(RETURNED),
        "recovery_s": recovery_s(one),
        "exchanges_after_recovery": 0 if returned is None else sum(e.began > returned for e in one.exchanges()),
        "lost_by_others": sum(_is_about(note, "lost", one.peer_id) for each in others for note in each.notes),
    }


def recovery_s(one: Artifacts) -> float | None:
    """Return the longest time from a trainer's death to the next progress; infinite if the peer never trained again,
    None if no trainer died.
    """
    died = [float(note["time"]) for note in one.notes if note.get("kind") == DIED]
    return max((_recovery_s(one, each) for each in died), default=None)


def _recovery_s(one: Artifacts, died: float) -> float:
    returned = one.first(RETURNED, died)
    trained = None if returned is None else one.first("progress", returned)
    return float("inf") if trained is None else trained - died


def _is_about(note: Any, kind: str, peer: str) -> bool:
    return bool(note.get("kind") == kind and note.get("peer") == peer)
