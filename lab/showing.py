"""A verdict on the terminal: who did what, what happened, and which limits were kept."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from lab import report as reports
from lab.report import ScenarioVerdict
from p2ptrain.base.text import PLAIN_WIDTH


def terminal() -> Console:
    """Wide enough for tables, also where it is none."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def show(verdict: ScenarioVerdict, out: Path, console: Console) -> None:
    """Print all of it; ``out`` is where the files are."""
    table = Table(title=f"{verdict.scenario}, stage {verdict.stage}")
    for heading in ("", "loss", "tokens", "exchanges", "failed", "blocked", "ended"):
        table.add_column(heading, justify="left" if heading in ("", "ended") else "right")
    for name, each in verdict.figures["peers"].items():
        loss, blocked = each["loss"], each["blocked_share"]
        table.add_row(
            name,
            "" if loss is None else f"{loss:.3f}",
            "" if each["tokens"] is None else f"{each['tokens']:,}",
            str(each["exchanges_made"]),
            str(each["exchanges_failed"]),
            "" if blocked is None else f"{100 * blocked:.2f} %",
            ", ".join(map(str, each["exits"])) or "never came",
        )
    console.print(table)
    for line in [*reports.grown(verdict.figures), *verdict.course]:
        console.print(line, markup=False, soft_wrap=True)
    for name, limit in verdict.limits.items():
        bounds = ", ".join(
            f"{word.replace('_', ' ')} {limit[word]:g}" for word in ("at_least", "at_most") if word in limit
        )
        found = "none" if limit["found"] is None else f"{limit['found']:g}"
        console.print(f"{'kept  ' if limit['kept'] else 'MISSED'} {name}: {found} ({bounds})", markup=False)
    console.print(f"figures in {out / 'report.json'}", markup=False, soft_wrap=True)
    if not verdict.passed:
        console.print("FAILED:", style="bold red")
        for fault in verdict.faults:
            console.print(f"- {fault}", markup=False, soft_wrap=True)
        console.print(f"What each process printed: {out}/*/output.log", markup=False, soft_wrap=True)
