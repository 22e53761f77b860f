"""Summary of a testnet in containers: the table and ``summary.json`` of a testnet without a scenario, with one more
key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from lab.inner_main import laid_out
from lab.script import ActKind, Script
from p2ptrain.base import files
from p2ptrain.base.errors import UserError
from peer.testnet import report as reports
from peer.testnet.report import TestnetReport
from peer.testnet.runner import Ending
from peer.testnet.watch import Tail


def write_summary(
    out: Path, script: Script, record: Mapping[str, Any], faults: Sequence[str], threads: int, console: Console
) -> list[str]:
    """Average the models of the peers that stayed, write ``out/summary.json`` and print the table.

    Returns the faults found here that are not in ``faults``.
    """
    plan = laid_out(out, script)
    lives: Mapping[str, list[Mapping[str, Any]]] = record["lives"]
    honest = {peer.name for peer in script.peers if peer.settings.lie is None}
    stayed = [each for each in plan.peers if each.name in honest and _stayed(lives.get(each.name, []))]
    measured, unmeasured = None, ""
    try:
        from peer.testnet.measure import measure

        measured = measure(plan.signed, [each.home for each in stayed], threads)
    except (UserError, RuntimeError) as error:  # RuntimeError: no peer stayed, so there are no weights
        unmeasured = str(error)
    report = TestnetReport(
        peers=reports.figures_of(stayed),
        solo={},
        ending=Ending(
            statuses={each.name: lives[each.name][-1]["status"] for each in stayed},
            troubles=tuple(faults),
            cut_short=record["cut_short"],
            wall_s=record["wall_s"],
        ),
        measured=measured,
        unmeasured=unmeasured,
        seed=plan.signed.manifest.run.seed,
    )
    back = rejoined(lives, out, _returning_peers(script))
    beyond = [each for each in report.failures if each not in faults]
    if back is False:
        beyond.append("a killed peer has not returned, or has exchanged nothing since")
    failures = [*faults, *beyond]
    document = reports.summary(report) | {"killed_peer_rejoined": back, "passed": not failures, "failures": failures}
    files.replace(out / "summary.json", (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
    console.print(reports.table(report))
    for line in reports.comparison(report):
        console.print(line, markup=False, soft_wrap=True)
    return beyond


def _returning_peers(script: Script) -> set[str]:
    """Return the peers that the script kills and starts again."""
    killed = {act.who: act.at_s for act in reversed(script.acts) if act.kind is ActKind.KILL}
    again = {act.who for act in script.acts if act.kind is ActKind.START and act.at_s > killed.get(act.who, math.inf)}
    return again - set(script.bootstraps)


def _stayed(lives: Sequence[Mapping[str, Any]]) -> bool:
    return bool(lives) and not lives[-1]["ended_by_us"]


def rejoined(lives: Mapping[str, Sequence[Mapping[str, Any]]], out: Path, returning: Collection[str]) -> bool | None:
    """Return whether every killed peer that was to return did so and exchanged afterwards; None if there was none."""
    killed = [
        name
        for name, those in lives.items()
        if name in returning and any(each["ended_by_us"] == ActKind.KILL for each in those)
    ]
    return all(_stayed(lives[name]) and _exchanged_lately(out / name) for name in killed) if killed else None


def _exchanged_lately(home: Path) -> bool:
    """Return whether the last process of a home exchanged. The line that a killed process was writing may be torn."""
    kinds = [note.get("kind") for note in Tail(home / "events.jsonl").read()]
    last = max((place for place, kind in enumerate(kinds) if kind == "listening"), default=0)
    return "exchanged" in kinds[last:]
