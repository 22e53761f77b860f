"""``p2ptrain testnet``: options in, exit status out."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import click
from click.core import ParameterSource
from rich.console import Console

from p2ptrain.base.errors import UserError
from p2ptrain.base.imports import package_of_clone
from p2ptrain.base.text import PLAIN_WIDTH
from p2ptrain.data.file_store import FILES_FOLDER, named_weights, stored
from p2ptrain.manifest import PRESETS, Manifest, parameter_count
from p2ptrain.page.listen_address import ListenAddress, check_listen_address
from peer.options import WEIGHTS, FiniteRange
from peer.testnet import report as reports
from peer.testnet.plan import Plan, chosen_manifest, claimed, lay_out
from peer.testnet.report import TestnetReport
from peer.testnet.runner import Ending, Means, conduct, page_url
from peer.testnet.watch import Watch

EXIT_FAILED = 1


@click.command(short_help="Run a whole swarm on this machine and compare it with one peer.")
@click.option("--preset", default="demo", show_default=True, help=f"What to train: {', '.join(PRESETS)}.")
@click.option(
    "--manifest", type=click.Path(path_type=Path), help="Train this manifest.toml or run directory instead of a preset."
)
@click.option("--peers", type=click.IntRange(2, 64), default=3, show_default=True, help="Number of peers.")
@click.option("--seconds", type=FiniteRange(min=1.0), help="Stop after this much training, not at the run's end.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("out/demo"),
    show_default=True,
    help="Output directory; an earlier testnet there is replaced.",
)
@click.option("--no-solo", is_flag=True, help="Skip the solo run.")
@click.option(
    "--devices",
    metavar="DEVICE,…",
    help="Train the first peer on these, as cpu,cpu; then repeat with plain peers instead of a solo run.",
)
@click.option("--stages", type=click.IntRange(1, 64), help="Cut the first peer's model into so many parts.")
@click.option("--seed", type=click.IntRange(min=0), help="Replaces the manifest's run.seed.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Torch threads per process.")
@WEIGHTS
@click.option("--page", metavar="[HOST:]PORT", help="Show the swarm in a browser at this port of this computer.")
@click.option(
    "--scenario",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Run a scenario file (as for p2ptrain simulate), or every scenario in a folder, with real peers.",
)
@click.option(
    "--stage",
    type=click.Choice(["local", "namespaces", "docker"]),
    default="local",
    show_default=True,
    help="Where the scenario runs: loopback interface, network namespaces (needs root) or containers.",
)
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a field of the scenario.")
@click.pass_context
def testnet(
    context: click.Context,
    preset: str,
    manifest: Path | None,
    peers: int,
    seconds: float | None,
    out: Path,
    no_solo: bool,
    devices: str | None,
    stages: int | None,
    seed: int | None,
    threads: int,
    weights: Path | None,
    page: str | None,
    scenario: Path | None,
    stage: Literal["local", "namespaces", "docker"],
    changes: tuple[str, ...],
) -> int:
    """Train a swarm on this machine and the same run on a single peer, then compare the two.

    One bootstrap and several peers, each its own process, connect over libp2p on the loopback interface. The exit
    status is 1 if a peer did not learn, made no exchange or crashed. Ctrl+C stops everything. With --page on a
    terminal, the page stays open after the end until Ctrl+C.

    With --scenario, run that scenario with real peers instead and check the outcome against its limits
    (docs/LABORATORY.md in a clone). The exit status is 1 if a limit is missed.
    """
    _refuse_mixtures(context, scenario is not None)
    if scenario is not None:
        run_scenario = package_of_clone("lab", "--scenario").run_scenario
        place = out if _is_given(context, "out") else Path("out/lab") / scenario.stem
        return run_scenario(scenario, changes, stage, place, threads, page or "")
    chosen = chosen_manifest(preset, manifest)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    if page is not None:
        check_listen_address(ListenAddress.parse(page))  # before an earlier testnet is replaced
    source = None if manifest is None else manifest if manifest.is_dir() else manifest.parent
    means = Means(threads, weights or _kept_weights(source, chosen), page or "")
    if stages is not None and devices is None:
        raise click.UsageError("--stages needs --devices.")
    if devices is None:
        report = _conducted(out, chosen, source, peers, not no_solo, seed, means, seconds, page, console)
        return EXIT_FAILED if report.failures else 0
    if page is not None:
        raise click.UsageError("--page cannot be used with --devices, which runs two testnets.")
    with_several, plain = (
        _conducted(out / name, chosen, source, peers, False, seed, each, seconds, None, console)
        for name, each in (("several", replace(means, devices=devices, stages=stages)), ("plain", means))
    )
    for line in reports.devices_comparison(with_several, plain, devices):
        console.print(line, markup=False, soft_wrap=True)
    return EXIT_FAILED if with_several.failures or plain.failures else 0


def _conducted(
    out: Path,
    manifest: Manifest,
    source: Path | None,
    peers: int,
    solo: bool,
    seed: int | None,
    means: Means,
    seconds: float | None,
    page: str | None,
    console: Console,
) -> TestnetReport:
    """Run one testnet in its directory and print its report."""
    with claimed(out):
        plan = lay_out(out, manifest, peers, solo, seed, source=source)
        with Watch(plan.trainers, console) as watch:
            watch.say(_opening(plan))
            try:
                if page is not None and sys.stdout.isatty():
                    return _watched(plan, means, seconds, watch)
                return _finish(plan, means, _run(plan, means, seconds, watch), watch)
            except KeyboardInterrupt:
                watch.say("interrupted; all processes have stopped")
                raise


def _kept_weights(source: Path | None, manifest: Manifest) -> Path | None:
    """Return the folder of the initial weights that the run's directory keeps; None if it has none or names none."""
    is_kept = source is not None and any(stored(source, file.sha256) for file in named_weights(manifest))
    return source / FILES_FOLDER if source is not None and is_kept else None


def _refuse_mixtures(context: click.Context, is_scenario: bool) -> None:
    """Raise click.UsageError for options that have no effect with a scenario, or none without one."""
    without = ["preset", "manifest", "peers", "seconds", "no_solo", "devices", "stages", "seed"]
    without += ["weights"]
    wrong = [name for name in (without if is_scenario else ["stage", "changes"]) if _is_given(context, name)]
    if wrong:
        names = ", ".join("--set" if name == "changes" else f"--{name.replace('_', '-')}" for name in wrong)
        if is_scenario:
            raise click.UsageError(f"{names} cannot be used with --scenario: the scenario file defines the run.")
        raise click.UsageError(f"{names} needs --scenario.")


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is not ParameterSource.DEFAULT


def _opening(plan: Plan) -> str:
    manifest = plan.signed.manifest
    solo = " and a solo run to compare with" if plan.solo else ""
    return (
        f"{len(plan.peers)} peers{solo}; model of {parameter_count(manifest.model):,} parameters, "
        f"{manifest.run.tokens:,} tokens of all peers; output directory: {plan.out}"
    )


def _run(
    plan: Plan,
    means: Means,
    seconds: float | None,
    watch: Watch,
    afterwards: Callable[[Ending], Awaitable[None]] | None = None,
) -> Ending:
    """Run ``conduct`` in its own event loop. SIGTERM acts as Ctrl+C: the children end, then KeyboardInterrupt."""

    async def interruptible() -> Ending:
        task = asyncio.current_task()
        assert task is not None  # asyncio.run made it
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await conduct(plan, means, seconds, watch, afterwards)

    try:
        return asyncio.run(interruptible())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _watched(plan: Plan, means: Means, seconds: float | None, watch: Watch) -> TestnetReport:
    """Run the testnet, print its report, and keep the page open until Ctrl+C."""
    finished: list[TestnetReport] = []

    async def stay(ending: Ending) -> None:
        finished.append(_finish(plan, means, ending, watch))
        watch.say(f"the page stays open at {page_url(plan.bootstrap / 'output.log')} until Ctrl+C")
        await asyncio.get_running_loop().create_future()

    try:
        ending = _run(plan, means, seconds, watch, stay)
    except KeyboardInterrupt:
        if not finished:
            raise
        return finished[0]
    return _finish(plan, means, ending, watch)  # after a trouble the page does not stay open


def _finish(plan: Plan, means: Means, ending: Ending, watch: Watch) -> TestnetReport:
    watch.close()
    report = _report(plan, means, ending, watch.console)
    plan.summary.write_text(json.dumps(reports.summary(report), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    _show(report, plan, watch.console)
    return report


def _report(plan: Plan, means: Means, ending: Ending, console: Console) -> TestnetReport:
    measured, unmeasured = None, "the testnet ended early"
    if not ending.troubles:
        with console.status("averaging the peers' models"):
            from peer.testnet.measure import measure

            try:
                homes = [each.home for each in plan.peers]
                measured = measure(plan.signed, homes, means.threads)
            except UserError as error:
                unmeasured = error.problem
    return TestnetReport(
        peers=tuple(reports.outcome(each.name, each.home.summary) for each in plan.peers),
        solo=reports.outcome(plan.solo.name, plan.solo.home.summary) if plan.solo else None,
        ending=ending,
        measured=measured,
        unmeasured=unmeasured,
        seed=plan.signed.manifest.run.seed,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=reports.machine(),
    )


def _show(report: TestnetReport, plan: Plan, console: Console) -> None:
    console.print(reports.table(report))
    for line in reports.comparison(report):
        console.print(line, markup=False, soft_wrap=True)
    if report.measured is not None:
        console.rule("written by the averaged model", style="dim")
        console.print(report.measured.sample, markup=False, soft_wrap=True)
        console.rule(style="dim")
    console.print(f"{report.ending.wall_s:.0f} s; figures in {plan.summary}", markup=False, soft_wrap=True)
    if report.failures:
        console.print("FAILED:", style="bold red")
        for failure in report.failures:
            console.print(f"- {failure}", markup=False, soft_wrap=True)
        console.print(f"Output of each process: {plan.out}/*/output.log", markup=False, soft_wrap=True)
        return
    console.print(f"Checkpoints: {plan.out}/peer-*/checkpoints. Next steps:", markup=False, soft_wrap=True)
    for line in reports.next_steps(shlex.quote(_our_command()), plan.out, plan.signed.manifest.corpus):
        console.print(f"  {line}", markup=False, soft_wrap=True)


def _our_command() -> str:
    """Return how a shell finds this p2ptrain: by name, or by path in a virtual environment that is not active."""
    ours = Path(sys.executable).parent / "p2ptrain"
    found = shutil.which("p2ptrain")
    if found is not None and Path(found).absolute() == ours.absolute():
        return "p2ptrain"
    return os.path.relpath(ours) if ours.is_relative_to(Path.cwd()) else str(ours)
