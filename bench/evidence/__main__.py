"""``python -m bench.evidence``: run what is missing, publish, write the tables."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.environment import environment
from bench.evidence import documents
from bench.evidence.adopted import adopt
from bench.evidence.cells import Cell, Choice
from bench.evidence.confirm import confirm
from bench.evidence.contenders import TUNED
from bench.evidence.experiments import EXPERIMENTS, all_cells
from bench.evidence.identity import ROOT, numeric_digest
from bench.evidence.older import older
from bench.evidence.plan import Results, State, hours, ordered, quick
from bench.evidence.pool import Pool
from bench.evidence.run import Campaign, expected, measured_pace, publish
from bench.evidence.store import Store
from bench.evidence.tables import DOCUMENT, RESULTS, drawings, evidence_lines, load
from bench.results import replaced
from p2ptrain import files
from p2ptrain.errors import DeviceError
from p2ptrain.train import choose_device

CELLS = ROOT / "out" / "evidence"
QUICK = ROOT / "out" / "evidence-quick"
REHEARSAL = ROOT / "out" / "evidence-rehearsal"
ANEW = ROOT / "out" / "evidence-anew"

REAL, FAKE = "bench.evidence.simulation:simulate", "bench.evidence.fake:simulate"
USUAL = (0.7, 0.5)
"""The middle of the grid: what a quick run takes for a method that was never tuned."""


@click.command()
@click.option("--only", default="", help="Experiments, with commas: R1,R5. Also: tuning.")
@click.option("--quick", "is_quick", is_flag=True, help="A small part in minutes; kept under out/ and never published.")
@click.option("--jobs", "workers", default=2, show_default=True, type=click.IntRange(1, 256), help="Worker processes.")
@click.option("--budget-hours", default=math.inf, type=click.FloatRange(0), help="Start no cell after this long.")
@click.option("--device", default="cpu", show_default=True, help="Passed on to the simulator.")
@click.option("--refresh-stale", is_flag=True, help="Run again what older code has produced.")
@click.option("--confirm", "confirms", is_flag=True, help="First see, on a run of each kind, what of it still holds.")
@click.option("--list", "list_only", is_flag=True, help="Print the plan and its hours, run nothing.")
@click.option("--anew", is_flag=True, help="Take nothing that is published: run all, under out/, to compare.")
@click.option("--rehearse", is_flag=True, help="Made-up numbers under out/, in a minute: tests the instruments.")
def main(
    only: str,
    is_quick: bool,
    workers: int,
    budget_hours: float,
    device: str,
    refresh_stale: bool,
    confirms: bool,
    list_only: bool,
    anew: bool,
    rehearse: bool,
) -> None:
    """Run the experiments R1 to R11 as far as they have not been run, and write docs/results and docs/RESULTS.md."""
    console = Console(highlight=False, soft_wrap=True)
    names = _names(only)
    if math.isnan(budget_hours):
        raise click.BadParameter("nan is no number of hours", param_hint="--budget-hours")
    if anew and (is_quick or rehearse):
        raise click.BadParameter("a quick or rehearsed run takes nothing that is published", param_hint="--anew")
    device = _device(device)
    home = REHEARSAL if rehearse else QUICK if is_quick else ANEW if anew else CELLS
    folder = RESULTS if home is CELLS else home / "results"
    title = "rehearsal: made-up numbers" if rehearse else "quick: not the evidence" if is_quick else "made anew"
    campaign = Campaign(
        cells=_cells(names, is_quick, folder),
        store=Store(home / "cells"),
        published=_published(folder, is_quick),
        code=numeric_digest(),
        environment=environment(),
        say=lambda line: console.print(f"[evidence] {line}", markup=False),
        refresh_stale=refresh_stale,
    )
    if home is CELLS and (count := adopt(campaign, folder)):
        campaign.say(f"{count} runs that are published need not be made again")
    console.print(plan_table(campaign, workers))
    if list_only:
        _list(campaign, console)
        return
    _stop_on_signals()
    try:
        with Pool(workers, FAKE if rehearse else REAL, device) as pool:
            if confirms:
                confirm(campaign, pool, partial(older, workers=workers, simulate=REAL, device=device))
            campaign.run(pool, workers, 3_600 * budget_hours)
    except KeyboardInterrupt:
        campaign.say("stopped; what was finished is kept, and the next call goes on from there")
        raise SystemExit(130) from None
    finally:
        shown = {name: replace(each, cells=tuple(quick(each.cells))) for name, each in EXPERIMENTS.items()}
        publish(shown if is_quick else EXPERIMENTS, campaign, folder, [name for name in EXPERIMENTS if name in names])
        target = _write_tables(folder, title)
        campaign.say(f"written: {folder} and {target}")
    failed = [job for job in campaign.jobs() if job.state is State.FAILED]
    if failed:
        campaign.say(f"{len(failed)} cells failed; --list names them with their reasons, and the next call tries again")
        raise SystemExit(1)


def plan_table(campaign: Campaign, workers: int) -> Table:
    """Cells and hours by experiment."""
    all_jobs = campaign.jobs()
    speed = measured_pace(all_jobs)
    table = Table(title=f"plan: {len(all_jobs)} runs on {workers} workers, measured / assumed seconds = {speed:.2f}")
    for heading in ("", *State, "core hours to do", "in all"):
        table.add_column(heading, justify="right")
    todo = [job for job in all_jobs if campaign.wanted(job) or job.state is State.WAITING]
    left, whole = expected(job.cell for job in todo), expected(job.cell for job in all_jobs)
    for name, (_, core_hours) in sorted(whole.items(), key=lambda each: (each[0] != "tuning", each[0])):
        states = [str(sum(job.cell.experiment == name and job.state is state for job in all_jobs)) for state in State]
        table.add_row(name, *states, f"{speed * left.get(name, (0, 0.0))[1]:.2f}", f"{speed * core_hours:.2f}")
    real = (hours([job.cell for job in jobs], workers, speed) for jobs in (todo, all_jobs))
    table.add_row("hours of real time", *[""] * len(State), *(f"{each:.1f}" for each in real))
    return table


def _list(campaign: Campaign, console: Console) -> None:
    for job in campaign.jobs():
        why = f": {job.record.failure}" if job.record is not None and job.record.failure else ""
        console.print(f"{job.state:8} {job.cell.name}{why}", markup=False)


def _device(wish: str) -> str:
    try:
        return str(choose_device(wish))
    except DeviceError as error:
        raise click.BadParameter(str(error), param_hint="--device") from error


def _names(only: str) -> list[str]:
    known = ["tuning", *EXPERIMENTS]
    names = [each.strip() for each in only.split(",") if each.strip()] or known
    for name in names:
        if name not in known:
            raise click.BadParameter(
                f"there is no experiment {name!r}; there are {', '.join(known)}", param_hint="--only"
            )
    return names


def _cells(names: Sequence[str], is_quick: bool, folder: Path) -> list[Cell]:
    """The wanted cells; with the tuning of every method in them that nobody has published."""
    cells = all_cells()
    if is_quick:
        return ordered(quick(each for each in cells if each.experiment in names))
    needed = {each.contender.tuned_as for each in cells if each.experiment in names and each.choice is None} - set(
        _published(folder, is_quick=False)
    )
    wanted = {each.name for each in TUNED if "tuning" in names or each.name in needed}
    return ordered(
        each
        for each in cells
        if (each.contender.name in wanted if each.experiment == "tuning" else each.experiment in names)
    )


def _published(folder: Path, is_quick: bool) -> Results:
    """The grids in tuning.json. A quick run reads the real one, and has numbers for methods that lack one."""
    document: Mapping[str, Any] = documents.read((RESULTS if is_quick else folder) / "tuning.json") or {
        "contenders": {}
    }
    found = {
        name: [
            (Choice(point["recipe"], point["learning_rate"], point["momentum"]), point["loss"])
            for point in each["grid"]
        ]
        for name, each in document["contenders"].items()
    }
    if not is_quick:
        return found
    return {each.name: [(Choice(each.forms[0], *USUAL), 0.0)] for each in TUNED} | found


def _write_tables(folder: Path, title: str) -> Path:
    lines = evidence_lines(load(folder), drawings(folder))
    if folder == RESULTS:
        files.replace(DOCUMENT, replaced(DOCUMENT.read_text(encoding="utf-8"), "evidence", lines).encode())
        return DOCUMENT
    target = folder / "RESULTS.md"
    target.parent.mkdir(parents=True, exist_ok=True)
    files.replace(target, "\n".join([f"# {title}", "", *lines, ""]).encode())
    return target


def _stop_on_signals() -> None:
    """SIGTERM ends a run as Ctrl+C does, and Ctrl+C does so in the background too, where shells have it ignored."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


if __name__ == "__main__":
    main()
