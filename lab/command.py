"""``p2ptrain testnet --scenario``: runs a scenario file and writes ``report.json``."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lab import container_summary
from lab import report as reports
from lab import scenario as scenarios
from lab.artifacts import Artifacts, read_artifacts
from lab.breakage import faketime_library
from lab.cell import REFUSED, run_in_cell
from lab.containers import build, check_engine, check_folder, has_netem, line_of, sweep_folder
from lab.figures import compared, figures_of
from lab.hosts import check_network_support
from lab.inner_main import MARK, read_run, run_inside
from lab.machine import machine
from lab.namespaces import check_support
from lab.pace import times_to_losses
from lab.plan import check, manifest_of
from lab.quotas import check_quota_support
from lab.report import ScenarioVerdict
from lab.scenario import RealScenario
from lab.script import Script, script_of
from lab.stages import TOKEN, StageName, hosts_on_side, page_argument, page_token
from lab.suspension import processes_with
from lab.text import write_text
from p2ptrain.base import files
from p2ptrain.base.errors import DeviceError, HomeError, OutputError, UserError
from p2ptrain.base.text import PLAIN_WIDTH
from peer.owner.settings import COMPILE_VARIABLE
from peer.testnet.plan import Plan, claimed, lay_out
from peer.testnet.processes import PACKAGES
from sim.errors import ScenarioError

EXIT_FAILED = 1
FOLDER_PREFIX = "p2pt-lab-"
UNDISTURBED = "undisturbed"
"""Folder of the run that a scenario is compared with."""
TEXT = "text"
"""Folder of a scenario's shards, as an author has them."""
UndisturbedRuns = dict[str, tuple[str, dict[str, Any]]]
"""Undisturbed runs by scenario as JSON: the title of the scenario that ran it, and its figures."""
STOP_DEADLINE_S = 30.0
"""Time for everything inside to end after Ctrl+C; then the kernel ends it. Guess: the time of an interrupted save would
settle it."""


def run_scenarios(
    folder: Path, changes: Sequence[str], stage: StageName, out: Path, threads: int, page: str = ""
) -> int:
    """Run each scenario of a folder and write all reports to ``out/report.json``. Arguments as ``run_scenario``."""
    paths = sorted(folder.glob("*.toml"))
    if not paths:
        raise ScenarioError(f"{folder} contains no scenario.", "Name a scenario file or a folder of *.toml files.")
    _check_stage(stage, page)  # reported once, not for every scenario
    reports_of: list[Any] = []
    console = report_console()
    undisturbed_runs: UndisturbedRuns = {}
    for path in paths:
        reports_of.append(_report_of(path, changes, stage, out / path.stem, threads, page, console, undisturbed_runs))
        out.mkdir(parents=True, exist_ok=True)
        files.replace(out / "report.json", _json(reports_of))  # keeps the reports if the next one is interrupted
    missed = [each["scenario"] for each in reports_of if not each["passed"]]
    console.print(f"{len(paths) - len(missed)} of {len(paths)} scenarios passed; all figures: {out / 'report.json'}")
    for name in missed:
        console.print(f"FAILED: {name}", style="bold red")
    return EXIT_FAILED if missed else 0


def _report_of(
    path: Path,
    changes: Sequence[str],
    stage: StageName,
    out: Path,
    threads: int,
    page: str,
    console: Console,
    undisturbed_runs: UndisturbedRuns,
) -> Any:
    """Run one of several scenarios and return its report. A failure does not affect the others, except an interrupt."""
    try:
        status = run_scenario(path, changes, stage, out, threads, page, undisturbed_runs)
        report = json.loads((out / "report.json").read_bytes())
        return report | {"passed": report["passed"] and not status}
    except OutputError:  # our output is broken, which is not the scenario's fault
        raise
    except UserError as error:
        why = str(error)
    except Exception as error:  # a bug of ours must not cost the results of the other scenarios
        why = f"{type(error).__name__}: {error}"
        console.print(traceback.format_exc(), markup=False, soft_wrap=True)
    console.print(f"{path.stem} FAILED: {why}", style="bold red", markup=False, soft_wrap=True)
    return _dated(reports.not_run(path.stem, stage, why))


def _check_stage(stage: StageName, page: str) -> str:
    """Return where the stage shows the swarm. Raises DeviceError if this machine does not support the stage; UserError
    if no page can open there.
    """
    if stage == "namespaces":
        check_support()
        check_network_support()
    if stage == "docker":
        check_engine()
    return page_argument(page, stage)


def run_scenario(
    path: Path,
    changes: Sequence[str],
    stage: StageName,
    out: Path,
    threads: int,
    page: str = "",
    undisturbed_runs: UndisturbedRuns | None = None,
) -> int:
    """Run the scenario of a file and return the exit status. Raises UserError, and KeyboardInterrupt once all processes
    ended.

    Args:
        page: where to show the swarm meanwhile; empty for no page.
        undisturbed_runs: those of other scenarios of the same folder. An identical one is not run again; one that ran
            here is added.
    """
    if path.is_dir():
        return run_scenarios(path, changes, stage, out, threads, page)
    scenario = scenarios.load(path, changes)
    script = script_of(scenario)
    check(scenario, script, stage)
    page = _check_stage(stage, page)
    if any(group.clock_off_s for group in scenario.peers):
        faketime_library()
    undisturbed = scenario.calm()
    if undisturbed is not None:
        check(undisturbed, script_of(undisturbed), stage)
    groups = [*scenario.peers, *(undisturbed.peers if undisturbed is not None else ())]
    if limits := {group.cores for group in groups if group.cores is not None}:
        check_quota_support(limits)
    manifest_of(scenario)  # a faulty manifest must be reported before anything is removed
    if stage == "docker":
        out = out.absolute()  # a container starts in another folder
        check_folder(out)
        build()
        _check_lines([scenario] if undisturbed is None else [scenario, undisturbed])
    with claimed(out, lambda: _sweep(out, stage)):
        figures = dict[str, Any]()
        if (
            undisturbed is not None
            and undisturbed_runs is not None
            and (same := undisturbed_runs.get(undisturbed.model_dump_json())) is not None
        ):
            report_console().print(f"{path.stem}: using the undisturbed run of {same[0]}")
            figures["undisturbed"] = same[1]
        elif undisturbed is not None:
            report_console().print(f"{path.stem}: undisturbed run, for comparison")
            record, figures["undisturbed"] = _run_and_read(undisturbed, stage, out / UNDISTURBED, threads, page)
            if record["troubles"]:
                verdict = reports.comparison_failed(path.stem, stage, figures["undisturbed"], record)
                files.replace(out / "report.json", _json(_dated(verdict)))
                print_verdict(verdict, out, report_console())
                return EXIT_FAILED
            if undisturbed_runs is not None:
                undisturbed_runs[undisturbed.model_dump_json()] = path.stem, figures["undisturbed"]
            report_console().print(f"{path.stem}: run as written")
        record, own = _run_and_read(scenario, stage, out, threads, page)
        if undisturbed is not None:
            figures["compared"] = compared(own, figures["undisturbed"])
            figures["compared"]["times_to_losses"] = times_to_losses(own, figures["undisturbed"])
        verdict = reports.verdict_of(path.stem, stage, scenario, {**own, **figures}, record)
        files.replace(out / "report.json", _json(_dated(verdict)))
        if stage == "docker":
            verdict = verdict.with_faults(
                container_summary.write_summary(out, script, record, verdict.faults, threads, report_console())
            )
            files.replace(out / "report.json", _json(_dated(verdict)))
        print_verdict(verdict, out, report_console())
    return 0 if verdict.passed else EXIT_FAILED


def _check_lines(scenarios: Sequence[RealScenario]) -> None:
    """Raise ScenarioError if links of containers need delay or loss that the host's kernel does not support."""
    if not any("both" in line_of(group) for scenario in scenarios for group in scenario.peers) or has_netem():
        return
    for scenario in scenarios:
        check(scenario, script_of(scenario), "docker", netem=False)


def _sweep(out: Path, stage: StageName) -> None:
    """Remove containers of a killed testnet, which write to the folder until they end."""
    if stage == "docker":
        for folder in (out, out / UNDISTURBED):
            sweep_folder(folder)


def _run_and_read(
    scenario: RealScenario, stage: StageName, out: Path, threads: int, page: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a scenario in an empty folder and return its run record and figures."""
    script = script_of(scenario)
    out.mkdir(exist_ok=True)
    manifest, text = manifest_of(scenario), None
    if scenario.text_shards:
        text = out / TEXT
        manifest = write_text(text, manifest, scenario.text_shards, scenario.run.seed)
    names = [peer.name for peer in script.peers]
    plan = lay_out(out, manifest, names, source=text)
    mark = uuid.uuid4().hex
    if stage == "namespaces":
        _run_in_cell(out, scenario, threads, mark)
    else:
        with _marked_environment(mark):
            run_inside(out, scenario, stage, threads, page)
    return _read_run(scenario, script, plan, threads, mark)


@contextlib.contextmanager
def _marked_environment(mark: str) -> Iterator[None]:
    """Set a mark that all children inherit and a folder for their sockets, and switch compilers off, until the end.

    If this process is killed, the folder remains without any socket in use, and the next run removes it.
    """
    for debris in Path("/tmp").glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(debris):
            shutil.rmtree(debris)
    before = {name: os.environ.get(name) for name in (MARK, "TMPDIR", TOKEN, COMPILE_VARIABLE)}
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir="/tmp"))  # short, because socket paths are limited
    os.environ[MARK], os.environ["TMPDIR"], tempfile.tempdir = mark, str(folder), None
    os.environ[TOKEN], os.environ[COMPILE_VARIABLE] = page_token(), "off"
    try:
        with _locked(folder):
            yield
    finally:
        tempfile.tempdir = None
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder for the block. Raises OSError if another process holds it."""
    handle = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _run_in_cell(out: Path, scenario: RealScenario, threads: int, mark: str) -> None:
    """Run the inside of a testnet in a cell, which ends when this process does. SIGTERM interrupts as Ctrl+C does."""
    (out / "scenario.json").write_text(scenario.model_dump_json(indent=1), encoding="utf-8")
    command = [sys.executable, "-P", "-m", "lab", str(out.absolute()), str(threads)]
    status = run_in_cell(command, STOP_DEADLINE_S, **{MARK: mark, "PYTHONPATH": str(PACKAGES), COMPILE_VARIABLE: "off"})
    if status == REFUSED:
        raise DeviceError(
            "This machine does not allow the isolation of a testnet; the reason is printed above.",
            "If this is a container, start it with --privileged; or take --stage local, which needs no isolation.",
        )
    if status:
        raise RuntimeError(f"the inside of the testnet ended with status {status}; its output is above")


def _read_run(
    scenario: RealScenario, script: Script, plan: Plan, threads: int, mark: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the run record and the figures of the artifacts and leftovers."""
    document = read_run(plan.out)
    record, inside = document["course"], document["left"]
    artifacts = [
        read_artifacts(peer, trainer.peer_id, trainer.home.path)
        for peer, trainer in zip(script.peers, plan.peers, strict=True)
    ]
    sides = {
        str(place): [hosts_on_side(side, lambda group: _names(script, group)) for side in partition.sides]
        for place, partition in enumerate(scenario.partitions)
    }
    figures = figures_of(record, artifacts, _disagreement(plan, record, artifacts, threads), sides)
    there = _namespaces_in_use()
    figures |= {
        "left_processes": inside["processes"] + len(processes_with(MARK, mark)),
        "left_sockets": inside["sockets"],
        "left_namespaces": sum(each in there for each in inside["namespaces"]),
    }
    return record, figures


def _names(script: Script, group: str) -> list[str]:
    return [peer.name for peer in script.peers if peer.group == group]


def _disagreement(plan: Plan, record: Mapping[str, Any], artifacts: Sequence[Artifacts], threads: int) -> float | None:
    """Return the disagreement of the last checkpoints of the peers that stayed; None if fewer than two have one."""
    import torch

    from peer.testnet.measure import disagreement, weights_of

    torch.set_num_threads(threads)
    weights = []
    for trainer, its in zip(plan.peers, artifacts, strict=True):
        lives = record["lives"].get(trainer.name)
        if not lives or lives[-1]["ended_by_us"] or its.peer.settings.lie is not None:
            continue
        with contextlib.suppress(HomeError):  # the peer's exit status already reports it
            weights.append(weights_of(trainer.home.checkpoints))
    return disagreement(weights) if len(weights) > 1 else None


def _namespaces_in_use() -> set[str]:
    found = set()
    for place in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):  # the process has ended or belongs to another user
            found.add(str(place.readlink()))
    return found


def _dated(verdict: ScenarioVerdict) -> dict[str, Any]:
    """Return the report with the machine and the date."""
    return verdict.document() | {"machine": machine(), "date": datetime.now(UTC).isoformat(timespec="seconds")}


def _json(document: Any) -> bytes:
    return (json.dumps(reports.json_safe(document), indent=1, allow_nan=False, default=str) + "\n").encode()


def report_console() -> Console:
    """Return a console that is wide enough for tables even if the output is a file."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def print_verdict(verdict: ScenarioVerdict, out: Path, console: Console) -> None:
    """Print the verdict; ``out`` is the folder of its files."""
    table = Table(title=f"{verdict.scenario}, stage {verdict.stage}")
    for heading in ("", "loss", "tokens", "exchanges", "failed", "blocked", "ended"):
        table.add_column(heading, justify="left" if heading in ("", "ended") else "right")
    for name, each in verdict.figures["peers"].items():
        loss, blocked = each["loss"], each["blocked_share"]
        table.add_row(
            name,
            "" if loss is None else f"{loss:.3f}",
            "" if each["tokens"] is None else f"{each['tokens']:,}",
            str(each["exchanges_made"]),
            str(each["exchanges_failed"]),
            "" if blocked is None else f"{100 * blocked:.2f} %",
            ", ".join(map(str, each["exits"])) or "never started",
        )
    console.print(table)
    for line in [*reports.growth_lines(verdict.figures), *verdict.course]:
        console.print(line, markup=False, soft_wrap=True)
    for name, limit in verdict.limits.items():
        bounds = ", ".join(
            f"{word.replace('_', ' ')} {limit[word]:g}" for word in ("at_least", "at_most") if word in limit
        )
        found = "none" if limit["found"] is None else f"{limit['found']:g}"
        console.print(f"{'kept  ' if limit['kept'] else 'MISSED'} {name}: {found} ({bounds})", markup=False)
    console.print(f"figures: {out / 'report.json'}", markup=False, soft_wrap=True)
    if not verdict.passed:
        console.print("FAILED:", style="bold red")
        for fault in verdict.faults:
            console.print(f"- {fault}", markup=False, soft_wrap=True)
        console.print(f"Output of each process: {out}/*/output.log", markup=False, soft_wrap=True)
