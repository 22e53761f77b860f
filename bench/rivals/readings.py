"""Figures of a run from its logs. Pure, except for ``notes_of``."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.rivals.cases import RivalRecord

LADDER = (4.5, 4.0, 3.5, 3.25, 3.0, 2.9, 2.8, 2.7, 2.6, 2.5, 2.4, 2.3, 2.2, 2.1, 2.0, 1.9, 1.8, 1.7)
"""Training losses, nats per byte."""
STALL_WINDOW_S = 40.0
"""Time after the kill in which stalls are looked for."""
WIDTH_S = 10.0
"""Window over which losses are averaged before comparison with the ladder."""

Notes = Sequence[Mapping[str, Any]]


def notes_of(home: Path) -> list[dict[str, Any]]:
    """Return the event log of a peer; empty if there is none."""
    try:
        lines = (home / "events.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [json.loads(line) for line in lines if line.endswith("}")]


def figures(
    record: RivalRecord, notes: Mapping[str, Notes], summaries: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the figures of one run. ``summaries`` are of peers that stayed to the end.

    - ``bytes_per_outer_step``: sent by a peer's line, mean over peers, before the kill
    - ``outer_steps_per_minute``, ``tokens_per_s``: mean over peers, before the kill
    - ``stall_s``: the longest silence of a survivor's progress notes after the kill, less its median silence before
    - ``newcomer_s``: from its start to its first inner step with the others' weights; None if it never did
    - ``blocked_share``: largest of peers that stayed, over the whole session
    - ``held_out_loss``: mean at the end of peers that were there from second 0
    - ``seconds_to:LOSS``: from second 0 until the mean training loss reached it
    """
    first = [who for who in notes if who != record.newcomer]
    survivors = [who for who in first if who != record.victim]
    calm = {who: _between(notes[who], record.zero, record.killed) for who in first}
    steps = {who: seen[-1]["step"] - seen[0]["step"] for who, seen in calm.items() if len(seen) > 1}
    tokens = {who: seen[-1]["tokens"] - seen[0]["tokens"] for who, seen in calm.items() if len(seen) > 1}
    minutes = (record.killed - record.zero) / 60
    sent = {who: _sent(record.traffic.get(who, ()), record.zero, record.killed) for who in first}
    losses = [summaries[who]["val_loss_last"] for who in survivors if who in summaries]
    blocked = [summaries[who]["blocked_fraction"] for who in survivors if who in summaries]
    return {
        "bytes_per_outer_step": sum(sent.values()) / max(sum(steps.values()), 1),
        "outer_steps_per_minute": statistics.fmean(steps.values()) / minutes,
        "tokens_per_s": statistics.fmean(tokens.values()) / (60 * minutes),
        "stall_s": max(_stall(notes[who], record) for who in survivors),
        "newcomer_s": _newcomer_s(notes.get(record.newcomer, ()), record.came),
        "blocked_share": max(blocked, default=None),
        "held_out_loss": statistics.fmean(losses) if losses else None,
        **{f"seconds_to:{rung:g}": at for rung, at in _seconds_to(record, notes, survivors).items()},
    }


def _progress(notes: Notes) -> list[Mapping[str, Any]]:
    return [note for note in notes if note["kind"] == "progress"]


def _between(notes: Notes, begin: float, end: float) -> list[Mapping[str, Any]]:
    return [note for note in _progress(notes) if begin <= note["time"] <= end]


def _sent(seen: Sequence[tuple[float, int]], begin: float, end: float) -> int:
    within = [count for at, count in seen if begin <= at <= end]
    return within[-1] - within[0] if within else 0


def _stall(notes: Notes, record: RivalRecord) -> float:
    before = [note["time"] for note in _between(notes, record.zero, record.killed)]
    after = [note["time"] for note in _progress(notes) if record.killed <= note["time"]]
    until = min(record.killed + STALL_WINDOW_S, record.ended)
    points = [*before[-1:], *(at for at in after if at <= until)]
    points.append(next((at for at in after if at > until), until))
    usual = statistics.median(b - a for a, b in itertools.pairwise(before))
    return max(b - a for a, b in itertools.pairwise(points)) - usual


def _newcomer_s(notes: Notes, came: float) -> float | None:
    caught_up = next((note["time"] for note in notes if note["kind"] == "caught up"), None)
    if caught_up is None:
        return None
    steps = (note["time"] for note in _progress(notes) if note["time"] >= caught_up)
    first = next(steps, None)
    return None if first is None else first - came


def _seconds_to(record: RivalRecord, notes: Mapping[str, Notes], survivors: Sequence[str]) -> dict[float, float]:
    """Return, by rung, the end of the first window whose mean loss is at most the rung."""
    seen = sorted(
        (note["time"] - record.zero, note["loss"])
        for who in survivors
        for note in _between(notes[who], record.zero, record.ended)
        if "loss" in note
    )
    found: dict[float, float] = {}
    windows = int((record.ended - record.zero) / WIDTH_S)
    for number in range(windows):
        begin, end = number * WIDTH_S, (number + 1) * WIDTH_S
        within = [loss for at, loss in seen if begin <= at < end]
        if within:
            for rung in LADDER:
                if rung not in found and statistics.fmean(within) <= rung:
                    found[rung] = end
    return found
