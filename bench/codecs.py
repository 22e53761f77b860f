"""Speed of the codecs on one core, beside a plain memory copy of the same snapshot.

``python bench/codecs.py`` prints a table and the same figures as JSON. Speeds are in GB of fp32 snapshot per second,
the best of a few repetitions, with new buffers each time as in real use. The two snapshots differ by a hundredth of
their size. For topk and lowrank the error is what error feedback carries on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import click
import torch

from p2ptrain import codec
from p2ptrain.codec import Codec

ELEMENTS = 16 << 20
"""64 MiB of fp32: larger than any cache."""

REPETITIONS = 5

REQUIRED_GB_PER_S = 0.7
"""Required speed in both directions on one core: gossip then costs a small part of a core on any home line."""

REQUIRED_OF = ("int8", "modular4")
"""Codecs with a requirement: those of the presets."""

CANDIDATES: dict[str, Codec] = {
    **{name: codec.get(name) for name in codec.CODECS},
    "int8, block 256": codec.get("int8", block_size=256),
    "int8, block 64": codec.get("int8", block_size=64),
    "modular4, block 256": codec.get("modular4", block_size=256),
}


_SETTLING_EXCHANGES = 2
"""Exchanges until the step widths of the modular codecs fit the disagreement."""


def measure(elements: int = ELEMENTS, repetitions: int = REPETITIONS) -> dict[str, Any]:
    """Return speeds, ratios to memcpy, sizes and relative errors of all codecs on normally distributed weights."""
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
    slowest = min(rows[name][f"{way}_gb_per_s"] for name in REQUIRED_OF for way in ("encode", "difference"))
    return {
        "elements": elements,
        "memcpy_gb_per_s": memcpy,
        "codecs": rows,
        "required_of": REQUIRED_OF,
        "required_gb_per_s": REQUIRED_GB_PER_S,
        "meets_requirement": slowest >= REQUIRED_GB_PER_S,
    }


def _measure_codec(
    each: Codec, mine: torch.Tensor, theirs: torch.Tensor, memcpy_gb_per_s: float, repetitions: int
) -> dict[str, float]:
    reference = theirs - mine
    shape = codec.first_shape(each, reference)
    for _ in range(_SETTLING_EXCHANGES + 1):
        proposals = codec.proposal_for(each, shape, mine), codec.proposal_for(each, shape, theirs)
        terms = codec.agree(each, len(mine), *proposals)
        message_mine, message_theirs = each.encode(mine, terms), each.encode(theirs, terms)
        shape = codec.next_shape(each, shape, terms, codec.compare(each, message_mine, message_theirs, terms))
    gigabytes = mine.numel() * mine.element_size() / 1e9
    encode = gigabytes / _best_seconds(lambda: each.encode(mine, terms), repetitions)
    difference = gigabytes / _best_seconds(lambda: each.difference(message_mine, message_theirs, terms), repetitions)
    error = each.difference(message_mine, message_theirs, terms) - reference
    proposal = _best_seconds(lambda: codec.proposal_for(each, shape, mine), repetitions)
    return {
        "encode_gb_per_s": encode,
        "encode_per_memcpy": encode / memcpy_gb_per_s,
        "difference_gb_per_s": difference,
        "difference_per_memcpy": difference / memcpy_gb_per_s,
        "proposal_gb_per_s": gigabytes / proposal if proposals[0] else 0.0,
        "bits_per_element": 8 * (len(message_mine) + len(proposals[0])) / terms.elements,
        "error_per_weight": float(error.norm() / mine.norm()),
        "error_per_disagreement": float(error.norm() / reference.norm()),
    }


def _best_seconds(call: Callable[[], object], repetitions: int) -> float:
    """Return the shortest time of some calls after a warm-up: the least disturbed one."""
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
    click.echo(
        f"{'codec':20} {'encode':>14} {'difference':>14} {'proposal':>8} {'bits':>7} {'error/weight':>13} /disagreement"
    )
    for label, row in figures["codecs"].items():
        encode = f"{row['encode_gb_per_s']:.2f} ({row['encode_per_memcpy']:.2f}x)"
        difference = f"{row['difference_gb_per_s']:.2f} ({row['difference_per_memcpy']:.2f}x)"
        proposal = f"{row['proposal_gb_per_s']:.1f}" if row["proposal_gb_per_s"] else ""
        errors = f"{row['error_per_weight']:13.2e} {row['error_per_disagreement']:13.2e}"
        click.echo(f"{label:20} {encode:>14} {difference:>14} {proposal:>8} {row['bits_per_element']:7.3f} {errors}")
    click.echo(json.dumps(figures))


if __name__ == "__main__":
    main()
