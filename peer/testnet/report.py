"""The verdict on a testnet, ``summary.json`` and the closing table. Pure, and without torch.

Peers that silently train alone have good loss curves. Therefore the verdict requires of each peer that it learned and
that it exchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from peer.messages import duration, size
from peer.testnet.plan import TrainerProcess
from peer.testnet.runner import Ending

LEARNED = 0.97
"""A peer has learned if its held-out loss fell below this share of the first. In the first 2 % of the demo it falls to
0.55 of the first, and its error is 0.01 nats (measured). Guess: measure the slowest healthy run."""

COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("first\nloss", "val_loss_first", "{:.3f}".format),
    ("last\nloss", "val_loss_last", "{:.3f}".format),
    ("\ntokens", "tokens", "{:,}".format),
    ("tokens\nper s", "tokens_per_s", "{:,.0f}".format),
    ("\nexchanges", "exchanges_ok", str),
    ("\nfailed", "exchanges_failed", str),
    ("\nsent", "sent_bytes", size),
    ("\nreceived", "received_bytes", size),
    ("\nblocked", "blocked_fraction", "{:.2%}".format),
)
"""Headings of the table, which fit into 80 letters together, and what is in the columns."""
FIGURES = ("id", *(name for _, name, _ in COLUMNS), "outer_steps", "finished", "why")
"""What the report takes from a trainer's summary.json. Losses that were not measured are None."""


Figures = Mapping[str, Any]
"""Figures of a trainer's summary.json, by the names in FIGURES."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of the average of the peers' models."""

    averaged_val_loss: float
    """Nats per token of the mean of the slow weights when training ended."""
    disagreement: float
    """Mean of ||x_i - mean|| / ||mean|| when training ended, before the final gossip."""
    final_disagreement: float
    """Disagreement of the last checkpoints, after the final gossip."""
    sample: str
    """Text that the averaged model generated."""


@dataclass(frozen=True, slots=True)
class TestnetReport:
    """Result of a testnet."""

    peers: Mapping[str, Figures | None]
    """Figures of each peer, by name; None if it wrote no summary."""
    solo: Mapping[str, Figures | None]
    """Those of the solo run; empty if there was none."""
    ending: Ending
    measured: Measured | None
    """None if there was nothing to average."""
    unmeasured: str
    """Reason, if there was nothing to average."""
    seed: int

    @property
    def failures(self) -> list[str]:
        """Faults, for people to read; empty if the peers were a swarm and learned."""
        found = list(self.ending.troubles)
        for name, figures in {**self.peers, **self.solo}.items():
            found += [f"{name} {fault}" for fault in _faults(name, figures, self.ending, name in self.solo)]
        if self.measured is None:
            found.append(f"the averaged model could not be measured: {self.unmeasured}")
        return found

    @property
    def solo_loss(self) -> float | None:
        return next((figures["val_loss_last"] for figures in self.solo.values() if figures), None)


def figures_of(trainers: Iterable[TrainerProcess]) -> dict[str, Figures | None]:
    """Read the trainers' summary.json."""
    return {each.name: _figures(each.home.summary) for each in trainers}


def _figures(summary: Path) -> Figures | None:
    try:
        document = json.loads(summary.read_bytes())
        return {each: document[each] for each in FIGURES}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _faults(name: str, figures: Figures | None, ending: Ending, is_solo: bool) -> list[str]:
    if any(trouble.startswith(f"{name} ended") for trouble in ending.troubles):
        return []  # already among the troubles, with its last output
    if status := ending.statuses.get(name):
        return [f"ended with status {status}"]
    if figures is None:
        return ["left no summary.json"]
    found = []
    first, last = figures["val_loss_first"], figures["val_loss_last"]
    if first is None or last is None or not last < LEARNED * first:
        found.append(f"did not learn: its held-out loss went from {first} to {last}")
    if not figures["finished"] and not ending.cut_short and not ending.troubles:
        found.append(f"stopped before the run's end: {figures['why'] or 'its summary gives no reason'}")
    if not is_solo and figures["exchanges_ok"] == 0:
        found.append("made no exchange: it trained alone")
    return found


def summary(report: TestnetReport) -> dict[str, Any]:
    """Return the content of ``summary.json``; a figure that was not measured is null."""
    unknown = dict.fromkeys(each.name for each in fields(Measured))
    return {
        "passed": not report.failures,
        "failures": report.failures,
        "cut_short": report.ending.cut_short,
        "peers": [figures for figures in report.peers.values() if figures],
        "solo_val_loss": report.solo_loss,
        "wall_s": round(report.ending.wall_s, 1),
        "seed": report.seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **(asdict(report.measured) if report.measured else unknown),
    }


def table(report: TestnetReport) -> Table:
    """Return the closing table, one row per trainer."""
    shown = Table(title="held-out loss in nats per token", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("")
    for heading, _, _ in COLUMNS:
        shown.add_column(heading, justify="right", no_wrap=True)
    for who, figures in {**report.peers, **report.solo}.items():
        values = [((figures or {}).get(name), how) for _, name, how in COLUMNS]
        shown.add_row(who, *("?" if value is None else how(value) for value, how in values))
    return shown


def comparison(report: TestnetReport) -> list[str]:
    """Return lines that compare the averaged model with the solo run and state the peers' disagreement."""
    measured, known = report.measured, [figures for figures in report.peers.values() if figures]
    if measured is None:
        return []
    lines = [f"The peers' averaged model: held-out loss {measured.averaged_val_loss:.4f}"]
    if (solo_loss := report.solo_loss) is not None:
        basis = "in the same time" if report.ending.cut_short else "on as many tokens as one peer"
        ratio = measured.averaged_val_loss / solo_loss
        lines[0] += f"; solo run {basis}: {solo_loss:.4f} (ratio {ratio:.3f})"
    if len(known) == len(report.peers) and all(each["tokens_per_s"] > 0 for each in known):
        together_s = max(each["tokens"] / each["tokens_per_s"] for each in known)
        alone_s = sum(each["tokens"] for each in known) / max(each["tokens_per_s"] for each in known)
        lines.append(
            f"The peers trained for {duration(together_s)}; for as many tokens the fastest of them alone would need "
            f"{duration(alone_s)}"
        )
    lines.append(
        f"Disagreement of the peers: {100 * measured.disagreement:.2f} % when training ended, "
        f"{100 * measured.final_disagreement:.2f} % after the final gossip"
    )
    if report.ending.cut_short:
        lines.append(
            "Cut short by --seconds: the learning rate schedule is incomplete, so the losses compare only roughly."
        )
    return lines
