"""Figures of peers on several devices: ranks that failed, and how soon and how well the peer recovered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lab.artifacts import Artifacts

FAILED, REPLACED = "rank failed", "ranks replaced"
"""Notes of a peer that trains on several devices."""


def team_figures(one: Artifacts, everybody: Sequence[Artifacts]) -> dict[str, Any]:
    """Return the figures of one peer; those of a peer whose ranks never failed are 0 or None."""
    replaced = one.last_of(REPLACED)
    others = [each for each in everybody if each is not one and each.peer.settings.lie is None]
    return {
        "ranks_failed": one.count(FAILED),
        "ranks_replaced": one.count(REPLACED),
        "recovery_s": recovery_s(one),
        "exchanges_after_recovery": 0 if replaced is None else sum(e.began > replaced for e in one.exchanges()),
        "lost_by_others": sum(_is_about(note, "lost", one.peer_id) for each in others for note in each.notes),
    }


def recovery_s(one: Artifacts) -> float | None:
    """Return the longest time from the notice that a rank failed to the next inner step, without the seconds in which
    new processes imported their libraries. None if no rank failed; infinite if the peer never trained again.
    """
    found = [_recovery_s(one, float(note["time"])) for note in one.notes if note.get("kind") == FAILED]
    return max(found, default=None)


def _recovery_s(one: Artifacts, failed: float) -> float:
    replaced = [note for note in one.notes if note.get("kind") == REPLACED and float(note["time"]) >= failed]
    trained = None if not replaced else one.first("progress", float(replaced[0]["time"]))
    if trained is None:
        return float("inf")
    return trained - failed - float(replaced[0].get("importing_s", 0.0))


def _is_about(note: Any, kind: str, peer: str) -> bool:
    return bool(note.get("kind") == kind and note.get("peer") == peer)
