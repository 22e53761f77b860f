"""Whether a lie reached anybody: what honest peers noted of a peer's conduct, and what it noted of its lies. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lab.artifacts import Artifacts, Note

CONDUCT: Mapping[str, str] = {
    "broke protocol": "",
    "clipped": "",
    "failed": "^no answer for |sends slower than |sent nothing for too long"
    "|nothing in common with ours|not where it said they are|too far ahead of ours",
    "refused": "^implausible progress",
}
"""Kinds of notes that name a peer, and what their reasons hold where its conduct is to blame. Who is busy, cannot be
reached or broke off, as whoever leaves does, is blamed for nothing here."""


def noticing(one: Artifacts, everybody: Sequence[Artifacts]) -> dict[str, int]:
    """Two figures of one peer.

    ``noticed``: notes in which an honest peer blames it for its conduct; of one that is honest itself, too. ``lied``:
    lies that honest peers drop without a note, as it counted itself when they went out.
    """
    honest = [each for each in everybody if each is not one and each.part.settings.lie is None]
    blamed = sum(_blames(note, one.peer_id) for each in honest for note in each.notes)
    lied = sum(int(note.get("times", 0)) for note in one.notes if note.get("kind") == "lied")
    return {"noticed": blamed, "lied": lied}


def _blames(note: Note, peer: str) -> bool:
    if note.get("peer") != peer or (words := CONDUCT.get(note.get("kind", ""))) is None:
        return False
    return re.search(words, str(note.get("why", ""))) is not None
