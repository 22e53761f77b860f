"""Figures of a card: what fits, speed of training, cost of 16 bits in loss, cost of gossip in speed.

    python -m bench.card [--json FILE]        some minutes, on a machine with a card

placement  result and duration of ``train.autofit`` for each preset, and peak memory of a step
speed      tokens a second of an inner step: as found, in fp32, and one sequence at a time
learning   held-out loss after equal inner steps from equal weights, in 16 bits and in fp32
gossip     ``bench.trainer`` on the card: windows of training with and without exchanges
codecs     encoding a snapshot on the card, beside copying it to the host and encoding it there, as peers do

Not among the figures of ``python -m bench``: most machines have no card.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import torch

from bench.couple import language_model_task, manifest_of
from bench.environment import environment, where
from bench.trainer import Windows, measure_preset
from p2ptrain import codec
from p2ptrain.base.errors import DeviceError
from p2ptrain.codec import Codec
from p2ptrain.manifest import Manifest
from p2ptrain.tokens.opened import open_corpus, user_store
from p2ptrain.train import accelerator
from p2ptrain.train.accelerator import choose_device, half_type
from p2ptrain.train.autofit import Placement, place
from p2ptrain.train.evaluate import validation_loss
from p2ptrain.train.model import flat_model

PRESETS = ("demo", "llama-15m", "llama-135m")
WARM_UPS = 3
TIMED_STEPS = 10
LEARNING_STEPS = {"demo": 600, "llama-15m": 200}
SEEDS = (1, 2, 3)
HELD_OUT_TOKENS = 50_000
WINDOWS: Mapping[str, Windows] = {
    "demo": Windows(sequences_per_step=2, inner_steps=20, phases=30, pairs=5),
    "llama-15m": Windows(sequences_per_step=16, inner_steps=30, phases=8, pairs=5),
}
"""Steps and phases of the presets."""
ELEMENTS = 16 << 20
"""64 MiB of fp32."""
REPETITIONS = 5


def manifest(preset: str, seed: int = 1) -> Manifest:
    """Return the manifest of a preset with the built-in corpus, which needs no download."""
    shipped = manifest_of("llama-15m", {})
    text = {"corpus": shipped.corpus.model_dump(), "tokenizer": shipped.tokenizer.model_dump()}
    return manifest_of(preset, {"run.seed": seed, **text})


def placement(device: torch.device) -> dict[str, Any]:
    """Return by preset: dtype, sequences at once, seconds of the search, and peak memory of a step."""
    return {name: _placement(manifest(name), device) for name in PRESETS}


def _placement(described: Manifest, device: torch.device) -> dict[str, Any]:
    model = flat_model(described.model, described.run.seed, device)
    begin = time.perf_counter()
    found = place(model, described.model, described.training)
    searched_s = time.perf_counter() - begin
    del model
    task = language_model_task(described, device, found)
    if device.type in ("cuda", "xpu"):
        torch.accelerator.reset_peak_memory_stats(device)
    task.inner_step(0.0)
    peak = accelerator.peak_bytes(device)
    return {
        "parameters": len(task.theta),
        "computes_in": found.computes_in,
        "micro_batch": found.micro_batch,
        "micro_batch_after_a_step": task.micro_batch,
        "sequences_per_step": described.training.sequences_per_step,
        "searched_s": searched_s,
        "peak_gb": None if peak is None else peak / 1e9,
        "waits": waits(device, lambda: task.inner_step(0.0)),
    }


def waits(device: torch.device, work: Callable[[], object]) -> int | None:
    """Return how often operations of ``work`` make the host wait for a CUDA card; None for other devices.

    Waits for an event, as for the result of the step before, do not count.
    """
    if device.type != "cuda":
        return None
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(each.message) for each in found)


def speed(device: torch.device) -> dict[str, Any]:
    """Return tokens per second by preset and way of computing: median of some rounds, None if out of memory."""
    return {name: _speeds(manifest(name), device) for name in PRESETS}


def _speeds(described: Manifest, device: torch.device) -> dict[str, float | None]:
    model = flat_model(described.model, described.run.seed, device)
    found = place(model, described.model, described.training)
    del model
    ways = {
        "as found": found,
        "16 bits": replace(found, autocast=half_type(device)),
        "fp32": replace(found, autocast=None),  # the task halves what does not fit, in the warm-up
        "one sequence at a time": replace(found, micro_batch=1),
    }
    return {way: _tokens_per_s(described, device, each) for way, each in ways.items()}


def _tokens_per_s(described: Manifest, device: torch.device, how: Placement) -> float | None:
    try:
        task = language_model_task(described, device, how)
        seconds = []
        for steps in (WARM_UPS, *[TIMED_STEPS] * REPETITIONS):
            begin = time.perf_counter()
            for _ in range(steps):
                task.inner_step(0.0)
            accelerator.synchronize(device)  # once: a card has the next step before it has finished this one
            seconds.append(time.perf_counter() - begin)
    except DeviceError:
        return None
    return TIMED_STEPS * described.training.tokens_per_step / statistics.median(seconds[1:])


def learning(device: torch.device) -> dict[str, Any]:
    """Return by preset: held-out losses in fp32 and in 16 bits, a pair for each seed."""
    return {
        name: {
            "steps": steps,
            "before": _loss_after(manifest(name), device, None, 0),
            "fp32": [_loss_after(manifest(name, seed), device, None, steps) for seed in SEEDS],
            "16 bits": [_loss_after(manifest(name, seed), device, half_type(device), steps) for seed in SEEDS],
        }
        for name, steps in LEARNING_STEPS.items()
    }


def _loss_after(described: Manifest, device: torch.device, autocast: torch.dtype | None, steps: int) -> float:
    task = language_model_task(described, device, Placement(autocast, described.training.sequences_per_step))
    for step in range(steps):
        task.inner_step(float(step * described.training.tokens_per_step))
    return validation_loss(task.model.module, open_corpus(described, user_store(), None), HELD_OUT_TOKENS).value


def gossip(device: torch.device) -> dict[str, Any]:
    """Return the costs of ``bench.trainer`` by preset."""
    return {name: measure_preset(name, windows, device) for name, windows in WINDOWS.items()}


def codecs(device: torch.device) -> dict[str, Any]:
    """Return GB of fp32 per second from a snapshot on the card to a message on the host, and whether messages agree."""
    mine = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    names = codec.CODECS
    return {name: _encoding(codec.get(name), mine, mine.to(device)) for name in names}


def _encoding(each: Codec, mine: torch.Tensor, on_card: torch.Tensor) -> dict[str, Any]:
    shape = codec.first_shape(each, 0.01 * mine)
    proposals = codec.proposal_for(each, shape, mine), codec.proposal_for(each, shape, mine)
    terms = codec.agree(each, len(mine), *proposals)
    gigabytes = mine.nbytes / 1e9
    ways: dict[str, Callable[[], bytes]] = {
        "on_card": lambda: bytes(each.encode(on_card, terms)),
        "on_host": lambda: bytes(each.encode(on_card.cpu(), terms)),
    }
    said: dict[str, Any] = {}
    messages = []
    for way, encode in ways.items():
        try:
            messages.append(encode())
            said[f"{way}_gb_per_s"] = gigabytes / min(_seconds(encode) for _ in range(REPETITIONS))
        except (RuntimeError, TypeError) as error:
            said[f"{way}_fault"] = str(error).partition("\n")[0]
    said["messages_equal"] = len(messages) == len(ways) and messages[0] == messages[1]
    return said


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


PARTS: Mapping[str, Callable[[torch.device], dict[str, Any]]] = {
    "placement": placement,
    "speed": speed,
    "learning": learning,
    "gossip": gossip,
    "codecs": codecs,
}


# --- tables -----------------------------------------------------------------------------------------------------------


def lines(document: Mapping[str, Any]) -> list[str]:
    """Return the measured tables in Markdown."""
    tables = {"placement": _placement_rows, "speed": _speed_rows, "learning": _learning_rows}
    tables |= {"gossip": _gossip_rows, "codecs": _codec_rows}
    made = [f"{document['card']['name']}; {where(document['environment'])}"]
    for part, rows_of in tables.items():
        if part in document:
            heads, *rows = rows_of(document[part])
            made += ["", _row(heads), _row(["---"] * len(heads)), *map(_row, rows)]
    return made


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _placement_rows(found: Mapping[str, Any]) -> Iterator[list[str]]:
    yield [
        "preset",
        "parameters",
        "computes in",
        "sequences at once",
        "looked for",
        "peak of a step",
        "waits in a step",
    ]
    for name, each in found.items():
        fits = f"{each['micro_batch']} of {each['sequences_per_step']}"
        yield [
            name,
            f"{each['parameters']:,}",
            each["computes_in"],
            fits,
            f"{each['searched_s']:.1f} s",
            "not counted" if each["peak_gb"] is None else f"{each['peak_gb']:.1f} GB",
            "not counted" if each["waits"] is None else str(each["waits"]),
        ]


def _speed_rows(found: Mapping[str, Any]) -> Iterator[list[str]]:
    ways = list(next(iter(found.values())))
    yield ["preset, tokens/s", *ways]
    for name, each in found.items():
        yield [name, *(f"{each[way]:,.0f}" if each[way] else "out of memory" for way in ways)]


def _learning_rows(found: Mapping[str, Any]) -> Iterator[list[str]]:
    yield ["preset", "inner steps", "held-out loss before", "in fp32", "in 16 bits", "pairs' differences"]
    for name, each in found.items():
        gaps = [low - high for low, high in zip(each["16 bits"], each["fp32"], strict=True)]
        losses = (_spread(each["fp32"]), _spread(each["16 bits"]), _spread(gaps))
        yield [name, str(each["steps"]), f"{each['before']:.3f}", *losses]


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"


def _gossip_rows(found: Mapping[str, Any]) -> Iterator[list[str]]:
    yield ["preset", "exchanges", "time with them", "each blocks for", "of a phase, blocked", "of a phase, lost in all"]
    for name, each in found.items():
        yield [
            name,
            str(each["exchanges"]),
            f"{each['time_ratio']:.3f} of the time without",
            f"{1000 * each['blocked_s_per_exchange']:.1f} ms",
            f"{100 * each['preset_blocked_share']:.2f} %",
            f"{100 * each['preset_lost_share']:.2f} %",
        ]


def _codec_rows(found: Mapping[str, Any]) -> Iterator[list[str]]:
    yield ["codec", "encoded on the card", "copied and encoded on the host", "the same message"]
    for name, each in found.items():
        speeds = [each.get(f"{way}_gb_per_s") for way in ("on_card", "on_host")]
        shown = [f"{speed:.2f} GB/s" if speed else "not at all" for speed in speeds]
        yield [name, *shown, "yes" if each["messages_equal"] else "no"]


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(PARTS)), help="Measure only this; may be repeated.")
@click.option("--device", "device_name", default="auto", show_default=True)
@click.option("--json", "target", type=click.Path(dir_okay=False, path_type=Path), default=Path("out/card.json"))
def main(only: tuple[str, ...], device_name: str, target: Path) -> None:
    """Measure a card, print the figures as JSON and write them."""
    device = choose_device(device_name)
    if device.type == "cpu":
        raise click.ClickException("Nothing to measure: no card of this machine computes (`p2ptrain doctor` says why).")
    card = {
        "name": accelerator.product_name(device),
        "memory_gb": accelerator.total_bytes(device) / 1e9,
        "half": str(half_type(device)).removeprefix("torch."),
        "tf32": accelerator.has_tf32(device),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "xpu": torch.version.xpu,
    }
    document: dict[str, Any] = {"environment": environment(), "card": card, "windows": _windows()}
    target.parent.mkdir(parents=True, exist_ok=True)
    for name in only or PARTS:
        document[name] = PARTS[name](device)
        target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")  # keeps finished figures
    sys.stdout.write(json.dumps(document) + "\n")


def _windows() -> dict[str, Any]:
    return {name: asdict(each) for name, each in WINDOWS.items()}


if __name__ == "__main__":
    main()
