"""Speed of training beside a plain compiled loop of the same shape.

    python -m bench.throughput [--preset demo …] [--optimizer muon …] [--threads 1 …] [--device auto] [--json FILE]

Presets are measured as they ship, with Muon, and with AdamW beside; the plain loop has the same optimizer, of torch.

``ours`` is a peer's inner step (``train/inner.py``) with its text, clipping and schedule, without a swarm; it trains
until its background compiler is done, from an empty cache. ``plain`` is ``bench/plain.py`` with the same shape of
weights, sequences, micro-batch and dtype. Each side is a process of its own. Both live at once, but only one computes:
windows alternate, so that what else the machine does meets both alike.

Reported: tokens per second of each side (median of its windows), the ratio of each pair of windows (median, lowest,
highest), seconds from the start of the process to the end of its first step and to full speed, peak memory, and on
known cards the share of the peak of dense matrix products (MFU). On a CPU, ``llama-135m`` has short steps of one short
sequence.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import click
import torch

from bench.card import manifest
from bench.couple import language_model_task
from bench.environment import environment
from bench.plain import LlamaShape, PlainLlama, stepper
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.manifest import Manifest, with_changes
from p2ptrain.train import accelerator
from p2ptrain.train.accelerator import choose_device
from p2ptrain.train.autofit import Placement, place
from p2ptrain.train.compiling import BackgroundCompiler, CompileMode
from p2ptrain.train.model import flat_model

PRESETS = ("demo", "llama-15m", "llama-135m")
OPTIMIZERS = ("muon", "adamw")
"""The presets' own, and the usual one."""
WINDOW_S = 4.0
"""Duration of a window, in seconds, of at least one step."""
PAIRS = 7
WARM_UPS = 3
"""Steps before the first window, the first of which may compile."""
SHORTENED = {"training.sequences_per_step": 1, "training.sequence_length": 512}
"""Changes to ``llama-135m`` on a CPU, whose full step would take minutes."""
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "T4": 65e12}
"""Dense products in 16 bits with sums in fp32, per second, by part of the card's name: NVIDIA's data sheets (SXM)."""


def described(preset: str, device: torch.device, optimizer: str) -> Manifest:
    whole = with_changes(manifest(preset), {"training.optimizer": optimizer})
    return with_changes(whole, SHORTENED) if preset == "llama-135m" and device.type == "cpu" else whole


def shape_of(run: Manifest) -> LlamaShape:
    return LlamaShape(**{each.name: getattr(run.model.config, each.name) for each in fields(LlamaShape)})


def flops_per_token(parameters: int, run: Manifest) -> float:
    """Return the operations of a forward and backward pass: 6 P, and attention (Chowdhery et al., arXiv 2204.02311)."""
    config = run.model.config
    return 6.0 * parameters + 12.0 * config.num_hidden_layers * config.hidden_size * run.training.sequence_length


# --- one side, in its own process -------------------------------------------------------------------------------------

Step = Callable[[], object]


def ours(run: Manifest, device: torch.device, stack: ExitStack) -> tuple[Step, Placement, BackgroundCompiler]:
    """Return the peer's inner step and its compiler, which works until ``stack`` closes."""
    how = placed(run, device)
    task = language_model_task(run, device, how)
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    mode: CompileMode = "on" if device.type in ("cpu", "cuda") else "off"
    compiler = BackgroundCompiler(task, run.model, mode, directory / "compiled", MemoryLog())
    stack.enter_context(compiler)
    return lambda: task.inner_step(task.step * run.training.tokens_per_step), how, compiler


def plain(run: Manifest, device: torch.device, compiled: bool) -> tuple[Step, Placement, None]:
    config, training, how = run.model.config, run.training, placed(run, device)
    model = PlainLlama(shape_of(run), training.sequence_length).to(device)
    step = stepper(model, how.micro_batch, training.learning_rate, how.autocast, compiled, training.optimizer)
    length = training.sequences_per_step * (training.sequence_length + 1)
    text = torch.randint(config.vocab_size, (64 * length,), generator=torch.Generator().manual_seed(1))
    taken = 0

    def one() -> None:
        nonlocal taken
        at = taken % 64 * length
        taken += 1
        step(text[at : at + length].view(training.sequences_per_step, -1))

    return one, how, None


def placed(run: Manifest, device: torch.device) -> Placement:
    """Return the dtype and micro-batch that a peer would choose; both sides get the same."""
    return place(flat_model(run.model, run.run.seed, device), run.model, run.training)


def serve(side: str, preset: str, optimizer: str, device_name: str, threads: int, started: float) -> None:
    """Make windows of steps, one for each line of standard input, and print what they took."""
    torch.set_num_threads(threads)
    device = choose_device(device_name)
    run = described(preset, device, optimizer)
    with ExitStack() as stack:
        is_plain = side == "plain"
        step, how, compiler = ours(run, device, stack) if side == "ours" else plain(run, device, compiled=is_plain)

        def made(count: int) -> float:
            began = time.perf_counter()
            for _ in range(count):
                step()
            accelerator.synchronize(device)
            return time.perf_counter() - began

        made(1)
        first_s = time.time() - started
        while compiler is not None and not compiler.is_final:
            made(1)
        made(1)  # takes the compiled pass
        full_s = time.time() - started
        made(WARM_UPS - 1)
        steps = max(1, round(WINDOW_S / made(1)))
        said = {"first_step_s": first_s, "full_speed_s": full_s, "computes_in": how.computes_in}
        tell({**said, "micro_batch": how.micro_batch, "compiler": "" if compiler is None else compiler.state})
        for _ in sys.stdin:
            speed = steps * run.training.tokens_per_step / made(steps)
            tell({"tokens_per_s": speed, "peak_bytes": peak_bytes(device)})


def tell(figures: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


def peak_bytes(device: torch.device) -> int:
    if (peak := accelerator.peak_bytes(device)) is not None:
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# --- both sides -------------------------------------------------------------------------------------------------------


class SideProcess:
    """Process that computes when asked."""

    def __init__(self, name: str, preset: str, optimizer: str, device: str, threads: int) -> None:
        words = [sys.executable, "-m", "bench.throughput", "--serve", name, "--optimizer", optimizer]
        words += ["--preset", preset, "--device", device, "--threads", str(threads), "--started", str(time.time())]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ready = self._said()

    def window(self) -> Mapping[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._said()

    def _said(self) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise click.ClickException(f"the process ended with status {self._process.wait()}")
        said: Mapping[str, Any] = json.loads(line)
        return said

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(preset: str, optimizer: str, device: str, threads: int, sides: tuple[str, str]) -> dict[str, Any]:
    """Return the figures of both sides, by name, and the ratios of the first side's speed to the second's."""
    running = {}
    try:
        for name in sides:
            running[name] = SideProcess(name, preset, optimizer, device, threads)
        windows: dict[str, list[Mapping[str, Any]]] = {name: [] for name in sides}
        for number in range(PAIRS):
            for name in sides if number % 2 else reversed(sides):
                windows[name].append(running[name].window())
    finally:
        for side in running.values():
            side.end()
    speeds = {name: [each["tokens_per_s"] for each in windows[name]] for name in sides}
    ratios = [one / other for one, other in zip(*(speeds[name] for name in sides), strict=True)]
    found: dict[str, Any] = {
        "preset": preset,
        "optimizer": optimizer,
        "threads": threads,
        "ratio": statistics.median(ratios),
    }
    found |= {"ratio_lowest": min(ratios), "ratio_highest": max(ratios)}
    for name in sides:
        last = windows[name][-1]
        speed = statistics.median(speeds[name])
        found[name] = {**running[name].ready, "tokens_per_s": speed, "peak_bytes": last["peak_bytes"]}
        found[name]["mfu"] = mfu(preset, device, speed)
    return found


def mfu(preset: str, device_name: str, tokens_per_s: float) -> float | None:
    """Return the share of the card's peak; None on a CPU and on cards that ``PEAK_FLOPS`` does not name."""
    device = choose_device(device_name)
    if device.type == "cpu":
        return None
    name = accelerator.product_name(device)
    run = described(preset, device, OPTIMIZERS[0])
    for part, peak in PEAK_FLOPS.items():
        if part in name:
            parameters = sum(each.numel() for each in flat_model(run.model, 0, torch.device("cpu")).module.parameters())
            return tokens_per_s * flops_per_token(parameters, run) / peak
    return None


@click.command()
@click.option("--preset", "presets", multiple=True, type=click.Choice(PRESETS), default=PRESETS, show_default=True)
@click.option(
    "--optimizer", "optimizers", multiple=True, type=click.Choice(OPTIMIZERS), default=OPTIMIZERS, show_default=True
)
@click.option("--threads", "threads", multiple=True, type=int, default=(1, 2), help="Threads; a card needs one.")
@click.option("--device", default="auto", show_default=True)
@click.option("--against", default="plain", type=click.Choice(["plain", "eager"]), help="eager: without a compiler.")
@click.option("--json", "target", type=click.Path(dir_okay=False, path_type=Path), default=Path("out/throughput.json"))
@click.option("--serve", "serve_as", type=click.Choice(["ours", "plain", "eager"]), hidden=True)
@click.option("--started", type=float, default=0.0, hidden=True)
def main(
    presets: tuple[str, ...],
    optimizers: tuple[str, ...],
    threads: tuple[int, ...],
    device: str,
    against: str,
    target: Path,
    serve_as: str | None,
    started: float,
) -> None:
    """Compare the presets on this machine, print a line for each and write the figures as JSON."""
    if serve_as is not None:
        serve(serve_as, presets[0], optimizers[0], device, threads[0], started)
        return
    document: dict[str, Any] = {"environment": environment(), "compared": []}
    target.parent.mkdir(parents=True, exist_ok=True)
    counts = threads if choose_device(device).type == "cpu" else (1,)
    for preset, optimizer, count in product(presets, optimizers, counts):
        found = compare(preset, optimizer, device, count, ("ours", against))
        document["compared"].append(found)
        target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")  # keeps finished figures
        click.echo(line(found, against))


def line(found: Mapping[str, Any], against: str) -> str:
    """Return one comparison as a row of Markdown."""
    ours, other = found["ours"], found[against]
    speeds = f"{ours['tokens_per_s']:,.0f} | {other['tokens_per_s']:,.0f}"
    ratio = f"{found['ratio']:.2f} ({found['ratio_lowest']:.2f} to {found['ratio_highest']:.2f})"
    memory = f"{ours['peak_bytes'] / 1e9:.2f} and {other['peak_bytes'] / 1e9:.2f} GB"
    first = (
        f"{ours['first_step_s']:.1f} and {other['first_step_s']:.1f} s, full speed after {ours['full_speed_s']:.0f} s"
    )
    share = f" | {ours['mfu']:.1%} and {other['mfu']:.1%}" if ours["mfu"] else ""
    of = f"{found['threads']} thread{'s' if found['threads'] != 1 else ''}"
    return f"| {found['preset']}, {found['optimizer']}, {of} | {speeds} | {ratio} | {memory} | {first}{share} |"


if __name__ == "__main__":
    main()
