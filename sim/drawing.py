"""Drawing of a report's curves. matplotlib comes with the extra ``plot``."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

from p2ptrain.base import files
from p2ptrain.base.documents import install_extra
from sim.errors import ScenarioError
from sim.report import SimulationReport
from sim.tables import title

FORMATS = (".png", ".svg", ".pdf")


def form(path: Path) -> str:
    """Return the format of a picture. Raises ScenarioError if it cannot be drawn, before a long simulation."""
    if path.suffix.lower() not in FORMATS:
        raise ScenarioError(f"Unsupported image format: {path}.", f"Use one of {', '.join(FORMATS)}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise ScenarioError("Drawing needs matplotlib, which is not installed.", install_extra("plot"))
    return path.suffix.lower().removeprefix(".")


def save(report: SimulationReport, other: SimulationReport | None, path: Path, kind: str) -> None:
    """Draw loss by tokens and by time, and disagreement; the other simulation is dashed. Raises ScenarioError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    by_tokens, by_time, apart = figure.subplots(1, 3)
    drawn = io.BytesIO()
    try:
        for each, style in ((report, "-"), (other, "--")):
            if each is None:
                continue
            curve = each.curve
            loss = [point.loss if point.validation is None else point.validation for point in curve]
            label = title(each).replace("$", r"\$")  # a dollar sign would begin a formula
            by_tokens.plot([point.tokens for point in curve], loss, style, label=label)
            by_time.plot([point.time_s for point in curve], loss, style, label=label)
            apart.plot([point.outer_steps for point in curve], [point.disagreement for point in curve], style)
        by_tokens.set(xlabel="tokens per peer", ylabel="loss")
        by_time.set(xlabel="simulated seconds", ylabel="loss")
        apart.set(xlabel="outer steps", ylabel="disagreement", yscale="log")
        by_tokens.legend()
        figure.savefig(drawn, format=kind)
        files.replace(path, drawn.getvalue())
    except OSError as error:
        remedy = files.remedy(error, "give another path to --plot")
        raise ScenarioError(f"{path} cannot be written: {files.cause(error)}.", remedy) from None
    except (ValueError, ArithmeticError) as error:  # axes have no ticks for numbers such as 1e308
        raise ScenarioError(f"The curves cannot be drawn: {error}.", "Leave --plot out.") from None
