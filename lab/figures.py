"""Figures from the artifacts of all peers, by name; those of one peer are ``peers.NAME.FIGURE``.

docs/LABORATORY.md lists them. ``lab.report`` compares them with a scenario's limits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Set
from statistics import mean
from typing import Any

from lab.artifacts import TOLD, Artifacts, ExchangeArtifact, Note
from lab.healing import exchanges_across, exchanges_within, steps_to_contact, steps_to_heal
from lab.pace import curve, run_figures, told_shortened_s, training_cpu_s
from lab.resource_monitor import FIGURES as GROWTH
from lab.resource_monitor import first_and_last, growth
from lab.returning import longest_return_s
from lab.script import ActKind
from lab.text import text_figures
from lab.trainer_figures import trainer_figures
from peer.testnet.report import LEARNED

NEWCOMER_S = 60.0
"""A peer that starts this shortly before the end need not have downloaded weights. Guess: starting takes 3 s, and 30 s
on a busy machine; start times of lab runs would settle it."""

PUNCHING_S = 5.0
"""Time since their first exchange within which two peers whose routers allow it should be directly connected."""

WAITS = ("blocked_share", "longest_stall")
"""Figures of how much, and for how long at once, exchanges held up the trainer."""

HEARD_S = 2.0
"""Time by which partners may notice a death before the act counts as done, which is when the process has ended. Guess:
.1 s, more on a busy machine; times between both in lab runs would settle it."""

INTERRUPTIONS = (ActKind.KILL, ActKind.SUSPEND)

PULLS: Mapping[str, str] = {
    "donors": "donors",
    "pieces": "pieces",
    "donors_lost": "broke_off",
    "pieces_again": "asked_again",
}
"""Figures of weight downloads, with the field of each in the note ``took weights``."""

EARLY_STEPS = 2
"""Outer steps within which a newcomer should be as good as the others."""

BLAMED: Mapping[str, str] = {
    "broke protocol": "",
    "clipped": "",
    "failed": "^no answer for |sends slower than |sent nothing for too long"
    "|nothing in common with ours|not fit the agreed step widths|too far ahead of ours",
    "refused": "^implausible progress",
}
"""Kinds of notes that blame a peer, with a pattern for the reasons that count. A peer that is busy, unreachable or
breaks off, as any leaving peer does, is not blamed."""


def figures_of(
    record: Mapping[str, Any],
    artifacts: Sequence[Artifacts],
    disagreement: float | None,
    sides: Mapping[str, Sequence[Sequence[str]]],
) -> dict[str, Any]:
    """Compute all figures except those of leftovers.

    Args:
        record: ``RunRecord`` as plain data.
        disagreement: of the last checkpoints of the peers that stayed.
        sides: names of the peers on each side, by partition.
    """
    lives: Mapping[str, list[Mapping[str, Any]]] = record["lives"]
    peers = {
        each.peer.name: _peer_figures(each, lives.get(each.peer.name, []), artifacts, record["done"])
        | blame(each, artifacts)
        for each in artifacts
    }
    honest = [each for each in artifacts if each.peer.settings.lie is None]
    names = {each.peer.name for each in honest}
    ours = [peers[each.peer.name] for each in honest]
    there = [each for each in honest if peers[each.peer.name]["stayed"]]
    staying = [peers[each.peer.name] for each in there]
    samples, steady = record["samples"], {each.peer.name for each in there}
    growing = [growth(those) for name, those in samples.items() if name in steady]
    pairs, punched = punchable_pairs(honest)
    parted = [exchanges_across(artifacts, record["done"], key, parts) for key, parts in sides.items()]
    healed = [steps_to_heal(there, record["done"], key, parts) for key, parts in sides.items()]
    met = [steps_to_contact(there, record["done"], key, parts) for key, parts in sides.items()]
    return {
        "peers": peers,
        "stayed": len(staying),
        "finished": _sum(staying, "finished"),
        "learned": sum(_learned(each) for each in staying),
        "worst_loss": _max(each["loss"] for each in staying),
        "mean_loss": _mean(each["loss"] for each in staying),
        "tokens": _sum(staying, "tokens"),
        "exchanges_made": _sum(list(peers.values()), "exchanges_made"),
        "relayed_exchanges": _sum(ours, "relayed_exchanges"),
        "exchanges_between_routers": between_routers(honest),
        "punched_exchanges": _sum(ours, "punched_exchanges"),
        "punchable_pairs": pairs,
        "punched_share": _ratio(punched, pairs),
        "fewest_exchanges": min((each["exchanges_made"] for each in staying), default=0),
        "fewest_exchanges_afterwards": min((each["exchanges_afterwards"] for each in staying), default=0),
        "exchanges_per_outer_step": _min(each["exchanges_per_outer_step"] for each in staying),
        "solo_share": _max(each["solo_share"] for each in staying),
        "uplink_share": _min(each["uplink_share"] for each in staying),
        "exchanges_failed": _sum(list(peers.values()), "exchanges_failed"),
        "exchanges_broken": _sum(ours, "exchanges_broken"),
        "fewest_tokens_meanwhile": (least := _min(each["tokens_meanwhile"] for each in staying)),
        "slowest_pace_meanwhile": _ratio(least, _max(each["tokens_meanwhile"] for each in staying)),
        **{name: _sum(ours, name) for name in ("half_commits", "offences", "caught_up", "resumed", *TOLD)},
        **_newcomer_figures(honest, peers, record["done"]),
        **{name: _sum(ours, name) for name in ("trainers_died", "trainers_returned")},
        **{name: _max(each[name] for each in ours) for name in (*PULLS, "recovery_s")},
        "saved_afterwards": _sum(staying, "saved_afterwards"),
        **{name: _max(each[name] for each in staying) for name in WAITS},
        "disagreement": disagreement,
        "last_distance": _max(each["last_distance"] for each in staying),
        "longest_return_s": _max(each["longest_return_s"] for each in staying),
        "exchanges_across": sum(during for during, _ in parted),
        "exchanges_across_afterwards": min((after for _, after in parted), default=0),
        "exchanges_within": _min(
            exchanges_within(artifacts, record["done"], key, parts) for key, parts in sides.items()
        ),
        "outer_steps_to_contact": None if None in met else _max(met),
        "outer_steps_to_heal": None if None in healed else _max(healed),
        "restarts": sum(max(len(each) - 1, 0) for name, each in lives.items() if name in names),
        "unexpected_exits": sum(
            life["status"] != 0 and not life["ended_by_us"] for each in lives.values() for life in each
        ),
        "missed_acts": len(record["missed"]),
        "wall_s": record["wall_s"],
        **run_figures(artifacts),
        **text_figures(honest),
        "loss_spread": _ratio(_max(each["loss"] for each in staying), _min(each["loss"] for each in staying)),
        "bootstrap_bytes_per_exchange": _ratio(_carried(record), _sum(ours, "exchanges_made")),
        "peak_memory": _max(peak for name, peak in record.get("peaks", {}).items() if name in steady),
        **{name: _max(each.get(name) for each in growing) for name in GROWTH},
        "bootstraps": {name: growth(samples[name]) for name in samples if name not in peers},
        "watched": {name: first_and_last(those) for name, those in samples.items() if those},
        "groups": {
            group: _group_figures([peers[each.peer.name] for each in there if each.peer.group == group])
            for group in dict.fromkeys(each.peer.group for each in honest)
        },
    }


def between_routers(honest: Sequence[Artifacts]) -> int:
    """Count exchanges between two peers behind routers; each of the two counts them."""
    behind = {each.peer_id for each in honest if each.peer.settings.router or each.peer.settings.home}
    return sum(made.partner in behind for each in honest if each.peer_id in behind for made in each.exchanges())


def punchable_pairs(honest: Sequence[Artifacts]) -> tuple[int, int]:
    """Return the pairs of peers that exchanged and whose routers let holes be punched, and those connected directly.

    The latter are pairs of which no exchange that began ``PUNCHING_S`` or more after their first was relayed, and one
    was direct.
    """
    punchable = {each.peer_id for each in honest if each.peer.settings.router not in (False, "symmetric")}
    made: dict[frozenset[str], list[ExchangeArtifact]] = {}
    for each in honest:
        for one in each.exchanges():
            if each.peer_id in punchable and one.partner in punchable:
                made.setdefault(frozenset((each.peer_id, one.partner)), []).append(one)

    def is_direct(exchanges: Sequence[ExchangeArtifact]) -> bool:
        until = min(each.began for each in exchanges) + PUNCHING_S
        return all(each.began < until or not each.is_relayed for each in exchanges) and any(
            each.is_punched for each in exchanges
        )

    return len(made), sum(map(is_direct, made.values()))


def _newcomer_figures(
    honest: Sequence[Artifacts], peers: Mapping[str, Mapping[str, Any]], done: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Compute the figures of peers that were started, or started again, after second 0."""
    came = {act["who"]: float(act["time"]) for act in done if act["do"] == ActKind.START}
    newcomers = [each for each in honest if each.peer.name in came]
    caught_up = [each for each in newcomers if each.since("caught up", came[each.peer.name])]
    over = max((each.last_time for each in honest), default=0.0)
    due = [each for each in newcomers if each in caught_up or came[each.peer.name] <= over - NEWCOMER_S]
    staying = {each.peer.name: peers[each.peer.name]["loss"] for each in honest if peers[each.peer.name]["stayed"]}
    theirs = _mean(loss for name, loss in staying.items() if name in came)
    others = _mean(loss for name, loss in staying.items() if name not in came)
    early = [each for each in honest if each.peer.name not in came]
    return {
        "newcomers": len(newcomers),
        "newcomers_caught_up": len(caught_up),
        "newcomers_caught_up_share": len(caught_up) / len(due) if due else None,
        "newcomers_loss": theirs / others if theirs is not None and others else None,
        "newcomers_learning_rate": learning_rate_ratio(
            [each for each in honest if each.peer.name in staying], set(came)
        ),
        "newcomers_loss_soon": _max(early_loss_ratio(each, came[each.peer.name], early) for each in newcomers),
    }


def pull_figures(artifacts: Artifacts) -> dict[str, float | None]:
    """Return the largest value of each of PULLS in one weight download of a peer; None without any."""
    return {name: artifacts.most("took weights", field) for name, field in PULLS.items()}


def learning_rate_ratio(staying: Sequence[Artifacts], came: Set[str]) -> float | None:
    """Return the mean learning rate of newcomers over that of the others at the last time when all still trained.

    A newcomer that restarts the schedule would also reach the run's end, only later. None without notes of both.
    """
    rates = {each.peer.name: noted for each in staying if (noted := each.learning_rates())}
    until = min((noted[-1][0] for noted in rates.values()), default=0.0)
    then = {name: [rate for time, rate in noted if time <= until][-1:] for name, noted in rates.items()}
    theirs = [rate for name, last in then.items() if name in came for rate in last]
    others = [rate for name, last in then.items() if name not in came for rate in last]
    return mean(theirs) / mean(others) if theirs and others and mean(others) else None


def early_loss_ratio(one: Artifacts, came: float, others: Sequence[Artifacts]) -> float | None:
    """Return a newcomer's training loss over the others', EARLY_STEPS outer steps after it took weights.

    The newcomer's loss is the mean of its inner phase at that step; the others' is the mean of the last inner phases
    that they completed by then.

    Args:
        came: when it was started (seconds since 1970); weights taken before do not count.

    Returns:
        None if it took no weights or did not complete these steps, or if no other peer noted a loss.
    """
    taken = one.first("caught up", came)
    if taken is None:
        return None
    since = [each for each in one.progress() if each.time >= taken]
    noted = [
        (each.time, each.loss) for each in since if each.step >= since[0].step + EARLY_STEPS and each.loss is not None
    ]
    if not noted:
        return None
    time, ours = noted[0]
    theirs = [losses[-1] for each in others if (losses := _losses(each, time))]
    return ours * len(theirs) / sum(theirs) if theirs else None


def _losses(one: Artifacts, until: float) -> list[float]:
    return [each.loss for each in one.progress() if each.loss is not None and each.time <= until]


def _group_figures(members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compute the figures of the peers of a group that stayed."""
    return {
        "stayed": len(members),
        "loss": _mean(each["loss"] for each in members),
        **{name: _max(each[name] for each in members) for name in WAITS},
        **{
            name: _mean(each[name] for each in members)
            for name in (
                "tokens",
                "tokens_per_s",
                "exchanges_made",
                "exchanges_afterwards",
                "exchanges_failed",
                "told_shortened_s",
                "training_cpu_s",
            )
        },
        "exchanges_per_outer_step": _min(each["exchanges_per_outer_step"] for each in members),
        **{name: _sum(members, name) for name in ("exchanges_broken", "caught_up_afterwards", *TOLD)},
    }


def compared(figures: Mapping[str, Any], undisturbed: Mapping[str, Any]) -> dict[str, Any]:
    """Return each figure over that of the undisturbed run, where both exist."""
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


def _peer_figures(
    artifacts: Artifacts,
    lives: Sequence[Mapping[str, Any]],
    everybody: Sequence[Artifacts],
    done: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    summary, steps = artifacts.summary or {}, artifacts.steps()
    acts = [float(act["time"]) for act in done]
    last_act = max(acts, default=0.0)
    while_training = [each for each in artifacts.exchanges() if each.began < artifacts.trained_at()]
    stayed = bool(lives) and not lives[-1]["ended_by_us"]
    return {
        "group": artifacts.peer.group,
        "stayed": stayed,
        "finished": bool(summary.get("finished", False)),
        "exits": [life["ended_by_us"] or life["status"] for life in lives],
        "loss_first": summary.get("val_loss_first"),
        "loss": summary.get("val_loss_last"),
        "tokens": summary.get("tokens"),
        "tokens_per_s": summary.get("tokens_per_s"),
        "exchanges_made": len(while_training),
        "exchanges_afterwards": sum(each.began > last_act for each in while_training),
        "uplink_share": artifacts.uplink_share(),
        "relayed_exchanges": sum(each.is_relayed for each in artifacts.exchanges()),
        "punched_exchanges": sum(each.is_punched for each in artifacts.exchanges()),
        "exchanges_per_outer_step": len(while_training) / steps if steps else None,
        "solo_share": summary["solo_steps"] / steps if steps and "solo_steps" in summary else None,
        "exchanges_failed": artifacts.count("failed"),
        "exchanges_broken": broken_exchanges(artifacts, everybody, done),
        "tokens_meanwhile": artifacts.tokens_between(min(acts), last_act) if acts else None,
        "half_commits": summary.get("half_commits"),
        "offences": artifacts.count("broke protocol"),
        "caught_up": artifacts.count("caught up"),
        "caught_up_afterwards": artifacts.since("caught up", last_act),
        **pull_figures(artifacts),
        **trainer_figures(artifacts, everybody),
        "resumed": artifacts.count("resumed"),
        "saved_afterwards": artifacts.saved_since(last_act),
        **{name: name in artifacts.said for name in TOLD},
        "blocked_share": summary.get("blocked_fraction"),
        "longest_stall": summary.get("longest_stall_inner_steps"),
        "last_distance": artifacts.last_distance(),
        "longest_return_s": longest_return_s(artifacts, done),
        "told_shortened_s": told_shortened_s(artifacts),
        "training_cpu_s": training_cpu_s(artifacts),
        "curve": curve(artifacts),
        "why": summary.get("why", ""),
    }


def broken_exchanges(one: Artifacts, artifacts: Sequence[Artifacts], done: Sequence[Mapping[str, Any]]) -> int:
    """Count a peer's failed exchanges that were in progress when the partner was killed or suspended.

    Both sides had agreed on them. Unanswered offers and failures for other reasons do not count.
    """
    ids = {each.peer.name: each.peer_id for each in artifacts}
    away = [(ids[act["who"]], float(act["time"])) for act in done if act["do"] in INTERRUPTIONS and act["who"] in ids]
    return sum(
        any(each.partner == peer_id and each.began < time <= each.ended + HEARD_S for peer_id, time in away)
        for each in one.broken()
    )


def blame(one: Artifacts, everybody: Sequence[Artifacts]) -> dict[str, int]:
    """Return two figures of one peer.

    ``noticed``: notes of honest peers that blame it, also if it is honest itself. ``lied``: lies that honest peers drop
    without a note, as it counted them itself.
    """
    honest = [each for each in everybody if each is not one and each.peer.settings.lie is None]
    blamed = sum(_blames(note, one.peer_id) for each in honest for note in each.notes)
    lied = sum(int(note.get("times", 0)) for note in one.notes if note.get("kind") == "lied")
    return {"noticed": blamed, "lied": lied}


def _blames(note: Note, peer: str) -> bool:
    if note.get("peer") != peer or (words := BLAMED.get(note.get("kind", ""))) is None:
        return False
    return re.search(words, str(note.get("why", ""))) is not None


def _learned(figures: Mapping[str, Any]) -> bool:
    first, last = figures["loss_first"], figures["loss"]
    return first is not None and last is not None and last < LEARNED * first  # False for NaN


def _max(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return max(known, key=lambda value: (math.isnan(value), value), default=None)  # NaN counts as the largest


def _min(values: Any) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _carried(record: Mapping[str, Any]) -> float | None:
    """Return the bytes that the bootstraps' lines carried; None if nothing counted them."""
    found = [each for each in record.get("line_bytes", {}).values() if each is not None]
    return sum(found) if found else None


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _sum(figures: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(int(each[name] or 0) for each in figures)
