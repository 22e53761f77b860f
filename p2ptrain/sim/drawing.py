"""Draws a report's curves. matplotlib is an extra: it comes with ``pip install 'p2ptrain[plot]'``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from p2ptrain.errors import ScenarioError
from p2ptrain.sim.report import Report

FORMATS = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """Raise ScenarioError when nothing could be drawn there: before a long simulation, not after it."""
    if path.suffix not in FORMATS:
        raise ScenarioError(f"{path} has no name of a picture.", f"Let it end in {', '.join(FORMATS)}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise ScenarioError("Drawing needs matplotlib, which is not installed.", "pip install 'p2ptrain[plot]'")


def draw(report: Report, other: Report | None, path: Path) -> None:
    """Loss against tokens and simulated time, and disagreement; another simulation's dashed. Raises ScenarioError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    by_tokens, by_time, apart = figure.subplots(1, 3)
    for each, style in ((report, "-"), (other, "--")):
        if each is None:
            continue
        curve = each.curve
        loss = [point.loss if point.validation is None else point.validation for point in curve]
        by_tokens.plot([point.tokens for point in curve], loss, style, label=each.title)
        by_time.plot([point.time_s for point in curve], loss, style, label=each.title)
        apart.plot([point.outer_steps for point in curve], [point.disagreement for point in curve], style)
    by_tokens.set(xlabel="tokens per peer", ylabel="loss")
    by_time.set(xlabel="simulated seconds", ylabel="loss")
    apart.set(xlabel="outer steps", ylabel="disagreement", yscale="log")
    by_tokens.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise ScenarioError(f"{path} cannot be written: {error}.", "Give another path to --plot.") from None
