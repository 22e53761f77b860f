"""Tables of a report: results of each group, and differences between two simulations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table
from rich.text import Text

from p2ptrain.page.untrusted import words
from sim.report import GroupFigures, SimulationReport

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
    ("bits per parameter and outer step", "bits_per_parameter", ".3f"),
)
"""Rows of ``GroupFigures``: label, field, format."""

POINTS: tuple[tuple[str, str], ...] = (
    ("validation loss", "validation"),
    ("validation loss of the mean", "validation_of_mean"),
    ("disagreement", "disagreement"),
)
"""Rows of the curve's last ``CurvePoint``: label, field."""

MOST_COLUMNS = 4
"""Most groups shown as columns; more groups get a line each, in a table of their own."""

COLUMNS = ("peers", "outer_steps", "utilization", "loss", "exchanges", "exchanges_failed", "solo_share", "pulls")
"""Fields of ``ROWS`` that each group's line shows."""

MOST_NAME = 60
"""Most characters of a title or a value: a report may come from a stranger."""


def title(report: SimulationReport) -> str:
    return words(report.title, MOST_NAME)


def summary(report: SimulationReport) -> Table:
    """Return a table of all peers, with a few groups as columns."""
    cost = report.cost
    table = Table(
        title=Text(
            f"{title(report)}: {report.simulated_s:,.0f} simulated seconds, {report.ending}", style="table.title"
        ),
        caption=f"{report.events:,} events in {cost.wall_s:.1f} s, {cost.peak_memory_bytes / 1e6:,.0f} MB peak memory",
    )
    table.add_column("")
    columns: list[tuple[str, GroupFigures]] = [("all", report.overall)]
    columns += report.groups.items() if 1 < len(report.groups) <= MOST_COLUMNS else []
    for name, _ in columns:
        table.add_column(name, justify="right")
    for label, field, form in ROWS:
        table.add_row(label, *(_shown(getattr(figures, field), form) for _, figures in columns))
    table.add_row("MB up per peer", *(f"{figures.up.total / 1e6:,.3f}" for _, figures in columns))
    table.add_row("MB down per peer", *(f"{figures.down.total / 1e6:,.3f}" for _, figures in columns))
    last = report.curve[-1]
    for label, field in POINTS:
        groups = [last.groups.get(name) if field == "validation" else None for name, _ in columns[1:]]
        if getattr(last, field) is not None:
            table.add_row(label, *(_shown(value, ".4f") for value in [getattr(last, field), *groups]))
    return table


def by_group(report: SimulationReport) -> Table | None:
    """Return one row per group; None if there are so few that ``summary`` has a column for each."""
    if len(report.groups) <= MOST_COLUMNS:
        return None
    shown = [row for row in ROWS if row[1] in COLUMNS]
    table = Table()
    table.add_column("")
    for label in (*(label for label, _, _ in shown), "MB up per peer", "held-out loss"):
        table.add_column(label, justify="right")
    for name, figures in report.groups.items():
        values = [_shown(getattr(figures, field), form) for _, field, form in shown]
        loss = report.curve[-1].groups.get(name)
        table.add_row(name, *values, f"{figures.up.total / 1e6:,.3f}", _shown(loss, ".4f"))
    return table


def comparison(report: SimulationReport, other: SimulationReport) -> Table:
    """Return a table of this simulation's results beside another's."""
    table = Table(title=Text(f"{title(report)} against {title(other)}", style="table.title"))
    table.add_column("")
    for name in (title(report), title(other), "ratio"):
        table.add_column(Text(name), justify="right")
    pairs = [(label, getattr(report.overall, f), getattr(other.overall, f), form) for label, f, form in ROWS]
    pairs += [("MB up per peer", report.overall.up.total / 1e6, other.overall.up.total / 1e6, ",.3f")]
    pairs += [("simulated seconds", report.simulated_s, other.simulated_s, ",.1f")]
    mine_last, their_last = report.curve[-1], other.curve[-1]
    pairs += [(label, getattr(mine_last, field), getattr(their_last, field), ".4f") for label, field in POINTS]
    for label, mine, theirs, form in pairs:
        ratio = f"{mine / theirs:.4f}" if mine is not None and theirs else "-"
        table.add_row(label, _shown(mine, form), _shown(theirs, form), ratio)
    return table


def changed_settings(report: SimulationReport, other: SimulationReport) -> list[str]:
    """Return one line for each field in which the scenarios differ."""
    mine, theirs = (dict(_flat(each.scenario)) for each in (report, other))
    differ = [p for p in sorted(mine.keys() | theirs.keys()) if mine.get(p, "absent") != theirs.get(p, "absent")]
    return [f"{words(p)}: {_setting(theirs, p)} -> {_setting(mine, p)}" for p in differ]


def _setting(settings: Mapping[str, object], path: str) -> str:
    return words(settings.get(path, "absent"), MOST_NAME)


def _flat(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the leaves in order, each with its path."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(inner, f"{path}.{name}".removeprefix("."))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _flat(inner, f"{path}[{place}]")
    else:
        yield path, value


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
