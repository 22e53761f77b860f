"""A report for a person: what became of each group, and how two simulations differ."""

from __future__ import annotations

from rich.table import Table

from p2ptrain.sim.report import Figures, Point, Report

ROWS: tuple[tuple[str, str, str], ...] = (
    ("peers", "peers", ",.0f"),
    ("outer steps", "outer_steps", ",.0f"),
    ("utilization", "utilization", ".4f"),
    ("training loss", "loss", ".4f"),
    ("exchanges made", "exchanges", ",.0f"),
    ("exchanges failed", "exchanges_failed", ",.0f"),
    ("offers declined", "offers_declined", ",.0f"),
    ("offers unanswered", "offers_unanswered", ",.0f"),
    ("solo share", "solo_share", ".4f"),
    ("weights pulled", "pulls", ",.0f"),
    ("bits a parameter and outer step", "bits_per_parameter", ".3f"),
)
"""What is shown of ``Figures``: words, field, format."""

POINTS: tuple[tuple[str, str], ...] = (
    ("validation loss", "validation"),
    ("validation loss of the mean", "validation_of_mean"),
    ("disagreement", "disagreement"),
)
"""What is shown of the curve's last ``Point``."""


def summary(report: Report) -> Table:
    """All groups side by side."""
    cost = report.cost
    table = Table(
        title=f"{report.title}: {report.simulated_s:,.0f} simulated seconds, {report.ending}",
        caption=f"{report.events:,} events in {cost.wall_s:.1f} s, {cost.peak_memory_bytes / 1e6:,.0f} MB at most",
    )
    table.add_column("")
    columns: list[tuple[str, Figures]] = [("all", report.overall)]
    columns += report.groups.items() if len(report.groups) > 1 else []
    for name, _ in columns:
        table.add_column(name, justify="right")
    for words, field, form in ROWS:
        table.add_row(words, *(_shown(getattr(figures, field), form) for _, figures in columns))
    table.add_row("MB up per peer", *(f"{figures.up.total / 1e6:,.3f}" for _, figures in columns))
    table.add_row("MB down per peer", *(f"{figures.down.total / 1e6:,.3f}" for _, figures in columns))
    last = report.curve[-1]
    for words, field in POINTS:
        groups = [last.groups.get(name) if field == "validation" else None for name, _ in columns[1:]]
        if getattr(last, field) is not None:
            table.add_row(words, *(_shown(value, ".4f") for value in [getattr(last, field), *groups]))
    return table


def comparison(report: Report, other: Report) -> Table:
    """This simulation's figures over those of another."""
    table = Table(title=f"{report.title} against {other.title}")
    for name in ("", report.title, other.title, "ratio"):
        table.add_column(name, justify="right" if name else "left")
    pairs = [(words, getattr(report.overall, f), getattr(other.overall, f), form) for words, f, form in ROWS]
    pairs += [("MB up per peer", report.overall.up.total / 1e6, other.overall.up.total / 1e6, ",.3f")]
    pairs += [("simulated seconds", report.simulated_s, other.simulated_s, ",.1f")]
    pairs += [(words, _last(report, field), _last(other, field), ".4f") for words, field in POINTS]
    for words, mine, theirs, form in pairs:
        ratio = f"{mine / theirs:.4f}" if mine is not None and theirs else "-"
        table.add_row(words, _shown(mine, form), _shown(theirs, form), ratio)
    return table


def _last(report: Report, field: str) -> float | None:
    last: Point = report.curve[-1]
    value: float | None = getattr(last, field)
    return value


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
