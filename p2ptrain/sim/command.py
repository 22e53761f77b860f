"""``p2ptrain simulate``: a scenario file in, a table and a report out."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click

from p2ptrain.errors import ScenarioError

PLAIN_WIDTH = 120
"""Columns of a table that goes to a file."""

FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(short_help="Simulate a swarm that a scenario file describes.")
@click.argument("scenario", type=FILE)
@click.option("--report", type=FILE, help="Write the whole report there, as JSON.", metavar="FILE")
@click.option("--plot", type=FILE, help="Draw losses and disagreement there (png or svg).", metavar="FILE")
@click.option("--against", type=FILE, help="Compare with a report of another simulation.", metavar="FILE")
@click.option("--set", "changes", multiple=True, help="Change a field: outer.inner_steps=20.", metavar="KEY=VALUE")
@click.option(
    "--device", default="cpu", show_default=True, help="Where learner lm computes: cpu, cuda or cuda:<number>."
)
@click.option("--serve", metavar="[HOST:]PORT", help="Show it in a browser while it runs, and after, until Ctrl+C.")
def simulate(
    scenario: Path,
    report: Path | None,
    plot: Path | None,
    against: Path | None,
    changes: tuple[str, ...],
    device: str,
    serve: str | None,
) -> None:
    """Simulate the swarm of SCENARIO, a TOML file, and print what became of it.

    The same protocol and arithmetic as in real peers, on simulated computers and lines. docs/SIMULATOR.md explains
    scenarios and reports. With --report, Ctrl+C keeps what was done, and the same command goes on from there; what is
    watched (--serve) begins anew.
    """
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from p2ptrain.page.server import Place
    from p2ptrain.sim import drawing, reality
    from p2ptrain.sim import report as reports
    from p2ptrain.sim.serving import simulate_and_show
    from p2ptrain.sim.simulate import StoppedError
    from p2ptrain.sim.simulate import simulate as run
    from p2ptrain.sim.tables import by_group, changed_settings, comparison, summary
    from p2ptrain.train.autofit import choose_device

    read = reality.load(scenario, changes)
    told = read.simulated()
    other = reports.load(against) if against is not None else None
    if plot is not None:
        drawing.check(plot)
    for path in (report, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ScenarioError(f"{path.parent} is no directory.", "Make it, or give another path.")
    chosen = str(choose_device(device))
    torch.set_num_threads(1)  # tensors are small, and figures must not depend on how many cores there are
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    place = None if serve is None else Place.parse(serve)
    kept = report.with_name(f"{report.name}.part") if report is not None and place is None else None
    try:
        with _stopping() as asked, Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(scenario.name, total=1.0)
            if place is not None:
                done = simulate_and_show(
                    told,
                    place,
                    title=scenario.stem,
                    device=chosen,
                    say=console.print,
                    progress=lambda share: bar.update(task, completed=share),
                    is_stopped=lambda: bool(asked),
                )
            else:
                done = run(
                    told,
                    title=scenario.stem,
                    device=chosen,
                    progress=lambda share: bar.update(task, completed=share),
                    resume=kept,
                    is_stopped=lambda: bool(asked),
                )
    except StoppedError:
        if kept is not None:
            console.print(f"stopped; the same command goes on from {kept}")
        raise KeyboardInterrupt from None
    console.print(summary(done))
    if (groups := by_group(done)) is not None:
        console.print(groups)
    for line in done.left_out:
        console.print(f"left out: {line}", style="dim", markup=False, soft_wrap=True)
    if read.limits:
        console.print("left out: limits, which p2ptrain testnet judges", style="dim")
    if report is not None:
        reports.save(done, report)
        console.print(f"report: {report}")
    if other is not None:
        for line in changed_settings(done, other):
            console.print(line, markup=False, soft_wrap=True)
        console.print(comparison(done, other))
    if plot is not None:
        drawing.draw(done, other, plot)
        console.print(f"plot: {plot}")


@contextmanager
def _stopping() -> Iterator[list[int]]:
    """A list that fills at the first Ctrl+C or SIGTERM. A second one stops at once, and keeps nothing new."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
