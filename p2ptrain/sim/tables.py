"""What a person reads of a report: a table of groups, a table of ratios."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import log10

from rich.table import Table

from p2ptrain.sim.compare import Row
from p2ptrain.sim.report import Figures, Report


def summary(report: Report) -> Table:
    """The figures of all peers together."""
    table = Table(title=f"{report.title}: {report.simulated_s:,.0f} simulated seconds, {report.ending}")
    table.add_column("")
    table.add_column("all peers", justify="right")
    for label, text in _LINES:
        table.add_row(label, text(report.overall))
    return table


def groups(report: Report) -> Table:
    """A few figures of each group, a line each."""
    table = Table(title="groups")
    table.add_column("")
    for label, _ in _COLUMNS:
        table.add_column(label, justify="right")
    for name, figures in report.groups.items():
        table.add_row(name, *(text(figures) for _, text in _COLUMNS))
    return table


def closing(report: Report) -> list[str]:
    """The end of the curve, what it took, and what it does not show."""
    last, cost = report.curve[-1], report.cost
    ends = [
        f"{name} {value:.4g}"
        for name, value in (
            ("loss", last.validation if last.validation is not None else last.loss),
            ("loss of the mean of all weights", last.validation_of_mean),
            ("disagreement", last.disagreement),
        )
        if value is not None
    ]
    return [
        f"at the end: {', '.join(ends) or 'no loss is measured'}",
        f"{report.events:,} events in {cost.wall_s:.1f} s, {cost.events_per_s:,.0f} a second, "
        f"at most {cost.peak_memory_bytes / 1e6:,.0f} MB",
        *(f"left out: {what}" for what in report.left_out),
    ]


def ratios(rows: Iterable[Row]) -> Table:
    """Before, after and their ratio."""
    table = Table(title="compared")
    table.add_column("")
    for name in ("before", "after", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        ratio = f"{row.ratio:.3f}" if row.ratio is not None else "-"
        table.add_row(row.name, number(row.before), number(row.after), ratio)
    return table


def number(value: float | None) -> str:
    """Four digits that matter, grouped in thousands; a dash for what was not measured."""
    if value is None:
        return "-"
    if value == int(value) or abs(value) >= 1e4:
        return f"{value:,.0f}"
    digits = max(0, 3 - int(log10(abs(value)))) if abs(value) >= 1e-3 else 6
    return f"{value:.{digits}f}"


_Line = tuple[str, Callable[[Figures], str]]

_LINES: tuple[_Line, ...] = (
    ("peers", lambda f: number(f.peers)),
    ("outer steps a peer", lambda f: number(f.outer_steps / f.peers)),
    ("training loss", lambda f: number(f.loss)),
    ("compute utilization", lambda f: number(f.utilization)),
    ("up, MB a peer", lambda f: number(f.up.total / 1e6)),
    ("down, MB a peer", lambda f: number(f.down.total / 1e6)),
    ("... of it messages and directory", lambda f: _share(f)),
    ("bits sent per parameter and outer step", lambda f: number(f.bits_per_parameter)),
    ("exchanges made a peer", lambda f: number(f.exchanges / f.peers)),
    ("exchanges failed", lambda f: number(f.exchanges_failed)),
    ("... perhaps committed on one side", lambda f: number(f.half_commits)),
    ("offers declined, unanswered", lambda f: f"{number(f.offers_declined)}, {number(f.offers_unanswered)}"),
    ("outer steps without an exchange", lambda f: number(f.solo_share)),
    ("newcomers that took weights", lambda f: number(f.pulls)),
    ("partners that broke the protocol", lambda f: number(f.offences)),
    ("why they ended", lambda f: "\n".join(f"{count:,} {why}" for why, count in f.endings.items())),
)

_COLUMNS: tuple[_Line, ...] = (
    ("peers", lambda f: number(f.peers)),
    ("outer steps", lambda f: number(f.outer_steps / f.peers)),
    ("training loss", lambda f: number(f.loss)),
    ("utilization", lambda f: number(f.utilization)),
    ("MB up", lambda f: number(f.up.total / 1e6)),
    ("MB down", lambda f: number(f.down.total / 1e6)),
    ("exchanges", lambda f: number(f.exchanges / f.peers)),
    ("failed", lambda f: number(f.exchanges_failed / f.peers)),
    ("solo", lambda f: number(f.solo_share)),
    ("pulls", lambda f: number(f.pulls)),
)


def _share(figures: Figures) -> str:
    total = figures.up.total + figures.down.total
    overhead = figures.up.control + figures.up.directory + figures.down.control + figures.down.directory
    return f"{100 * overhead / total:.3g} %" if total else "-"
