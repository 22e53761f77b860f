"""What a testnet in containers leaves beside its report: the table and the ``summary.json`` of a testnet without a
scenario, with one key more."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from p2ptrain import files
from p2ptrain.errors import UserError
from peer.lab.script import Do, Script
from peer.testnet import report as reports
from peer.testnet.conduct import Ending
from peer.testnet.plan import laid_out
from peer.testnet.report import Report


def conclude(
    out: Path, script: Script, course: Mapping[str, Any], faults: Sequence[str], threads: int, console: Console
) -> None:
    """Average the models of those who stayed, write ``out/summary.json``, show the table."""
    plan = laid_out(out, [part.name for part in script.parts])
    lives: Mapping[str, list[Mapping[str, Any]]] = course["lives"]
    honest = {part.name for part in script.parts if part.settings.lie is None}
    stayed = [each for each in plan.peers if each.name in honest and _stayed(lives.get(each.name, []))]
    measured, unmeasured = None, ""
    try:
        from peer.testnet.measure import measure

        measured = measure(plan.signed, [each.home for each in stayed], threads)
    except (UserError, RuntimeError) as error:  # RuntimeError: nobody stayed, so there is nothing to stack
        unmeasured = str(error)
    report = Report(
        peers=tuple(reports.outcome(each.name, each.home.summary) for each in stayed),
        solo=None,
        ending=Ending(
            statuses={each.name: lives[each.name][-1]["status"] for each in stayed},
            troubles=tuple(faults),
            cut_short=course["cut_short"],
            wall_s=course["wall_s"],
        ),
        measured=measured,
        unmeasured=unmeasured,
        seed=plan.signed.manifest.run.seed,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=reports.machine(),
    )
    document = reports.summary(report) | {"killed_peer_rejoined": rejoined(lives, out)}
    files.replace(out / "summary.json", (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
    console.print(reports.table(report))
    for line in reports.comparison(report):
        console.print(line, markup=False, soft_wrap=True)


def _stayed(lives: Sequence[Mapping[str, Any]]) -> bool:
    return bool(lives) and not lives[-1]["ended_by_us"]


def rejoined(lives: Mapping[str, Sequence[Mapping[str, Any]]], out: Path) -> bool | None:
    """Whether everybody who was killed and started again exchanged after that; None: nobody was."""
    killed = [
        name
        for name, those in lives.items()
        if any(each["ended_by_us"] == Do.KILL for each in those[:-1]) and _stayed(those)
    ]
    return all(_exchanged_lately(out / name) for name in killed) if killed else None


def _exchanged_lately(home: Path) -> bool:
    """In its last process."""
    notes = [line for line in (home / "events.jsonl").read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    kinds = [json.loads(line).get("kind") for line in notes]
    last = max((place for place, kind in enumerate(kinds) if kind == "listening"), default=0)
    return "exchanged" in kinds[last:]
