"""Speed of a team of CPU ranks: beside one process on the same cores, and on a shaped line between two hosts.

    python -m bench.team_pipeline box [--pairs 12] [--exact]
    python -m bench.team_pipeline compiled [--pairs 12] [--exact] [--device cuda:0]
    python -m bench.team_pipeline line [--mbit-s 100] [--width 256]

``box``: two ranks of one thread each, and one process with two threads, make inner steps of llama-15m in turn, each as
a peer would compute it: autocast type, micro-batch and cut by its own trials. ``--exact``: both in fp32.

``compiled``: the same two ranks, with their stages compiled and eager in turn.

``line`` (Linux and root): two ranks on hosts of the laboratory (``lab.hosts``), whose line tbf limits both ways, for
each form of the activations, with and without a longer warm-up. The bound is the nominal rate over the bytes of a
token in one direction; headers take 4 to 5 % of the rate. The last column is the speed on the same hosts without limit.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import psutil
import torch

from bench.environment import ROOT, environment
from bench.goodput_line import STOP_S
from bench.large_team import corpus
from lab.cell import run_in_cell, unblock_sigterm
from lab.hosts import Access, Network
from lab.namespaces import check_support
from p2ptrain.base.ids import PeerId
from p2ptrain.manifest import Manifest, preset, with_changes
from p2ptrain.train import accelerator
from p2ptrain.train.autofit import CPU_ACTIVATION_BYTES, Placement, place
from p2ptrain.train.batches import CorpusReader
from p2ptrain.train.boundary import BOUNDARIES, Boundary
from p2ptrain.train.inner import LanguageModelTask
from p2ptrain.train.model import flat_model
from p2ptrain.train.pipeline import PipelineTask
from p2ptrain.train.stages import equal_cut, stage_model
from p2ptrain.train.team_group import Rendezvous, TeamGroup
from peer.team.agreement import agree

CPU = torch.device("cpu")
RANKS = 2
TIMEOUT_S = 60.0
LINE_STEPS = 5
Order = dict[str, Any]
"""What a process does next: one line of JSON."""


def manifest(training: Mapping[str, int] | None = None, **config: int) -> Manifest:
    changes: dict[str, Any] = {"outer.cut": "layers", "training.optimizer": "adamw"}
    changes |= {f"model.config.{name}": value for name, value in config.items()}
    changes |= {f"training.{name}": value for name, value in (training or {}).items()}
    return with_changes(preset("llama-15m", "ab" * 32), changes)


def rest(run: Manifest) -> tuple[Any, ...]:
    """Return the arguments that both kinds of tasks take last, but for the placement."""
    return corpus(run), run.training, run.run.tokens, CorpusReader(run.run.seed, PeerId("amber"))


# --- processes --------------------------------------------------------------------------------------------------------


class OrderedProcess:
    """One process that follows orders."""

    def __init__(self, command: Sequence[str], threads: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def tell(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise click.ClickException("a process failed; its errors are above")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def child(*words: str) -> list[str]:
    return [sys.executable, "-m", "bench.team_pipeline", "child", *words]


def together(processes: Sequence[OrderedProcess], **order: Any) -> list[Any]:
    for each in processes:
        each.tell(**order)
    return [each.answer() for each in processes]


def follow(do: Callable[[Order], Any]) -> None:
    """Do what the lines of standard input say, and print each result."""
    for line in sys.stdin:
        click.echo(json.dumps(do(json.loads(line))))


def timed(task: LanguageModelTask, steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        task.inner_step(0)
    accelerator.synchronize(task.theta.device)
    return time.perf_counter() - began


@click.group()
def main() -> None:
    """Measure the speed of a team's pipeline."""


@main.command(name="child", hidden=True)
@click.argument("kind")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("rank", type=int)
@click.argument("address", default="127.0.0.1")
def run_child(kind: str, folder: Path, rank: int, address: str) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    {"whole": whole, "rank": box_rank, "line": line_rank}[kind](folder, rank, address)


# --- box --------------------------------------------------------------------------------------------------------------


def whole(folder: Path, rank: int, address: str) -> None:
    run = manifest()
    model = flat_model(run.model, run.run.seed, CPU)
    tasks = {}

    def do(order: Order) -> Any:
        if "exact" in order:
            how = Placement(None, 4) if order["exact"] else place(model, run.model, run.training)
            tasks["it"] = LanguageModelTask(model, *rest(run), how)
            return [how.computes_in, how.micro_batch]
        return timed(tasks["it"], order["steps"])

    follow(do)


def box_rank(folder: Path, rank: int, address: str) -> None:
    run = manifest()
    group = TeamGroup(Rendezvous(folder, rank, RANKS), TIMEOUT_S)
    tasks: dict[str, PipelineTask] = {}
    ways: dict[str, Any] = {}

    def do(order: Order) -> Any:
        if "exact" in order:
            device, most = torch.device(order.get("device", "cpu")), run.training.sequences_per_step
            agreed = agree(group, run, device, CPU_ACTIVATION_BYTES // RANKS, most, (), RANKS)
            how = Placement(
                None if order["exact"] else agreed.placement.autocast,
                order["micro_batch"] or agreed.placement.micro_batch,
            )
            model = stage_model(run.model, run.run.seed, device, agreed.stages[rank])
            tasks["it"] = PipelineTask(model, group, *rest(run), how, agreed.boundary, agreed.is_eager)
            return [how.computes_in, how.micro_batch, str(agreed.stages[rank].blocks)]
        task = tasks["it"]
        if "compile" in order:
            return compiled_stage(task, run, folder / f"{rank}.so")
        if "compiled" in order:
            task.compiled = ways["compiled"] if order["compiled"] else None
        if order["steps"] == 0:  # what the comparison has chosen; None: it goes on
            ways["compiled"] = task.compiled
            return None if task.compiled.choice.is_timing else task.compiled.choice.begin() or "eager"
        return timed(task, order["steps"])

    follow(do)
    group.close()


def compiled_stage(task: PipelineTask, run: Manifest, library: Path) -> float:
    """Compile the rank's stage and let the task compare it; return the seconds."""
    shape, began = task.pass_shape(run.model), time.perf_counter()
    command = [sys.executable, "-m", "p2ptrain.train.pass_compiler", str(library)]
    subprocess.run(command, input=json.dumps(asdict(shape)).encode(), check=True)
    task.offer(library, shape, lambda way, ratio: None, lambda why: None)
    return round(time.perf_counter() - began, 1)


@main.command()
@click.option("--pairs", default=12, show_default=True, type=click.IntRange(min=2))
@click.option("--exact", is_flag=True, help="Compute in fp32 on both sides.")
@click.option("--micro-batch", default=0, help="Of the team; 0: as its ranks agree.")
def box(pairs: int, exact: bool, micro_batch: int) -> None:
    """Compare two ranks of one thread with one process of two threads."""
    tokens = manifest().training.tokens_per_step
    with tempfile.TemporaryDirectory() as folder:
        one = OrderedProcess(child("whole", folder, "0"), RANKS)
        ranks = [OrderedProcess(child("rank", folder, str(rank)), 1) for rank in range(RANKS)]
        try:
            one.tell(exact=exact)
            click.echo(f"one process: {one.answer()}", err=True)
            click.echo(f"team: {together(ranks, exact=exact, micro_batch=micro_batch)}", err=True)
            seconds: dict[str, list[float]] = {"one": [], "team": []}
            for number in range(pairs + 1):
                for kind in ("one", "team") if number % 2 else ("team", "one"):
                    took_s = max(together([one] if kind == "one" else ranks, steps=1))
                    if number:
                        seconds[kind].append(took_s)
        finally:
            for each in (one, *ranks):
                each.close()
    ratios = sorted(alone / team for alone, team in zip(seconds["one"], seconds["team"], strict=True))
    speeds = {kind: round(tokens / statistics.median(each)) for kind, each in seconds.items()}
    found = {"tokens_per_s": speeds, "ratio": round(statistics.median(ratios), 3)}
    quarters = statistics.quantiles(ratios, n=4)
    found |= {"quarters": [round(quarters[0], 3), round(quarters[2], 3)], "pairs": pairs, **environment()}
    click.echo(json.dumps(found, indent=1))


@main.command()
@click.option("--pairs", default=12, show_default=True, type=click.IntRange(min=2))
@click.option("--exact", is_flag=True, help="Compute in fp32.")
@click.option("--micro-batch", default=0, help="0: as the ranks agree.")
@click.option("--device", default="cpu", show_default=True, help="Of both ranks.")
def compiled(pairs: int, exact: bool, micro_batch: int, device: str) -> None:
    """Compare two ranks with compiled stages and the same with eager ones."""
    tokens = manifest().training.tokens_per_step
    with tempfile.TemporaryDirectory() as folder:
        ranks = [OrderedProcess(child("rank", folder, str(rank)), 1) for rank in range(RANKS)]
        try:
            click.echo(f"team: {together(ranks, exact=exact, micro_batch=micro_batch, device=device)}", err=True)
            click.echo(f"compiled in {together(ranks, compile=True)} s", err=True)
            while None in (chosen := together(ranks, steps=0)):
                together(ranks, steps=1)
            click.echo(f"chosen: {chosen}", err=True)
            seconds: dict[bool, list[float]] = {True: [], False: []}
            for number in range(pairs + 1):
                for way in (True, False) if number % 2 else (False, True):
                    took_s = max(together(ranks, compiled=way, steps=1))
                    if number:
                        seconds[way].append(took_s)
        finally:
            for each in ranks:
                each.close()
    ratios = sorted(eager / own for eager, own in zip(seconds[False], seconds[True], strict=True))
    quarters = statistics.quantiles(ratios, n=4)
    names = {"compiled": True, "eager": False}
    found: dict[str, Any] = {
        "tokens_per_s": {name: round(tokens / statistics.median(seconds[way])) for name, way in names.items()},
        "ratio": round(statistics.median(ratios), 3),
        "quarters": [round(quarters[0], 3), round(quarters[2], 3)],
        "chosen": chosen,
        "pairs": pairs,
        **environment(),
    }
    click.echo(json.dumps(found, indent=1))


# --- line -------------------------------------------------------------------------------------------------------------


def line_rank(folder: Path, rank: int, address: str) -> None:
    named = [
        name for name, addresses in psutil.net_if_addrs().items() if address in [each.address for each in addresses]
    ]

    def do(order: Order) -> Any:
        run = manifest(order["training"], **order["config"])
        model = stage_model(run.model, run.run.seed, CPU, equal_cut(run.model.config.num_hidden_layers, RANKS)[rank])
        group = TeamGroup(Rendezvous(folder, rank, RANKS, order["generation"], interface=named[0]), TIMEOUT_S)
        how = Placement(torch.bfloat16 if order["half"] else None, order["micro_batch"])
        task = PipelineTask(model, group, *rest(run), how, Boundary(order["boundary"]), order["is_eager"])
        try:
            timed(task, 1)
            return timed(task, LINE_STEPS) / LINE_STEPS
        finally:
            group.close()

    follow(do)


def inside(folder: Path, order: Order, mbit_s: float) -> None:
    """Measure each form on a shaped line and on one without limit; write ``seconds.json``."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    unblock_sigterm()
    generation, seconds = 0, []
    for limit in (mbit_s, None):
        with Network() as network:
            hosts = [network.add(name, Access(limit, limit)) for name in ("near", "far")]
            ranks = [
                OrderedProcess(host.inside(*child("line", str(folder), str(rank), host.address)), 1)
                for rank, host in enumerate(hosts)
            ]
            try:
                for boundary in reversed(BOUNDARIES):
                    for is_eager in (True, False):
                        generation += 1
                        words = {**order, "boundary": boundary.name, "is_eager": is_eager, "generation": generation}
                        seconds.append([limit, boundary.name, is_eager, max(together(ranks, **words))])
            finally:
                for each in ranks:
                    each.close()
    (folder / "seconds.json").write_text(json.dumps(seconds))


@main.command()
@click.option("--mbit-s", default=100.0, show_default=True, help="Each way.")
@click.option("--width", default=256, show_default=True, help="Of the residual stream.")
@click.option("--layers", default=2, show_default=True)
@click.option("--tokens", default=64, show_default=True, help="Of a sequence.")
@click.option("--sequences", default=256, show_default=True, help="Of an inner step.")
@click.option("--micro-batch", default=4, show_default=True)
@click.option("--half/--exact", default=True, show_default=True, help="Compute in bf16 or fp32.")
@click.option("--inside", "cell", type=click.Path(path_type=Path), hidden=True)
def line(
    mbit_s: float,
    width: int,
    layers: int,
    tokens: int,
    sequences: int,
    micro_batch: int,
    half: bool,
    cell: Path | None,
) -> None:
    """Compare a team's speed on a shaped line with the line's bound."""
    config = {
        "hidden_size": width,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    training = {"sequences_per_step": sequences, "sequence_length": tokens}
    order = {"training": training, "micro_batch": micro_batch, "half": half, "config": config}
    if cell is not None:
        inside(cell, order, mbit_s)
        return
    check_support()
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--mbit-s={mbit_s}", f"--width={width}", f"--layers={layers}", f"--sequences={sequences}"]
        words += [f"--tokens={tokens}", f"--micro-batch={micro_batch}", "--half" if half else "--exact"]
        words.append(f"--inside={folder}")
        command = [sys.executable, "-m", "bench.team_pipeline", "line", *words]
        if status := run_in_cell(command, STOP_S, PYTHONPATH=str(ROOT)):
            raise click.ClickException(f"the inside ended with status {status}; see its output above")
        seconds = json.loads((Path(folder) / "seconds.json").read_bytes())
    free = {(name, is_eager): sequences * tokens / took_s for limit, name, is_eager, took_s in seconds if limit is None}
    for limit, name, is_eager, took_s in seconds:
        if limit is not None:
            bound = limit * 1e6 / 8 / Boundary(name).bytes_per_token(width)
            speed = sequences * tokens / took_s
            click.echo(
                f"{name} {'eager' if is_eager else 'plain'}: {speed:,.0f} of {bound:,.0f} tokens/s"
                f" = {speed / bound:.3f}; without limit {free[name, is_eager]:,.0f}"
            )
    click.echo(json.dumps(environment()))


if __name__ == "__main__":
    main()
