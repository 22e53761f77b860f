"""The command ``p2ptrain simulate``: read a scenario file, print a table, write a report."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

import click

from p2ptrain.base import files
from p2ptrain.base.device_names import DEVICE_WORDS
from p2ptrain.base.imports import command_imports
from p2ptrain.base.telemetry import LossyStream
from p2ptrain.base.text import PLAIN_WIDTH, printable
from sim.errors import ScenarioError

if TYPE_CHECKING:
    from rich.console import Console

    from sim.report import SimulationReport


FILE = click.Path(path_type=Path, readable=False)
"""A path that Click does not check, because Click would report it together with the command's usage."""


@click.command(short_help="Simulate a swarm from a scenario file.")
@click.argument("scenario", type=FILE)
@click.option("--report", type=FILE, help="Write the report to FILE, as JSON.", metavar="FILE")
@click.option("--plot", type=FILE, help="Plot losses and disagreement to FILE (png, svg or pdf).", metavar="FILE")
@click.option("--against", type=FILE, help="Compare with FILE, the report of another simulation.", metavar="FILE")
@click.option(
    "--set", "changes", multiple=True, help="Change a field, as in outer.inner_steps=20.", metavar="KEY=VALUE"
)
@click.option("--device", default="cpu", show_default=True, help=f"Device of learner lm: {DEVICE_WORDS}.")
@click.option("--serve", metavar="[HOST:]PORT", help="Show the simulation in a browser, until Ctrl+C.")
def simulate(
    scenario: Path,
    report: Path | None,
    plot: Path | None,
    against: Path | None,
    changes: tuple[str, ...],
    device: str,
    serve: str | None,
) -> None:
    """Simulate the swarm of SCENARIO, a TOML file, and print the result.

    Simulated peers run the protocol and arithmetic of real peers on simulated computers and lines. docs/SIMULATOR.md
    explains scenarios and reports.
    """
    with command_imports():  # what the checks need; torch, which takes seconds, only after them
        from rich.console import Console
        from rich.progress import Progress, TextColumn

        from p2ptrain.page.listen_address import ListenAddress
        from p2ptrain.page.untrusted import words
        from sim import drawing, scenario_file
        from sim import report as reports

    data = scenario_file.read(scenario, changes)
    described = scenario_file.parse(scenario_file.simulated(data))
    other = reports.load(against) if against is not None else None
    form = drawing.form(plot) if plot is not None else ""
    report = _target("--report", report, {"the scenario": scenario})
    plot = _target(
        "--plot", plot, {"the scenario": scenario, "the report": report, "the report that --against reads": against}
    )
    place = None if serve is None else ListenAddress.parse(serve)
    with command_imports():
        import torch

        from p2ptrain.train.accelerator import choose_device
        from sim.serving import simulate_and_show
        from sim.simulate import simulate as run

    chosen = str(choose_device(device, is_exact=True))
    torch.set_num_threads(1)  # tensors are small, and results must not depend on the number of cores
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    watched = Console(file=cast(TextIO, LossyStream(sys.stdout)), highlight=False, markup=False, emoji=False)
    name = TextColumn("{task.description}", style="progress.description", markup=False)
    columns = name, *Progress.get_default_columns()[1:]
    with Progress(*columns, console=watched, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(words(scenario.name), total=1.0)

        def progress(share: float) -> None:
            bar.update(task, completed=share)

        if place is None:
            done = run(described, title=scenario.stem, device=chosen, progress=progress)
        else:
            say = watched.print if console.is_terminal else console.print
            done = simulate_and_show(described, place, title=scenario.stem, device=chosen, say=say, progress=progress)
    written = []
    try:  # write files before printing: a closed standard output must not lose them
        if report is not None:
            reports.save(done, report)
            written.append(f"report: {printable(report)}")
        if plot is not None:
            drawing.save(done, other, plot, form)
            written.append(f"plot: {printable(plot)}")
    finally:
        _tell(console, done, other, written, limited="limits" in data)


def _target(option: str, path: Path | None, others: Mapping[str, Path | None]) -> Path | None:
    """Return the file that will be written, of a symlink its target, once a file beside it could be written.

    Raises:
        ScenarioError: nothing can be written there, or one of the ``others`` would be replaced.
    """
    if path is None:
        return None
    try:
        target = Path(os.path.realpath(path)) if path.is_symlink() else path
        if target.exists() and not target.is_file():
            raise ScenarioError(f"{printable(path)} is not a regular file.", f"Give {option} another path.")
        for what, other in others.items():
            if other is not None and os.path.realpath(target) == os.path.realpath(other):
                raise ScenarioError(f"{printable(path)} is {what}; {option} would replace it.", "Give another path.")
        probe = target.with_name(f"{target.name}.{os.getpid()}.new")  # as long as in files.replace
        try:
            files.write_new(probe, b"\n")
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        remedy = files.remedy(error, f"give another path to {option}")
        raise ScenarioError(f"{printable(path)} cannot be written: {files.cause(error)}.", remedy) from None
    return target


def _tell(
    console: Console, done: SimulationReport, other: SimulationReport | None, written: list[str], limited: bool
) -> None:
    from sim.tables import by_group, changed_settings, comparison, summary

    console.print(summary(done))
    if (groups := by_group(done)) is not None:
        console.print(groups)
    for line in done.left_out:
        console.print(f"left out: {line}", style="dim", soft_wrap=True)
    if limited:
        console.print("left out: limits, which only p2ptrain testnet checks", style="dim")
    if other is not None:
        for line in changed_settings(done, other):
            console.print(line, soft_wrap=True)
        console.print(comparison(done, other))
    for line in written:
        console.print(line, soft_wrap=True)
