"""``p2ptrain testnet``: options in, exit status out."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Literal

import click
from click.core import ParameterSource
from rich.console import Console

from p2ptrain.base.errors import UserError
from p2ptrain.base.imports import package_of_clone
from p2ptrain.base.text import PLAIN_WIDTH, command_line
from p2ptrain.manifest import PRESETS, parameter_count
from p2ptrain.page.listen_address import ListenAddress, check_listen_address
from peer.options import WEIGHTS, FiniteRange
from peer.testnet import report as reports
from peer.testnet.plan import Plan, chosen_manifest, claimed, lay_out
from peer.testnet.report import TestnetReport
from peer.testnet.runner import Options, conduct
from peer.testnet.watch import Watch

EXIT_FAILED = 1
OF_RUN = ("preset", "manifest", "peers", "seconds", "no_solo", "devices", "seed", "weights")
"""Options that a scenario replaces."""


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
@click.option("--devices", metavar="DEVICE,…", help="Train the first peer on several devices, as cpu,cpu.")
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
    status is 1 if a peer did not learn, made no exchange or crashed. Ctrl+C stops everything.

    With --scenario, run that scenario with real peers instead and check the outcome against its limits
    (docs/LABORATORY.md in a clone). The exit status is 1 if a limit is missed.
    """
    wrong = [name for name in (OF_RUN if scenario else ("stage", "changes")) if _is_given(context, name)]
    if wrong:
        options = ", ".join("--set" if name == "changes" else f"--{name.replace('_', '-')}" for name in wrong)
        words = "cannot be used with --scenario: the scenario file defines the run" if scenario else "needs --scenario"
        raise click.UsageError(f"{options} {words}.")
    if scenario is not None:
        run_scenario = package_of_clone("lab", "--scenario").run_scenario
        place = out if _is_given(context, "out") else Path("out/lab") / scenario.stem
        return run_scenario(scenario, changes, stage, place, threads, page or "")
    chosen = chosen_manifest(preset, manifest, seed)
    if page is not None:
        check_listen_address(ListenAddress.parse(page))  # before an earlier testnet is replaced
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    source = None if manifest is None else manifest if manifest.is_dir() else manifest.parent
    names = [f"peer-{number}" for number in range(1, peers + 1)]
    with claimed(out):
        plan = lay_out(out, chosen, names, not no_solo, source)
        report = _conducted(plan, Options(threads, seconds, weights, page, devices), console)
        document = json.dumps(reports.summary(report), indent=1, allow_nan=False)
        (out / "summary.json").write_text(document + "\n", encoding="utf-8")
        _show(report, plan, console)
    return EXIT_FAILED if report.failures else 0


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is not ParameterSource.DEFAULT


def _print(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _conducted(plan: Plan, options: Options, console: Console) -> TestnetReport:
    """Run a testnet and measure what it trained."""
    watch, manifest = Watch(plan.trainers, console), plan.signed.manifest
    solo = " and a solo run to compare with" if plan.solo else ""
    watch.say(
        f"{len(plan.peers)} peers{solo}; model of {parameter_count(manifest.model):,} parameters, "
        f"{manifest.run.tokens:,} tokens of all peers; output directory: {plan.out}"
    )
    try:
        ending = asyncio.run(conduct(plan, options, watch))
    except (KeyboardInterrupt, asyncio.CancelledError):
        watch.say("interrupted; all processes have stopped")
        raise KeyboardInterrupt from None
    measured, unmeasured = None, "the testnet ended early"
    if not ending.troubles:
        from peer.testnet.measure import measure

        try:
            measured = measure(plan.signed, [each.home for each in plan.peers], options.threads)
        except UserError as error:
            unmeasured = error.problem
    peers, alone = reports.figures_of(plan.peers), reports.figures_of([plan.solo] if plan.solo else [])
    return TestnetReport(peers, alone, ending, measured, unmeasured, manifest.run.seed)


def _show(report: TestnetReport, plan: Plan, console: Console) -> None:
    console.print(reports.table(report))
    _print(console, *reports.comparison(report))
    if report.measured is not None:
        console.rule("written by the averaged model", style="dim")
        _print(console, report.measured.sample)
        console.rule(style="dim")
    _print(console, f"{report.ending.wall_s:.0f} s; figures in {plan.out / 'summary.json'}")
    if report.failures:
        console.print("FAILED:", style="bold red")
        _print(console, *(f"- {failure}" for failure in report.failures))
        _print(console, f"Output of each process: {plan.out}/*/output.log")
        return
    ours, home = _our_command(), plan.out / "peer-1"
    is_dialogue = plan.signed.manifest.corpus.kind == "shards" and plan.signed.manifest.corpus.template
    words: list[str | Path] = ["chat", home] if is_dialogue else ["generate", home, "How the text begins"]
    _print(
        console,
        f"Checkpoints: {plan.out}/peer-*/checkpoints. Next steps:",
        f"  {command_line(ours, *words)}",
        f"  {command_line(ours, 'export', home, plan.out / 'exported')}",
    )


def _our_command() -> str:
    """Return how a shell finds this p2ptrain: by name, or by path in a virtual environment that is not active."""
    ours = Path(sys.executable).absolute().with_name("p2ptrain")
    found = shutil.which("p2ptrain")
    return "p2ptrain" if found is not None and Path(found).absolute() == ours else os.path.relpath(ours)
