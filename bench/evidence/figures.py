"""The drawings: one SVG for each experiment that has panels, from the same summaries as the tables.

``lines`` is pure: what is drawn. ``draw`` needs matplotlib, which the extra ``dev`` brings. The same numbers yield the
same bytes: no date, no random ids, letters as letters.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.evidence.layout import Experiment, Panel, Point
from bench.evidence.summary import Summary, key
from p2ptrain.files import replace

WIDTH, HEIGHT = 4.2, 3.2
"""Inches of one panel."""

COLUMNS = 3
MARKERS = "osv^D<>PX"


@dataclass(frozen=True, slots=True)
class Line:
    """What is drawn of one line: its points in the order of x, and the standard errors of y."""

    label: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    errors: tuple[float, ...]


def lines(panel: Panel, found: Sequence[Summary]) -> list[Line]:
    """A panel's lines; points whose figures are missing are left out, and so are lines without points."""
    by_place = {(each.contender, key(each.setting)): each for each in found}
    made = []
    for label, points in panel.lines.items():
        there = sorted(spot for point in points if (spot := _spot(point, by_place)) is not None)
        if there:
            xs, ys, errors = zip(*there, strict=True)
            made.append(Line(label, xs, ys, errors))
    return made


def _spot(point: Point, by_place: Mapping[tuple[str, str], Summary]) -> tuple[float, float, float] | None:
    place = by_place.get((point.contender, key(point.setting.key())))
    if place is None:
        return None
    numbers, error = [], 0.0
    for value in (point.x, point.y):
        if isinstance(value, str):
            figure = place.figures.get(value)
            if figure is None:
                return None
            numbers.append(figure.mean)
            error = figure.standard_error or 0.0
        else:
            numbers.append(float(value))
    return numbers[0], numbers[1], error if isinstance(point.y, str) else 0.0


def draw(experiment: Experiment, found: Sequence[Summary], path: Path) -> bool:
    """Write the experiment's drawing; False when it has nothing to draw. Raises ImportError without matplotlib."""
    panels = [(panel, lines(panel, found)) for panel in experiment.panels]
    panels = [(panel, each) for panel, each in panels if each]
    if not panels:
        return False
    data = svg(panels)
    if not path.exists() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, data)
    return True


def svg(panels: Sequence[tuple[Panel, Sequence[Line]]]) -> bytes:
    """The panels side by side, with one legend, the first panel's."""
    # Here, so that tables are written where matplotlib is not installed.
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "evidence", "font.size": 9}):
        columns = min(COLUMNS, len(panels))
        rows = math.ceil(len(panels) / columns)
        figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False)
        for index, axes in enumerate(grid.flat):
            if index < len(panels):
                _panel(axes, *panels[index])
            else:
                axes.set_axis_off()
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2 * columns, fontsize=7)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _panel(axes: Any, panel: Panel, drawn: Sequence[Line]) -> None:
    for index, line in enumerate(drawn):
        errors = line.errors if any(line.errors) else None
        axes.errorbar(
            line.xs, line.ys, yerr=errors, label=line.label, marker=MARKERS[index % len(MARKERS)], markersize=4
        )
    if panel.logarithmic:
        axes.set_xscale("log")
        axes.minorticks_off()  # hundreds of strokes that nobody reads
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(alpha=0.3)
