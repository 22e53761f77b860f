"""The command ``p2ptrain simulate``: read a scenario file, print a table, write a report."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO, cast

import click

from p2ptrain.base import files
from p2ptrain.base.errors import OutputError, ScenarioError
from p2ptrain.base.interrupts import default_sigint
from p2ptrain.base.telemetry import LossyStream
from p2ptrain.base.text import PLAIN_WIDTH, printable

if TYPE_CHECKING:
    from rich.console import Console

    from p2ptrain.sim.report import SimulationReport

MOST_PROBLEM = 500
"""Most characters shown of an error in a report, which may come from a stranger."""

HEAD_BYTES = 1 << 16
"""Bytes read from a file that would be replaced, to see whether we wrote it: more than the longest title."""

REPORT = re.compile(rb'\s*\{\s*"version"\s*:[^,"{[]*,\s*"title"\s*:\s*"(?:[^"\\]|\\.)*"\s*,\s*"scenario"\s*:\s*\{')
"""Beginning of a report of any version: ``report.save`` writes its fields in this order."""

SPARING = "Give another path, or remove the file first."

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
@click.option("--device", default="cpu", show_default=True, help="Device of learner lm: cpu, cuda or cuda:<number>.")
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
    with default_sigint():
        import torch
        from rich.console import Console
        from rich.progress import Progress, TextColumn

        from p2ptrain.page import words
        from p2ptrain.page.listen_address import ListenAddress
        from p2ptrain.sim import drawing, testbed_fields
        from p2ptrain.sim.serving import simulate_and_show
        from p2ptrain.sim.simulate import StoppedError
        from p2ptrain.sim.simulate import simulate as run
        from p2ptrain.train.autofit import choose_device

    read = testbed_fields.load(scenario, changes)
    told = read.simulated()
    other = _report(against) if against is not None else None
    form = drawing.form(plot) if plot is not None else ""
    report = _target("--report", report, {"the scenario": scenario})
    plot = _target(
        "--plot", plot, {"the scenario": scenario, "the report": report, "the report that --against reads": against}
    )
    if report is not None and (against is None or not _is_same(report, against)):  # loading it has validated it already
        _spare("--report", report, REPORT, "a report of p2ptrain simulate")
    if plot is not None:
        _spare("--plot", plot, drawing.BEGINNINGS[form], f"a picture in {form} format")
    place = None if serve is None else ListenAddress.parse(serve)
    for option, path in (("--report", report), ("--plot", plot)):
        if path is not None:
            _prove(option, path)
    chosen = str(choose_device(device))
    torch.set_num_threads(1)  # tensors are small, and results must not depend on the number of cores
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=PLAIN_WIDTH)
    watched = Console(file=cast(TextIO, LossyStream(sys.stdout)), highlight=False, markup=False, emoji=False)
    name = TextColumn("{task.description}", style="progress.description", markup=False)
    columns = name, *Progress.get_default_columns()[1:]
    try:
        with (
            stopping() as asked,
            Progress(*columns, console=watched, transient=True, disable=not console.is_terminal) as bar,
        ):
            task = bar.add_task(words(scenario.name), total=1.0)
            if place is not None:
                done = simulate_and_show(
                    told,
                    place,
                    title=scenario.stem,
                    device=chosen,
                    say=watched.print if console.is_terminal else console.print,
                    progress=lambda share: bar.update(task, completed=share),
                    is_stopped=lambda: bool(asked),
                )
            else:
                done = run(
                    told,
                    title=scenario.stem,
                    device=chosen,
                    progress=lambda share: bar.update(task, completed=share),
                    is_stopped=lambda: bool(asked),
                )
    except StoppedError:
        raise KeyboardInterrupt from None
    written = []
    try:  # write files before printing: a closed standard output must not lose them
        if report is not None:
            _save(done, report)
            written.append(f"report: {printable(report)}")
        if plot is not None:
            _draw(drawing.picture(done, other, form), plot)
            written.append(f"plot: {printable(plot)}")
    except BaseException:
        with suppress(OutputError):  # report the first error
            _tell(console, done, other, written, limited=bool(read.limits))
        raise
    _tell(console, done, other, written, limited=bool(read.limits))


def _report(path: Path) -> SimulationReport:
    """Load the report to compare with, which may come from a stranger.

    Raises:
        ScenarioError: the report cannot be read or compared.
    """
    from p2ptrain.page import words
    from p2ptrain.sim import report as reports
    from p2ptrain.sim.tables import check

    try:
        found = reports.load(path)
        check(found, printable(path))
    except ScenarioError as error:
        raise ScenarioError(words(error.problem, MOST_PROBLEM), error.remedy) from None
    except RecursionError:
        raise ScenarioError(
            f"{printable(path)} is not a report: its lists are nested too deeply.", "Give a file that --report wrote."
        ) from None
    return found


def _target(option: str, path: Path | None, others: Mapping[str, Path | None]) -> Path | None:
    """Return the path that will be written; a symlink is resolved to its target.

    Raises:
        ScenarioError: nothing can be written there, or one of the ``others`` would be replaced.
    """
    if path is None:
        return None
    if not path.name:
        raise ScenarioError(f"{option} has no file name.", "Give the path of a file, or leave the option out.")
    try:
        target = Path(os.path.realpath(path)) if path.is_symlink() else path
        if not target.parent.is_dir():
            raise ScenarioError(f"{printable(target.parent)} is not a directory.", "Create it, or give another path.")
        _regular(option, target, path)
    except OSError as error:
        raise _unwritable(option, path, error) from None
    for what, other in others.items():
        if other is not None and _is_same(target, other):
            raise ScenarioError(f"{printable(path)} is {what}; {option} would replace it.", "Give another path.")
    return target


def _regular(option: str, target: Path, path: Path) -> None:
    """Raise ScenarioError if ``target`` exists and is not a regular file; messages name ``path``."""
    try:
        if (target.exists() or target.is_symlink()) and not target.is_file():
            raise ScenarioError(f"{printable(path)} is not a regular file.", f"Give {option} another path.")
    except OSError as error:
        raise _unwritable(option, path, error) from None


def _spare(option: str, path: Path, beginning: re.Pattern[bytes], what: str) -> None:
    """Raise ScenarioError if the file exists, is not empty and does not match ``beginning``: it may be another file."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ScenarioError(f"{printable(path)} cannot be read: {error.strerror or error}.", SPARING) from None
    if head and beginning.match(head) is None:
        raise ScenarioError(f"{printable(path)} exists and is not {what}; {option} would replace it.", SPARING)


def _is_same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:  # one of them does not exist yet
        return os.path.realpath(path) == os.path.realpath(other)


def _prove(option: str, path: Path) -> None:
    """Raise ScenarioError if ``path`` cannot be written: before a long simulation, not after it. Leaves no file."""
    probe = path.with_name(f"{path.name}.{os.getpid()}.new")  # as long as in files.replace
    try:
        try:
            files.write_new(probe, b"\n")
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(option, path, error) from None


def _unwritable(option: str, path: Path, error: OSError) -> ScenarioError:
    why = error.strerror or error
    return ScenarioError(f"{printable(path)} cannot be written: {why}.", f"Give {option} another path.")


def _save(report: SimulationReport, path: Path) -> None:
    """Write a report to ``path``, or else to the temporary directory: the simulation may have taken days.

    Raises:
        ScenarioError: ``path`` cannot be written.
    """
    from p2ptrain.sim import report as reports

    try:
        reports.save(report, path)
    except ScenarioError as error:
        refuge = Path(tempfile.gettempdir(), f"p2ptrain-report-{os.getpid()}.json")
        try:
            reports.save(report, refuge)
        except ScenarioError:
            raise ScenarioError(
                f"{error.problem} The simulation is complete, but its report is lost.",
                "Free some disk space and simulate again.",
            ) from None
        raise ScenarioError(
            f"{error.problem} The report was saved as {refuge} instead.", "Move it from there."
        ) from None


def _draw(picture: bytes, path: Path) -> None:
    """Write the picture. Raises ScenarioError."""
    try:
        files.replace(path, picture)
    except OSError as error:
        raise _unwritable("--plot", path, error) from None


def _tell(
    console: Console, done: SimulationReport, other: SimulationReport | None, written: list[str], limited: bool
) -> None:
    """Print the result, the comparison with another simulation, and the files written."""
    from p2ptrain.sim.tables import by_group, changed_settings, comparison, summary

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


@contextmanager
def stopping() -> Iterator[list[int]]:
    """Yield a list that holds the signal's number after the first SIGINT (Ctrl+C), SIGTERM or SIGHUP.

    The second signal raises KeyboardInterrupt. SIGHUP stays ignored where it is ignored already (nohup).
    """
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
