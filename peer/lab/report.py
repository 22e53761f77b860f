"""What became of a scenario: figures from what everybody left, held against the scenario's limits. Without torch.

``figures`` are numbers by name; those of one peer are ``peers.NAME.FIGURE``. docs/LABORATORY.md lists them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from p2ptrain.sim.reality import Limit, RealScenario
from peer.lab.healing import across, steps_to_heal
from peer.lab.joining import PULLS, pulled, schedules
from peer.lab.left import TOLD, Left
from peer.lab.noticing import noticing
from peer.lab.pulse import FIGURES as GROWTH
from peer.lab.pulse import ends, growth
from peer.lab.script import Do, told
from peer.testnet.report import LEARNED

NEWCOMER_S = 60.0
"""Who comes so shortly before everything is over need not have taken anybody's weights. A guess: starting takes 3 s,
and 30 s on a busy machine."""

WAITS = ("blocked_share", "longest_stall")
"""How much of the time exchanges held the trainer up, and for how long at once."""

ALWAYS = {
    "unexpected_exits": Limit(at_most=0),
    "left_processes": Limit(at_most=0),
    "left_sockets": Limit(at_most=0),
    "left_namespaces": Limit(at_most=0),
}
"""Limits that no scenario need name."""


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
    peers = {
        each.part.name: _peer_figures(each, lives.get(each.part.name, []), last_act) | noticing(each, left)
        for each in left
    }
    honest = [each for each in left if each.part.settings.lie is None]
    names = {each.part.name for each in honest}
    ours = [peers[each.part.name] for each in honest]
    there = [each for each in honest if peers[each.part.name]["stayed"]]
    staying = [peers[each.part.name] for each in there]
    samples, steady = course["samples"], {each.part.name for each in there}
    growing = [growth(those) for name, those in samples.items() if name in steady]
    parted = [across(left, course["done"], key, parts) for key, parts in sides.items()]
    healed = [steps_to_heal(there, course["done"], key, parts) for key, parts in sides.items()]
    return {
        "peers": peers,
        "stayed": len(staying),
        "finished": _sum(staying, "finished"),
        "learned": sum(_learned(each) for each in staying),
        "worst_loss": _most(each["loss"] for each in staying),
        "mean_loss": _mean(each["loss"] for each in staying),
        "tokens": _sum(staying, "tokens"),
        "exchanges_made": _sum(list(peers.values()), "exchanges_made"),
        "relayed_exchanges": _sum(ours, "relayed_exchanges"),
        "fewest_exchanges": min((each["exchanges_made"] for each in staying), default=0),
        "fewest_exchanges_afterwards": min((each["exchanges_afterwards"] for each in staying), default=0),
        "exchanges_failed": _sum(list(peers.values()), "exchanges_failed"),
        **{name: _sum(ours, name) for name in ("half_commits", "offences", "caught_up", "resumed", *TOLD)},
        **_newcomer_figures(honest, peers, course["done"]),
        **{name: _most(each[name] for each in ours) for name in PULLS},
        "saved_afterwards": _sum(staying, "saved_afterwards"),
        **{name: _most(each[name] for each in staying) for name in WAITS},
        "disagreement": disagreement,
        "last_distance": _most(each["last_distance"] for each in staying),
        "exchanges_across": sum(during for during, _ in parted),
        "exchanges_across_afterwards": min((after for _, after in parted), default=0),
        "outer_steps_to_heal": None if None in healed else _most(healed),
        "restarts": sum(max(len(each) - 1, 0) for name, each in lives.items() if name in names),
        "unexpected_exits": sum(
            life["status"] != 0 and not life["ended_by_us"] for each in lives.values() for life in each
        ),
        "missed_acts": len(course["missed"]),
        "wall_s": course["wall_s"],
        "peak_memory": _most(peak for name, peak in course.get("peaks", {}).items() if name in steady),
        **{name: _most(each.get(name) for each in growing) for name in GROWTH},
        "bootstraps": {name: growth(samples[name]) for name in samples if name not in peers},
        "watched": {name: ends(those) for name, those in samples.items() if those},
        "groups": {
            group: _group_figures([peers[each.part.name] for each in there if each.part.group == group])
            for group in dict.fromkeys(each.part.group for each in honest)
        },
    }


def _newcomer_figures(
    honest: Sequence[Left], peers: Mapping[str, Mapping[str, Any]], done: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Of those who were started after second 0, for the first time or again."""
    came = {act["who"]: float(act["time"]) for act in done if act["do"] == Do.START}
    newcomers = [each for each in honest if each.part.name in came]
    caught_up = [each for each in newcomers if each.since("caught up", came[each.part.name])]
    over = max((each.last_time for each in honest), default=0.0)
    due = [each for each in newcomers if each in caught_up or came[each.part.name] <= over - NEWCOMER_S]
    staying = {each.part.name: peers[each.part.name]["loss"] for each in honest if peers[each.part.name]["stayed"]}
    theirs = _mean(loss for name, loss in staying.items() if name in came)
    others = _mean(loss for name, loss in staying.items() if name not in came)
    return {
        "newcomers": len(newcomers),
        "newcomers_caught_up": len(caught_up),
        "newcomers_caught_up_share": len(caught_up) / len(due) if due else None,
        "newcomers_loss": theirs / others if theirs is not None and others else None,
        "newcomers_learning_rate": schedules([each for each in honest if each.part.name in staying], set(came)),
    }


def _group_figures(members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of those of a group who stayed."""
    return {
        "stayed": len(members),
        "loss": _mean(each["loss"] for each in members),
        **{name: _most(each[name] for each in members) for name in WAITS},
        **{
            name: _mean(each[name] for each in members)
            for name in ("tokens", "exchanges_made", "exchanges_afterwards", "exchanges_failed")
        },
        **{name: _sum(members, name) for name in ("caught_up_afterwards", *TOLD)},
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
    while_training = [each for each in left.exchanges() if each.began < left.trained_at()]
    stayed = bool(lives) and not lives[-1]["ended_by_us"]
    return {
        "stayed": stayed,
        "finished": bool(summary.get("finished", False)),
        "exits": [life["ended_by_us"] or life["status"] for life in lives],
        "loss_first": summary.get("val_loss_first"),
        "loss": summary.get("val_loss_last"),
        "tokens": summary.get("tokens"),
        "exchanges_made": len(while_training),
        "exchanges_afterwards": sum(each.began > last_act for each in while_training),
        "relayed_exchanges": sum(each.is_relayed for each in left.exchanges()),
        "exchanges_failed": left.count("failed"),
        "half_commits": summary.get("half_commits"),
        "offences": left.count("broke protocol"),
        "caught_up": left.count("caught up"),
        "caught_up_afterwards": left.since("caught up", last_act),
        **pulled(left),
        "resumed": left.count("resumed"),
        "saved_afterwards": left.saved_since(last_act),
        **{name: name in left.said for name in TOLD},
        "blocked_share": summary.get("blocked_fraction"),
        "longest_stall": summary.get("longest_stall_inner_steps"),
        "last_distance": left.last_distance(),
        "why": summary.get("why", ""),
    }


def _learned(figures: Mapping[str, Any]) -> bool:
    first, last = figures["loss_first"], figures["loss"]
    return first is not None and last is not None and last < LEARNED * first  # NaN did not learn


def _most(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return max(known, key=lambda value: (math.isnan(value), value), default=None)  # no number is worse than any


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _sum(figures: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(int(each[name] or 0) for each in figures)


def spoiled(title: str, stage: str, figures: Mapping[str, Any], course: Mapping[str, Any]) -> Verdict:
    """What it was to be compared with did not come about, so that nothing else was acted out."""
    troubles = [f"undisturbed: {trouble}" for trouble in course["troubles"]]
    return Verdict(title, stage, False, {"peers": {}, "undisturbed": figures}, {}, troubles, _happened(course))


def refused(title: str, stage: str, why: str) -> Verdict:
    """It could not be acted out, or not be measured."""
    return Verdict(title, stage, False, {"peers": {}}, {}, [why], [])


def judged(
    title: str,
    stage: str,
    scenario: RealScenario,
    figures: Mapping[str, Any],
    course: Mapping[str, Any],
) -> Verdict:
    """The figures held against the scenario's limits and those that always hold."""
    limits: dict[str, dict[str, Any]] = {}
    troubles = list(course["troubles"])
    for name, limit in {**ALWAYS, **scenario.limits}.items():
        found = figure(figures, name)
        kept = found is not None and limit.holds(found)
        limits[name] = {**limit.model_dump(exclude_none=True), "found": found, "kept": kept}
        if not kept:
            bounds = ", ".join(f"{word.replace('_', ' ')} {bound:g}" for word, bound in _bounds(limit))
            shown = "there is no such figure" if found is None else f"{found:g}"
            troubles.append(f"{name}: {shown}, where {bounds} was to be")
    return Verdict(title, stage, not troubles, dict(figures), limits, troubles, _happened(course))


def _happened(course: Mapping[str, Any]) -> list[str]:
    happened = [f"{act['at_s']:g} s: {told(act['who'], act['do'])}" for act in course["done"]]
    return happened + [f"missed: {each}" for each in course["missed"]]


def grown(figures: Mapping[str, Any]) -> list[str]:
    """Of each process that a limit on growth may be about: what it had at first, once it had settled, and at last."""
    if figures.get("memory_growth") is None:  # nobody was watched for long enough
        return []
    return [
        f"{name}: "
        + ", ".join(
            f"{seen.replace('_', ' ')} {first:,.0f} and at last {last:,.0f}" for seen, (first, last) in those.items()
        )
        for name, those in figures["watched"].items()
    ]


def finite(tree: Any) -> Any:
    """The same with null for numbers that JSON does not have."""
    if isinstance(tree, Mapping):
        return {str(name): finite(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


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
