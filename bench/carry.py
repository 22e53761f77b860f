"""Load of a run's text on the lines of peers that join at once, with one bootstrap.

Pure simulation (``bench.shard_swarm``) with the product's plan of fetches, order of shards and limits; lines carry
nothing but shards. Prints a JSON line for each run, and writes docs/results/CARRY.md from such lines.

    python -m bench.carry [--case NAME ...] [--seed 1 ...] >> out/carry.jsonl
    python -m bench.carry --page out/carry.jsonl
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import click

from bench.results import FOLDER, replaced
from bench.shard_swarm import CarryCase, FetchingPeer, Swarm
from p2ptrain.tokens import walk
from p2ptrain.tokens.index import SHARD_BYTES

SMALL, CARD = 50_000_000, 100_000.0
CASES: dict[str, tuple[str, CarryCase]] = {
    "cpu": ("100 CPUs", CarryCase()),
    "cpu_own": ("the same, if each began with a shard of its own", CarryCase(first_shards=1 << 30)),
    "cpu_hidden": ("the same, if others find a peer only when it trains", CarryCase(are_found_at_once=False)),
    "cpu_small": ("100 CPUs, 50 M tokens", CarryCase(corpus_tokens=SMALL)),
    "mixed": ("100 small cards, 10,000 tokens/s", CarryCase(tokens_per_s=10_000.0)),
    "card": ("100 cards", CarryCase(tokens_per_s=CARD)),
    "card_small": ("100 cards, 50 M tokens", CarryCase(corpus_tokens=SMALL, tokens_per_s=CARD)),
    "card_mirror": ("100 cards, a mirror of 1 Gbit/s", CarryCase(tokens_per_s=CARD, mirror_mbit_s=1000.0)),
    "cpu_churn": ("100 CPUs, half leave and others come", CarryCase(leaving=0.5)),
    "card_churn": ("100 cards, half leave and others come", CarryCase(tokens_per_s=CARD, leaving=0.5)),
    "cpu_liars": ("100 CPUs, 10 of them adversarial", CarryCase(adversarial=0.1)),
    "card_liars": ("100 cards, 10 of them adversarial", CarryCase(tokens_per_s=CARD, adversarial=0.1)),
    "alone": ("one CPU", CarryCase(peers=1)),
    "card_alone": ("one card", CarryCase(peers=1, tokens_per_s=CARD)),
}
"""Title and parameters of each case."""


def measure(case: CarryCase, seed: int) -> dict[str, float]:
    """Return the figures of one simulated hour."""
    with mock.patch.object(walk, "FIRST_SHARDS", case.first_shards):
        swarm = Swarm(case, seed)
        swarm.run()
    honest = [peer for peer in swarm.peers if not peer.lie and (peer.begun_at or peer.is_alive)]
    first_s = sorted((peer.begun_at or case.duration_s) - peer.joined_at for peer in honest)
    present_s = [(peer.left_at or case.duration_s) - (peer.begun_at or case.duration_s) for peer in honest]
    sent = [peer.line.sent_bytes / 1e6 for peer in honest]
    corpus_bytes = len(swarm.everything) * SHARD_BYTES
    return {
        "first_step_median_s": statistics.median(first_s),
        "first_step_90_s": first_s[int(0.9 * len(first_s))],
        "first_step_last_s": first_s[-1],
        "bootstrap_corpora": swarm.bootstrap.line.sent_bytes / corpus_bytes,
        "mirror_corpora": swarm.mirror.line.sent_bytes / corpus_bytes if swarm.mirror else 0.0,
        "peer_sent_mean_mb": statistics.mean(sent),
        "peer_sent_most_mb": max(sent),
        "idle_mean_s": statistics.mean(peer.waited_s for peer in honest),
        "idle_share": sum(peer.waited_s for peer in honest) / max(sum(present_s), 1.0),
        "text_read_share": read_share(honest, swarm.shards),
    }


def read_share(peers: Sequence[FetchingPeer], shards: int) -> float:
    """Return the expected share of the text that some peer has read, as peers read a shard in orders of their own."""
    unread = (prod(1.0 - peer.read.get(shard, 0.0) for peer in peers) for shard in range(shards))
    return 1.0 - sum(unread) / shards


def lines(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of the page: mean and half the range of the seeds of each case."""
    found = [
        "| swarm | first step: median, s | 90 % | last | bootstrap sent, corpora | a peer sent, MB | the most "
        "| idle after the first step, s | text read by some peer |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (title, _) in CASES.items():
        figures = [run["figures"] for run in runs if run["case"] == name]
        if figures:
            cells = [
                *(_spread(figures, f"first_step_{each}_s", "{:.0f}") for each in ("median", "90", "last")),
                _spread(figures, "bootstrap_corpora", "{:.2f}"),
                *(_spread(figures, f"peer_sent_{each}_mb", "{:.0f}") for each in ("mean", "most")),
                _spread(figures, "idle_mean_s", "{:.0f}"),
                _spread([{"text": 100 * each["text_read_share"]} for each in figures], "text", "{:.0f}") + " %",
            ]
            found.append(f"| {title} | {' | '.join(cells)} |")
    return found


def _spread(figures: Sequence[Mapping[str, float]], name: str, form: str) -> str:
    values = [each[name] for each in figures]
    mean, half = form.format(statistics.mean(values)), form.format((max(values) - min(values)) / 2)
    return mean if float(half) == 0.0 else f"{mean} ± {half}"


@click.command()
@click.option("--case", "cases", type=click.Choice(list(CASES)), multiple=True, help="Default: all.")
@click.option("--seed", "seeds", type=int, multiple=True, default=(1, 2, 3), show_default=True)
@click.option("--page", type=click.Path(dir_okay=False, exists=True, path_type=Path), help="Write the page from these.")
def main(cases: Sequence[str], seeds: Sequence[int], page: Path | None) -> None:
    """Simulate who carries the text of a run."""
    if page is not None:
        runs = [json.loads(line) for line in page.read_text(encoding="utf-8").splitlines()]
        path = FOLDER / "CARRY.md"
        path.write_text(replaced(path.read_text(encoding="utf-8"), "carry", lines(runs)), encoding="utf-8")
        return
    for name in cases or CASES:
        for seed in seeds:
            figures = {key: round(value, 4) for key, value in measure(CASES[name][1], seed).items()}
            sys.stdout.write(json.dumps({"case": name, "seed": seed, "figures": figures}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
