"""Figures: one SVG for each experiment with panels, from the same summaries as the tables.

``svg`` needs matplotlib (extra ``dev``). Equal numbers yield equal bytes: no date, no random ids.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.evidence.layout import PlotPanel, PlotPoint
from bench.evidence.summary import CellSummary, Estimate, by_place, key

WIDTH, HEIGHT = 4.2, 3.2
"""Size of one panel in inches."""

COLUMNS = 3
MOST_TICKS = 7
"""Number of different x up to which a logarithmic axis has a tick at each."""

MARKERS = "osv^D<>PX"


@dataclass(frozen=True, slots=True)
class PlottedLine:
    """Line of a panel: points in the order of x, and the standard errors of y."""

    label: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    errors: tuple[float, ...]


def lines(panel: PlotPanel, found: Sequence[CellSummary]) -> list[PlottedLine]:
    """Return the lines of a panel, without empty ones. A missing figure of y is NaN, which leaves a gap in the line."""
    places, made = by_place(found), []
    for label, points in panel.lines.items():
        there = sorted(spot for point in points if (spot := _spot(point, places)) is not None)
        if any(math.isfinite(y) for _, y, _ in there):
            made.append(PlottedLine(label, *zip(*there, strict=True)))
    return made


def _spot(point: PlotPoint, places: Mapping[tuple[str, str], CellSummary]) -> tuple[float, float, float] | None:
    """Return x, y and the standard error of y; None if x is missing."""
    place = places.get((point.contender, key(point.setting.key())))
    figures = place.figures if place is not None else {}
    x = figures.get(point.x) if isinstance(point.x, str) else Estimate(point.x, 0.0)
    y = figures.get(point.y) if isinstance(point.y, str) else Estimate(point.y, 0.0)
    if x is None:
        return None
    return (x.mean, y.mean, y.standard_error or 0.0) if place is not None and y is not None else (x.mean, math.nan, 0.0)


def svg(panels: Sequence[PlotPanel], found: Sequence[CellSummary]) -> bytes | None:
    """Draw the panels in a grid with the legend of the first one; None if there is nothing to draw."""
    # Imported here, so that tables can be drawn without matplotlib.
    import matplotlib
    from matplotlib.figure import Figure

    drawn = [(panel, each) for panel in panels if (each := lines(panel, found))]
    if not drawn:
        return None
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "evidence", "font.size": 9}):
        columns = min(COLUMNS, len(drawn))
        rows = math.ceil(len(drawn) / columns)
        figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False)
        for index, axes in enumerate(grid.flat):
            if index < len(drawn):
                _draw(axes, *drawn[index])
            else:
                axes.set_axis_off()
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2 * columns, fontsize=7)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _draw(axes: Any, panel: PlotPanel, drawn: Sequence[PlottedLine]) -> None:
    for index, line in enumerate(drawn):
        errors = line.errors if any(line.errors) else None
        marker = MARKERS[index % len(MARKERS)]
        axes.errorbar(line.xs, line.ys, yerr=errors, label=line.label, marker=marker, markersize=4)
    if panel.logarithmic:
        axes.set_xscale("log")
        axes.minorticks_off()
        if len(xs := sorted({x for line in drawn for x in line.xs})) <= MOST_TICKS:
            axes.set_xticks(xs, [f"{x:g}" for x in xs])
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(alpha=0.3)
