"""Two reports beside each other: what changed, as ratios."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from p2ptrain.sim.report import Figures, Point, Report


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, before and after."""

    name: str
    before: float | None
    after: float | None

    @property
    def ratio(self) -> float | None:
        """After over before; None where that says nothing."""
        if self.before is None or self.after is None or self.before == 0:
            return None
        return self.after / self.before


def compare(before: Report, after: Report) -> list[Row]:
    """The figures that a change of protocol, codec or recipe can move."""
    rows = [Row("simulated seconds", before.simulated_s, after.simulated_s)]
    last = before.curve[-1], after.curve[-1]
    rows += [Row(name, *(getattr(point, field) for point in last)) for name, field in _LAST]
    target = last[0].validation if last[0].validation is not None else last[0].loss
    if target is not None:
        name = f"seconds to a loss of {target:.4g}"
        rows.append(Row(name, *(_seconds_to(report.curve, target) for report in (before, after))))
    rows += _figures("", before.overall, after.overall)
    shared = [name for name in before.groups if name in after.groups]
    for name in shared if len(shared) > 1 else []:
        rows += _figures(f"{name}: ", before.groups[name], after.groups[name])
    rows.append(Row("events", before.events, after.events))
    rows.append(Row("events per second", before.cost.events_per_s, after.cost.events_per_s))
    rows.append(Row("peak memory, MB", before.cost.peak_memory_bytes / 1e6, after.cost.peak_memory_bytes / 1e6))
    return [row for row in rows if row.before is not None or row.after is not None]


def changed_settings(before: Report, after: Report) -> list[str]:
    """One line for each field of the scenario that differs."""
    old, new = dict(_flat(before.scenario)), dict(_flat(after.scenario))
    return [
        f"{path}: {old.get(path, 'absent')} -> {new.get(path, 'absent')}"
        for path in sorted(old.keys() | new.keys())
        if (path in old) != (path in new) or old.get(path) != new.get(path)
    ]


_LAST = (
    ("last validation loss", "validation"),
    ("... of the mean of all weights", "validation_of_mean"),
    ("last training loss", "loss"),
    ("last disagreement", "disagreement"),
)


def _figures(prefix: str, before: Figures, after: Figures) -> list[Row]:
    def row(name: str, field: str) -> Row:
        return Row(prefix + name, getattr(before, field), getattr(after, field))

    return [
        row("peers", "peers"),
        row("utilization", "utilization"),
        row("bits per parameter and outer step", "bits_per_parameter"),
        Row(f"{prefix}bytes up a peer", before.up.total, after.up.total),
        Row(f"{prefix}bytes down a peer", before.down.total, after.down.total),
        row("exchanges", "exchanges"),
        row("exchanges failed", "exchanges_failed"),
        row("half-commits", "half_commits"),
        row("offers declined", "offers_declined"),
        row("offers unanswered", "offers_unanswered"),
        row("solo share", "solo_share"),
        row("pulls", "pulls"),
    ]


def _seconds_to(curve: list[Point], target: float) -> float | None:
    for point in curve:
        loss = point.validation if point.validation is not None else point.loss
        if loss is not None and loss <= target:
            return point.time_s
    return None


def _flat(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(inner, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _flat(inner, f"{prefix}[{place}]")
    else:
        yield prefix, value
