"""The verdict on a testnet, ``summary.json`` and the closing table. Pure, and without torch.

Peers that silently train alone have good loss curves. Therefore the verdict requires of each peer that it learned and
that it exchanged.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.table import Table

from p2ptrain.base.cgroups import usable_cpus
from peer.messages import duration, size

if TYPE_CHECKING:
    from p2ptrain.manifest import Corpus
    from peer.testnet.runner import Ending

LEARNED = 0.97
"""A peer has learned if its held-out loss fell below this share of the first. In the first 2 % of the demo it falls to
0.55 of the first, and its error is 0.01 nats (measured). Guess: measure the slowest healthy run."""

HEADINGS = (
    *("first\nloss", "last\nloss", "\ntokens", "tokens\nper s"),
    *("\nexchanges", "\nfailed", "\nsent", "\nreceived", "\nblocked"),
)
"""Headings of the table, whose columns fit into 80 letters together."""


@dataclass(frozen=True, slots=True)
class TrainerFigures:
    """One trainer's figures, from its summary.json."""

    id: str
    val_loss_first: float
    val_loss_last: float
    tokens: int
    tokens_per_s: float
    exchanges_ok: int
    exchanges_failed: int
    sent_bytes: int
    received_bytes: int
    blocked_fraction: float
    outer_steps: int

    @classmethod
    def of(cls, summary: Mapping[str, Any]) -> Self:
        """Read a summary. A figure that was not measured is NaN. Raises KeyError if one is missing."""
        read = ((each.name, summary[each.name]) for each in fields(cls))
        values: dict[str, Any] = {name: math.nan if value is None else value for name, value in read}
        return cls(**values)


@dataclass(frozen=True, slots=True)
class TrainerOutcome:
    """The outcome of one trainer."""

    name: str
    figures: TrainerFigures | None
    """None if it wrote no summary."""
    finished: bool = False
    """Whether it reached the run's end."""
    why: str = ""
    """Reason for its end, from its summary."""


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

    peers: tuple[TrainerOutcome, ...]
    solo: TrainerOutcome | None
    ending: Ending
    measured: Measured | None
    """None if there was nothing to average."""
    unmeasured: str
    """Reason, if there was nothing to average."""
    seed: int
    date: str
    machine: str

    @property
    def failures(self) -> list[str]:
        """Faults, for people to read; empty if the peers were a swarm and learned."""
        found = list(self.ending.troubles)
        for each in self.peers:
            found += [f"{each.name} {fault}" for fault in _faults(each, self.ending)]
            if each.figures is not None and each.figures.exchanges_ok == 0:
                found.append(f"{each.name} made no exchange: it trained alone")
        if self.solo is not None:
            found += [f"{self.solo.name} {fault}" for fault in _faults(self.solo, self.ending)]
        if self.measured is None:
            found.append(f"the averaged model could not be measured: {self.unmeasured}")
        elif not math.isfinite(self.measured.averaged_val_loss):
            found.append("the averaged model's loss is not a finite number")
        return found

    @property
    def ratio(self) -> float | None:
        """The averaged model's loss over the solo run's; below 1 the swarm did better."""
        if self.measured is None or self.solo is None or self.solo.figures is None:
            return None
        return self.measured.averaged_val_loss / self.solo.figures.val_loss_last

    @property
    def times_s(self) -> tuple[float, float] | None:
        """Seconds in which the peers trained, and in which the fastest would train on as many tokens as all of them."""
        known = [each.figures for each in self.peers if each.figures is not None and each.figures.tokens_per_s > 0]
        if len(known) < len(self.peers):
            return None
        together_s = max(each.tokens / each.tokens_per_s for each in known)
        return together_s, sum(each.tokens for each in known) / max(each.tokens_per_s for each in known)


def outcome(name: str, summary: Path) -> TrainerOutcome:
    """Read a trainer's summary.json."""
    try:
        document = json.loads(summary.read_bytes())
        return TrainerOutcome(name, TrainerFigures.of(document), bool(document["finished"]), str(document["why"]))
    except (OSError, ValueError, KeyError, TypeError):
        return TrainerOutcome(name, None)


def _faults(each: TrainerOutcome, ending: Ending) -> list[str]:
    if any(trouble.startswith(f"{each.name} ended") for trouble in ending.troubles):
        return []  # already among the troubles, with its last output
    status = ending.statuses.get(each.name)
    if status is None:
        return ["was never started"]
    if status:
        return [f"ended with status {status}"]
    if each.figures is None:
        return ["left no summary.json"]
    first, last = each.figures.val_loss_first, each.figures.val_loss_last
    found = []
    if not last < LEARNED * first:  # NaN fails too
        found.append(f"did not learn: its held-out loss went from {first:.3f} to {last:.3f}")
    if not each.finished and not ending.cut_short and not ending.troubles:
        found.append(f"stopped before the run's end: {each.why or 'its summary gives no reason'}")
    return found


def summary(report: TestnetReport) -> dict[str, Any]:
    """Return the content of ``summary.json``; a figure that was not measured is null."""
    measured, solo = report.measured, report.solo
    return _finite(
        {
            "passed": not report.failures,
            "failures": report.failures,
            "cut_short": report.ending.cut_short,
            "peers": [asdict(each.figures) for each in report.peers if each.figures is not None],
            "averaged_val_loss": measured.averaged_val_loss if measured else None,
            "solo_val_loss": solo.figures.val_loss_last if solo and solo.figures else None,
            "disagreement": measured.disagreement if measured else None,
            "final_disagreement": measured.final_disagreement if measured else None,
            "wall_s": round(report.ending.wall_s, 1),
            "sample": measured.sample if measured else None,
            "solo": asdict(solo.figures) if solo and solo.figures else None,
            "seed": report.seed,
            "machine": report.machine,
            "date": report.date,
        }
    )


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by null."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(report: TestnetReport) -> Table:
    """Return the closing table, one row per trainer."""
    shown = Table(title="held-out loss in nats per token", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("")
    for heading in HEADINGS:
        shown.add_column(heading, justify="right", no_wrap=True)
    for each in (*report.peers, *([report.solo] if report.solo else [])):
        shown.add_row(each.name, *_cells(each.figures))
    return shown


def _cells(figures: TrainerFigures | None) -> Sequence[str]:
    if figures is None:
        return ["no summary"]
    return [
        f"{figures.val_loss_first:.3f}",
        f"{figures.val_loss_last:.3f}",
        f"{figures.tokens:,}",
        f"{figures.tokens_per_s:,.0f}",
        str(figures.exchanges_ok),
        str(figures.exchanges_failed),
        size(figures.sent_bytes),
        size(figures.received_bytes),
        f"{100 * figures.blocked_fraction:.2f} %",
    ]


def devices_comparison(several: TestnetReport, plain: TestnetReport, devices: str) -> list[str]:
    """Return a line that compares a swarm whose first peer trains on several devices with one of plain peers."""
    if several.measured is None or plain.measured is None:
        return []
    ours, theirs = several.measured.averaged_val_loss, plain.measured.averaged_val_loss
    return [
        f"Held-out loss of the averaged model: {ours:.4f} with {several.peers[0].name} on {devices}, "
        f"{theirs:.4f} with plain peers alone (ratio {ours / theirs:.3f})"
    ]


def comparison(report: TestnetReport) -> list[str]:
    """Return lines that compare the averaged model with the solo run and state the peers' disagreement."""
    measured, solo = report.measured, report.solo
    if measured is None:
        return []
    lines = [f"The peers' averaged model: held-out loss {measured.averaged_val_loss:.4f}"]
    if solo is not None and solo.figures is not None and report.ratio is not None:
        basis = "in the same time" if report.ending.cut_short else "on as many tokens as one peer"
        lines[0] += f"; solo run {basis}: {solo.figures.val_loss_last:.4f} (ratio {report.ratio:.3f})"
    if (times := report.times_s) is not None:
        together_s, alone_s = times
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


def next_steps(command: str, out: Path, corpus: Corpus) -> list[str]:
    """Return commands to try next.

    Args:
        command: how the user's shell finds p2ptrain.
        corpus: the run's.
    """
    home = out / "peer-1"
    if corpus.kind == "builtin":
        first = f"{command} generate {home} 'To be, or not'"
    elif not corpus.template:
        first = f"{command} generate {home} ''    # or, in the quotes, how the text begins"
    else:
        first = f"{command} chat {home}    # type a message; Ctrl+D leaves"
    return [
        first,
        f"{command} export {home} {out / 'exported'}    # for AutoModelForCausalLM.from_pretrained",
        f"{command} init my-run && {command} sign my-run && {command} bootstrap my-run"
        "    # a run of your own; prints the command with which others join",
    ]


def machine() -> str:
    """Return the processor, number of cores and system of this machine."""
    return f"{_processor()}, {usable_cpus()} cores, {platform.system()} {platform.machine()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or "unknown processor"
