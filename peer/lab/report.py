"""What became of a scenario: figures from what everybody left, held against the scenario's limits. Without torch.

``figures`` are numbers by name; those of one peer are ``peers.NAME.FIGURE``. docs/LABORATORY.md lists them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from p2ptrain.sim.reality import Limit, RealScenario
from peer.lab.pulse import FIGURES as GROWTH
from peer.lab.pulse import growth
from peer.lab.script import Do, Part, told
from peer.testnet.report import LEARNED

ALWAYS = {
    "unexpected_exits": Limit(at_most=0),
    "left_processes": Limit(at_most=0),
    "left_sockets": Limit(at_most=0),
    "left_namespaces": Limit(at_most=0),
}
"""Limits that no scenario need name."""

Note = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Left:
    """What one peer left in its home."""

    part: Part
    peer_id: str
    notes: Sequence[Note]
    """Its whole event log, of all its processes."""
    summary: Mapping[str, Any] | None
    """Of its last process; None where that was killed, or never was."""

    def count(self, kind: str) -> int:
        return sum(note.get("kind") == kind for note in self.notes)

    def caught_up_since(self, time: float) -> bool:
        """Whether it took somebody's weights after that (seconds since 1970)."""
        return any(note.get("kind") == "caught up" and float(note.get("time", 0.0)) >= time for note in self.notes)

    def last_distance(self) -> float | None:
        """Median of ||theirs - ours|| / ||ours|| over its last exchanges; None without any."""
        found = [
            float(note["distance"]) for note in self.notes if note.get("kind") == "exchanged" and "distance" in note
        ]
        return median(found[-LAST:]) if found else None

    def exchanges(self) -> list[tuple[float, float, str]]:
        """Of each: when it began and ended (seconds since 1970), and with whom."""
        return [
            (float(note["time"]) - float(note.get("seconds", 0.0)), float(note["time"]), str(note.get("peer", "")))
            for note in self.notes
            if note.get("kind") == "exchanged" and "time" in note
        ]


LAST = 10
"""Exchanges whose distances are looked at, at the end: of the order of the outer steps within which a swarm that was
disturbed must be as it was."""


def read_left(part: Part, peer_id: str, home: Path) -> Left:
    """What lies in a home, its times as of a clock that is right; a peer that never came left nothing."""
    try:
        lines = (home / "events.jsonl").read_bytes().splitlines()
    except OSError:
        lines = []
    notes = [note for line in lines if isinstance(note := _parsed(line), dict)]
    for note in notes:
        if isinstance(note.get("time"), int | float):
            note["time"] -= part.settings.clock_off_s
    summary = None
    try:
        found = json.loads((home / "summary.json").read_bytes())
        summary = found if isinstance(found, dict) else None
    except (OSError, ValueError):
        pass
    return Left(part, peer_id, notes, summary)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:  # the last line of a killed process may be torn
        return None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The report."""

    scenario: str
    stage: str
    passed: bool
    figures: dict[str, Any]
    limits: dict[str, dict[str, Any]]
    """Each with its bounds, what was found, and whether it was kept."""
    faults: list[str]
    """Why it did not pass, in plain words."""
    course: list[str]
    """What happened, in order."""

    def document(self) -> dict[str, Any]:
        return asdict(self)


def figures_of(
    course: Mapping[str, Any],
    left: Sequence[Left],
    disagreement: float | None,
    sides: Mapping[str, Sequence[Sequence[str]]],
) -> dict[str, Any]:
    """All figures but what is left behind.

    Args:
        course: ``play.Course`` as plain data.
        disagreement: of the last checkpoints of those who stayed.
        sides: of each partition, the names of the peers on each of its sides.
    """
    lives: Mapping[str, list[Mapping[str, Any]]] = course["lives"]
    last_act = max((float(act["time"]) for act in course["done"]), default=0.0)
    peers = {each.part.name: _peer_figures(each, lives.get(each.part.name, []), last_act) for each in left}
    honest = [each.part for each in left if each.part.settings.lie is None]
    staying = [peers[part.name] for part in honest if peers[part.name]["stayed"]]
    groups = {
        group: [peers[part.name] for part in honest if part.group == group and peers[part.name]["stayed"]]
        for group in dict.fromkeys(part.group for part in honest)
    }
    names = {part.name for part in honest}
    growing = [
        growth(samples) for name, samples in course["samples"].items() if name in names and peers[name]["stayed"]
    ]
    came = {act["who"]: float(act["time"]) for act in course["done"] if act["do"] == Do.START and act["who"] in names}
    across = [_across(left, course["done"], key, parts) for key, parts in sides.items()]
    return {
        "peers": peers,
        "stayed": len(staying),
        "finished": sum(bool(each["finished"]) for each in staying),
        "learned": sum(_learned(each) for each in staying),
        "worst_loss": _most(each["loss"] for each in staying),
        "mean_loss": _mean(each["loss"] for each in staying),
        "tokens": sum(each["tokens"] or 0 for each in staying),
        "exchanges_made": sum(each["exchanges_made"] for each in peers.values()),
        "fewest_exchanges": min((each["exchanges_made"] for each in staying), default=0),
        "fewest_exchanges_afterwards": min((each["exchanges_afterwards"] for each in staying), default=0),
        "exchanges_failed": sum(each["exchanges_failed"] for each in peers.values()),
        "half_commits": sum(peers[name]["half_commits"] or 0 for name in names),
        "offences": sum(each["offences"] for each in peers.values()),
        "caught_up": sum(peers[name]["caught_up"] for name in names),
        "newcomers_caught_up": sum(
            each.caught_up_since(came[each.part.name]) for each in left if each.part.name in came
        ),
        "resumed": sum(peers[name]["resumed"] for name in names),
        "blocked_share": _most(each["blocked_share"] for each in staying),
        "disagreement": disagreement,
        "last_distance": _most(each["last_distance"] for each in staying),
        "exchanges_across": sum(during for during, _ in across),
        "exchanges_across_afterwards": min((after for _, after in across), default=0),
        "restarts": sum(max(len(each) - 1, 0) for name, each in lives.items() if name in names),
        "unexpected_exits": sum(
            life["status"] != 0 and not life["ended_by_us"] for each in lives.values() for life in each
        ),
        "missed_acts": len(course["missed"]),
        "wall_s": course["wall_s"],
        **{name: _most(each.get(name) for each in growing) for name in GROWTH},
        "groups": {group: _group_figures(members) for group, members in groups.items()},
    }


def _group_figures(members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of those of a group who stayed."""
    return {
        "stayed": len(members),
        "loss": _mean(each["loss"] for each in members),
        "blocked_share": _most(each["blocked_share"] for each in members),
        **{
            name: _mean(each[name] for each in members)
            for name in ("tokens", "exchanges_made", "exchanges_afterwards", "exchanges_failed")
        },
    }


def compared(figures: Mapping[str, Any], undisturbed: Mapping[str, Any]) -> dict[str, Any]:
    """Every figure over the same one of the undisturbed scenario, where both are there."""
    found: dict[str, Any] = {}
    for name, value in figures.items():
        other = undisturbed.get(name)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            found[name] = compared(value, other)
        elif _is_number(value) and _is_number(other) and other:
            found[name] = value / other
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _peer_figures(left: Left, lives: Sequence[Mapping[str, Any]], last_act: float) -> dict[str, Any]:
    summary = left.summary or {}
    stayed = bool(lives) and not lives[-1]["ended_by_us"]
    return {
        "stayed": stayed,
        "finished": bool(summary.get("finished", False)),
        "exits": [life["ended_by_us"] or life["status"] for life in lives],
        "loss_first": summary.get("val_loss_first"),
        "loss": summary.get("val_loss_last"),
        "tokens": summary.get("tokens"),
        "exchanges_made": left.count("exchanged"),
        "exchanges_afterwards": sum(began > last_act for began, _, _ in left.exchanges()),
        "exchanges_failed": left.count("failed"),
        "half_commits": summary.get("half_commits"),
        "offences": left.count("broke protocol"),
        "caught_up": left.count("caught up"),
        "resumed": left.count("resumed"),
        "blocked_share": summary.get("blocked_fraction"),
        "last_distance": left.last_distance(),
        "why": summary.get("why", ""),
    }


def _learned(figures: Mapping[str, Any]) -> bool:
    first, last = figures["loss_first"], figures["loss"]
    return first is not None and last is not None and last < LEARNED * first  # NaN did not learn


def _most(values: Any) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _across(
    left: Sequence[Left], done: Sequence[Mapping[str, Any]], key: str, sides: Sequence[Sequence[str]]
) -> tuple[int, int]:
    """Exchanges between the sides of a partition that began while it was there, and after it was healed."""
    side_of = {name: place for place, side in enumerate(sides) for name in side}
    names = {each.peer_id: each.part.name for each in left}
    when = {act["do"]: float(act["time"]) for act in done if act["who"] == key}
    if Do.PART not in when:
        return 0, 0
    healed = when.get(Do.HEAL, math.inf)
    during = after = 0
    for each in left:
        ours = side_of.get(each.part.name)
        for began, ended, partner in each.exchanges():
            theirs = side_of.get(names.get(partner, ""))
            if ours is None or theirs is None or ours == theirs:
                continue
            during += began > when[Do.PART] and ended < healed
            after += began > healed
    return during, after


def judged(
    title: str,
    stage: str,
    scenario: RealScenario,
    figures: Mapping[str, Any],
    course: Mapping[str, Any],
) -> Verdict:
    """The figures held against the scenario's limits and those that always hold."""
    limits: dict[str, dict[str, Any]] = {}
    faults = list(course["troubles"])
    for name, limit in {**ALWAYS, **scenario.limits}.items():
        found = figure(figures, name)
        kept = found is not None and limit.holds(found)
        limits[name] = {**limit.model_dump(exclude_none=True), "found": found, "kept": kept}
        if not kept:
            bounds = ", ".join(f"{word.replace('_', ' ')} {bound:g}" for word, bound in _bounds(limit))
            shown = "there is no such figure" if found is None else f"{found:g}"
            faults.append(f"{name}: {shown}, where {bounds} was to be")
    happened = [f"{act['at_s']:g} s: {told(act['who'], act['do'])}" for act in course["done"]]
    happened += [f"missed: {each}" for each in course["missed"]]
    return Verdict(title, stage, not faults, dict(figures), limits, faults, happened)


def figure(figures: Mapping[str, Any], name: str) -> float | None:
    """A number by its dotted name; True is 1. None: there is none, or it was not measured."""
    found = _leaf(figures, name)
    if not isinstance(found, int | float) or not math.isfinite(found):
        return None
    return float(found)


def _leaf(tree: Any, name: str) -> Any:
    """What a dotted name leads to. Names of peers may have dots too (``seat-1-1.2``), so the longest one counts."""
    if not name or not isinstance(tree, Mapping):
        return tree if not name else None
    steps = name.split(".")
    for length in range(len(steps), 0, -1):
        if (key := ".".join(steps[:length])) in tree:
            return _leaf(tree[key], ".".join(steps[length:]))
    return None


def _bounds(limit: Limit) -> list[tuple[str, float]]:
    return list(limit.model_dump(exclude_none=True).items())
