"""``p2ptrain simulate``: a scenario file in, a table and a report out."""

from __future__ import annotations

import signal
from pathlib import Path
from threading import Event

import click

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
def simulate(
    scenario: Path,
    report: Path | None,
    plot: Path | None,
    against: Path | None,
    changes: tuple[str, ...],
    device: str,
) -> None:
    """Simulate the swarm of SCENARIO, a TOML file, and print what became of it.

    The same protocol and arithmetic as in real peers, on simulated computers and lines. docs/SIMULATOR.md explains
    scenarios and reports. With --report, Ctrl+C keeps what was done, and the same command goes on from there.
    """
    from rich.console import Console
    from rich.progress import Progress

    from p2ptrain.sim import drawing, scenario_file
    from p2ptrain.sim import report as reports
    from p2ptrain.sim.simulate import StoppedError
    from p2ptrain.sim.simulate import simulate as run
    from p2ptrain.sim.tables import comparison, summary
    from p2ptrain.train.autofit import choose_device

    told = scenario_file.load(scenario, changes)
    other = reports.load(against) if against is not None else None
    if plot is not None:
        drawing.check(plot)
    chosen = str(choose_device(device))
    console = Console()
    kept = report.with_name(f"{report.name}.part") if report is not None else None
    stop = Event()
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(scenario.name, total=1.0)
            done = run(
                told,
                title=scenario.stem,
                device=chosen,
                progress=lambda share: bar.update(task, completed=share),
                resume=kept,
                is_stopped=stop.is_set,
            )
    except StoppedError:
        if kept is not None:
            console.print(f"stopped; the same command goes on from {kept}")
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, before)
    console.print(summary(done))
    for line in done.left_out:
        console.print(f"left out: {line}", style="dim")
    if report is not None:
        reports.save(done, report)
        console.print(f"report: {report}")
    if other is not None:
        console.print(comparison(done, other))
    if plot is not None:
        drawing.draw(done, other, plot)
        console.print(f"plot: {plot}")
