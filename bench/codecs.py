"""How fast the codecs are, on one core and beside a plain memory copy of the same snapshot.

``python bench/codecs.py`` prints a table, then the same figures as JSON; ``measure()`` returns them. All speeds are in
GB of fp32 snapshot a second, the best of a few repetitions, buffers allocated anew each time as in real use.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import click
import torch

from p2ptrain import codec
from p2ptrain.codec import Codec, CodecTerms

ELEMENTS = 16 << 20
"""64 MiB of fp32: larger than any cache."""

REPETITIONS = 5

REQUIRED_GB_PER_S = 0.7
"""What int8 must reach both ways on one core: gossip then costs a small part of a core on any home line."""

CANDIDATES: dict[str, Codec] = {
    "fp32": codec.get("fp32"),
    "bf16": codec.get("bf16"),
    "int8": codec.get("int8"),
    "int8, block 256": codec.get("int8", block_size=256),
    "int8, block 64": codec.get("int8", block_size=64),
}


def measure(elements: int = ELEMENTS, repetitions: int = REPETITIONS) -> dict[str, Any]:
    """Speeds, ratios to memcpy, sizes and relative errors of all codecs on normally distributed weights."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        generator = torch.Generator().manual_seed(0)
        mine = torch.randn(elements, generator=generator)
        theirs = mine + 0.01 * torch.randn(elements, generator=generator)
        gigabytes = elements * mine.element_size() / 1e9
        memcpy = gigabytes / _best_seconds(mine.clone, repetitions)
        rows = {label: _measure_codec(each, mine, theirs, memcpy, repetitions) for label, each in CANDIDATES.items()}
    finally:
        torch.set_num_threads(threads)
    slower = min(rows["int8"]["encode_gb_per_s"], rows["int8"]["difference_gb_per_s"])
    return {
        "elements": elements,
        "memcpy_gb_per_s": memcpy,
        "codecs": rows,
        "int8_required_gb_per_s": REQUIRED_GB_PER_S,
        "int8_meets_requirement": slower >= REQUIRED_GB_PER_S,
    }


def _measure_codec(
    each: Codec, mine: torch.Tensor, theirs: torch.Tensor, memcpy_gb_per_s: float, repetitions: int
) -> dict[str, float]:
    terms = CodecTerms(len(mine))
    gigabytes = mine.numel() * mine.element_size() / 1e9
    message_mine, message_theirs = each.encode(mine, terms), each.encode(theirs, terms)
    encode = gigabytes / _best_seconds(lambda: each.encode(mine, terms), repetitions)
    difference = gigabytes / _best_seconds(lambda: each.difference(message_mine, message_theirs, terms), repetitions)
    error = each.difference(message_mine, message_theirs, terms) - (theirs - mine)
    return {
        "encode_gb_per_s": encode,
        "encode_per_memcpy": encode / memcpy_gb_per_s,
        "difference_gb_per_s": difference,
        "difference_per_memcpy": difference / memcpy_gb_per_s,
        "bits_per_element": 8 * len(message_mine) / terms.elements,
        "error_per_weight": float(error.norm() / mine.norm()),
    }


def _best_seconds(call: Callable[[], object], repetitions: int) -> float:
    """The shortest of some calls after one to warm up: what the machine can do when others leave it alone."""
    call()
    seconds = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def main() -> None:
    figures = measure()
    click.echo(f"memory copy {figures['memcpy_gb_per_s']:.1f} GB/s of fp32, one core, {figures['elements']} elements")
    click.echo(f"{'codec':16} {'encode':>14} {'difference':>14} {'bits':>7} {'error/weight':>13}")
    for label, row in figures["codecs"].items():
        encode = f"{row['encode_gb_per_s']:.2f} ({row['encode_per_memcpy']:.2f}x)"
        difference = f"{row['difference_gb_per_s']:.2f} ({row['difference_per_memcpy']:.2f}x)"
        bits, error = row["bits_per_element"], row["error_per_weight"]
        click.echo(f"{label:16} {encode:>14} {difference:>14} {bits:7.3f} {error:13.2e}")
    click.echo(json.dumps(figures))


if __name__ == "__main__":
    main()
