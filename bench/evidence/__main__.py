"""``python -m bench.evidence``: verify results of other code, run missing cells, draw the pages of docs/results."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import click

from bench.environment import ROOT, environment
from bench.evidence.cells import Cell
from bench.evidence.experiments import EXPERIMENTS
from bench.evidence.pages import RESULTS, write_pages
from bench.evidence.run import PendingCell, compute, core_hours, missing, outdated, pending, read, run, simulated
from bench.evidence.tuning import STAGES, quick
from bench.evidence.verify import simulated_briefly, verify

QUICK = ROOT / "out" / "results-quick"
QUICK_SHARE = 8
"""Divisor of a quick cell's tokens."""
MOST_WORKERS = 2


@click.command()
@click.option("--only", default="", help="Experiments, separated by commas: R1,R5. Also: tuning.")
@click.option("--quick", "is_quick", is_flag=True, help="A small part in minutes, under out/; not the evidence.")
@click.option("--jobs", "workers", default=MOST_WORKERS, show_default=True, type=click.IntRange(1, MOST_WORKERS))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder; an empty one starts anew.")
@click.option("--list", "list_only", is_flag=True, help="Print which cells are missing and run nothing.")
@click.option("--verify", "verify_only", is_flag=True, help="Check results of other code by short runs; run no cell.")
def main(only: str, is_quick: bool, workers: int, out: Path | None, list_only: bool, verify_only: bool) -> None:
    """Run the cells of R1 to R10 that have no result in docs/results, and draw the tables and figures."""
    if verify_only and (only or is_quick):
        raise click.UsageError("--verify checks the results of all experiments; leave out --only and --quick.")
    folder = out or (QUICK if is_quick else RESULTS)
    names = _names(only)
    chosen = [cell for name in names for cell in EXPERIMENTS[name].cells]
    if is_quick:
        chosen = [quick(cell, QUICK_SHARE) for cell in chosen if cell.quick]
    if list_only:
        _list(chosen, folder)
        return
    here, failed = environment(), 0
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # read by the workers when they import torch
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also where nohup or a script ignores SIGINT
    try:
        if not is_quick:
            _verify(folder, workers, here)
        for _ in range(0 if verify_only else STAGES + 1):  # each stage decides the numbers of what follows
            if jobs := pending(chosen, folder, read(folder, "tuning")["cells"]):
                failed = _run(jobs, folder, workers, here)
        if not (is_quick or verify_only):
            _verify(folder, workers, here)  # makes the short runs of new results
    except KeyboardInterrupt:
        click.echo("Interrupted. Finished cells are kept; the next call continues.")
        raise SystemExit(130) from None
    finally:
        for name in names:
            if EXPERIMENTS[name].computed is not None:
                compute(EXPERIMENTS[name], folder, here)
        write_pages(folder)
    click.echo(f"Results and pages are in {folder}; {len(missing(chosen, folder))} cells are missing.")
    if asked := outdated(folder):
        click.echo(asked)
    if failed:
        raise click.ClickException(
            f"{failed} cells failed; {folder} names the reasons. The next call tries them again."
        )


def _run(jobs: Sequence[PendingCell], folder: Path, workers: int, here: Mapping[str, str]) -> int:
    """Run cells; return the number of cells that failed."""
    with _processes(workers) as pool:
        return run(jobs, folder, pool, here, click.echo, simulated)


def _verify(folder: Path, workers: int, here: Mapping[str, str]) -> None:
    """Keep the results of other code whose short runs are as before, and print the names of the others."""
    with _processes(workers) as pool:
        lost = verify(folder, pool, here, click.echo, simulated_briefly)
    if lost:
        click.echo(f"{len(lost)} results count as missing: their short runs changed, or their own code made none.")
        click.echo("\n".join(f"  {name}" for name in dict.fromkeys(cell.name for cell in lost)))


@contextmanager
def _processes(workers: int) -> Iterator[Executor]:
    """Open a pool of processes that do not outlive an interrupt."""
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        try:
            yield pool
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.kill()
            raise


def _names(only: str) -> list[str]:
    names = [each.strip() for each in only.split(",") if each.strip()] or list(EXPERIMENTS)
    for name in names:
        if name not in EXPERIMENTS:
            known = ", ".join(EXPERIMENTS)
            raise click.BadParameter(f"There is no experiment {name!r}. Choose from {known}.", param_hint="--only")
    return names


def _list(cells: Sequence[Cell], folder: Path) -> None:
    """Print the missing cells and about how long they take; those whose tuning is missing are counted, too."""
    rest = missing(cells, folder)
    for cell in rest:
        click.echo(cell.name)
    click.echo(f"{len(rest)} cells, about {core_hours(rest, folder):.1f} core hours.")
    if asked := outdated(folder):
        click.echo(asked)


if __name__ == "__main__":
    main()
