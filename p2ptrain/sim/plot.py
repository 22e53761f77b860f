"""A report's curves as one picture. Needs matplotlib, which is an extra: ``pip install 'p2ptrain[plot]'``."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.errors import ScenarioError
from p2ptrain.sim.report import Point, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = ("payload", "weights", "control", "directory")


def check() -> None:
    """Raise ScenarioError unless there is something to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ScenarioError("--plot needs matplotlib, which is not installed.", "pip install 'p2ptrain[plot]'")


def draw(reports: Sequence[Report], path: Path) -> None:
    """Draw one report, or several over each other, into a file of the kind that its name says."""
    check()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    tokens, time, disagreement, traffic = figure.subplots(2, 2).flat
    for report in reports:
        name = report.title or "simulated"
        _curve(tokens, report.curve, "tokens", "loss", name)
        _curve(time, report.curve, "time_s", "loss", name)
        _curve(disagreement, report.curve, "time_s", "disagreement", name)
    tokens.set(xlabel="tokens a peer", ylabel="loss")
    time.set(xlabel="simulated seconds", ylabel="loss")
    disagreement.set(xlabel="simulated seconds", ylabel="disagreement")
    _traffic(traffic, reports)
    for axes in (tokens, time, disagreement):
        if axes.lines:
            axes.legend()
        else:
            axes.text(0.5, 0.5, "nothing was measured", ha="center", transform=axes.transAxes)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ScenarioError(f"{path} cannot be drawn: {error}.", "Give another path to --plot, as in p.png.") from None


def _curve(axes: Axes, curve: list[Point], across: str, up: str, name: str) -> None:
    points = [(getattr(point, across), _value(point, up)) for point in curve]
    drawn = [(x, y) for x, y in points if y is not None]
    if drawn:
        axes.plot(*zip(*drawn, strict=True), label=name)


def _value(point: Point, up: str) -> float | None:
    if up == "disagreement":
        return point.disagreement
    return point.validation if point.validation is not None else point.loss


def _traffic(axes: Axes, reports: Sequence[Report]) -> None:
    """Bytes up a peer by group, stacked by kind."""
    bars = [(f"{name}", figures) for report in reports for name, figures in report.groups.items()]
    bottom = [0.0] * len(bars)
    for kind in KINDS:
        heights = [getattr(figures.up, kind) for _, figures in bars]
        axes.bar(range(len(bars)), heights, bottom=bottom, label=kind)
        bottom = [base + height for base, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(bars)), [name for name, _ in bars], rotation=30)
    axes.set_ylabel("bytes up a peer")
    axes.legend()
