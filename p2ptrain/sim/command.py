"""``p2ptrain simulate``: options in, tables and files out."""

from __future__ import annotations

import signal
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from p2ptrain.errors import DeviceError, ScenarioError

FILE = click.Path(dir_okay=False, path_type=Path)
EXIT_STOPPED = 130
"""As after Ctrl+C."""
PLAIN_WIDTH = 120
"""Columns of a table that goes to a file."""


@click.command(short_help="Simulate a swarm from a scenario, and report.")
@click.argument("scenario", type=FILE)
@click.option("--report", type=FILE, metavar="FILE", help="Write all figures as JSON; an interrupted run goes on.")
@click.option("--plot", type=FILE, metavar="FILE", help="Draw the curves, as PNG, SVG or PDF; needs matplotlib.")
@click.option("--against", type=FILE, metavar="FILE", help="Compare with an earlier report.")
@click.option(
    "--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a field, as in outer.inner_steps=20."
)
@click.option("--device", default="cpu", show_default=True, help="Where learners with weights compute: cpu, cuda, ...")
def simulate(
    scenario: Path, report: Path | None, plot: Path | None, against: Path | None, changes: tuple[str, ...], device: str
) -> int:
    """Simulate the swarm that SCENARIO describes, and print what became of it.

    The same scenario gives the same report, bit for bit, on the same machine. With --report, Ctrl+C keeps what was
    done beside the report, and the same command goes on from there.
    """
    from p2ptrain.sim import plot as plots
    from p2ptrain.sim import report as reports
    from p2ptrain.sim import tables
    from p2ptrain.sim.compare import changed_settings, compare
    from p2ptrain.sim.scenario_file import load
    from p2ptrain.sim.simulate import StoppedError
    from p2ptrain.sim.simulate import simulate as simulated

    chosen = load(scenario, changes)
    earlier = reports.load(against) if against is not None else None
    if plot is not None:
        plots.check()
    for path in (report, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ScenarioError(f"{path.parent} is no directory.", "Make it, or give another path.")
    _prepare_torch(device)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    kept = report.with_name(f"{report.name}.part") if report is not None else None
    if kept is not None and kept.exists():
        click.echo(f"going on from {kept}", err=True)
    with _stopping() as stop, _bar(scenario.stem) as progress:
        try:
            made = simulated(
                chosen,
                title=scenario.stem,
                device=device,
                progress=progress,
                resume=kept,
                is_stopped=lambda: bool(stop),
            )
        except StoppedError:
            click.echo(
                f"stopped; the same command goes on from {kept}" if kept else "stopped; with --report it could go on",
                err=True,
            )
            return EXIT_STOPPED
    if report is not None:
        reports.save(made, report)
    if plot is not None:
        plots.draw([made] if earlier is None else [earlier, made], plot)
    console.print(tables.summary(made))
    if len(made.groups) > 1:
        console.print(tables.groups(made))
    for line in tables.closing(made):
        console.print(line, markup=False, soft_wrap=True)
    if earlier is not None:
        for line in changed_settings(earlier, made):
            console.print(line, markup=False, soft_wrap=True)
        console.print(tables.ratios(compare(earlier, made)))
    return 0


def _prepare_torch(device: str) -> None:
    """One thread: tensors are small, and figures do not depend on how many cores there are. Raises DeviceError."""
    import torch

    torch.set_num_threads(1)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).partition("\n")[0]
        raise DeviceError(f"device {device} cannot be used: {first}", "Leave out --device, or give cpu.") from None


@contextmanager
def _stopping() -> Iterator[list[int]]:
    """A list that fills when the owner wants to stop: at the first Ctrl+C or SIGTERM. A second one stops at once."""
    asked: list[int] = []

    def ask(number: int, frame: types.FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _bar(title: str) -> Iterator[Callable[[float], None] | None]:
    """A progress bar on a terminal; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=1.0)

        def progress(share: float) -> None:
            bar.update(task, completed=share)

        yield progress
