"""The evidence in a few sentences, for who reads no table. Pure, over ``summary.json`` and the rule's decision.

A sentence stands only where all its figures are there, and its words follow them: "clearly" is by more than two
standard errors, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bench.evidence.cells import CENTRAL
from bench.evidence.contenders import SWARM_2
from bench.evidence.experiments.r1_quality import ALONG_THE_AXES, EVERY_STEP, NON_IID
from bench.evidence.experiments.r3_straggler import SETTINGS as STRAGGLERS
from bench.evidence.experiments.r6_churn import FAILING, MOVING
from bench.evidence.experiments.r9_uneven import SETTINGS as UNEVEN
from bench.evidence.experiments.r9_uneven import SHOWN, WEIGHTED
from bench.evidence.published import HOME, Line
from bench.evidence.rule import AT_10, AT_30, Decision, figure
from bench.evidence.summary import Figure, better
from bench.table import Row

Summary = Mapping[str, Any]
Key = Mapping[str, Any]

QUARTER = "x modular4 /4"
"""R5's row of the default's codec in which an exchange moves a quarter of the parameters."""


def conclusion(summary: Summary, decision: Decision | None, reached: list[Row]) -> list[str]:
    """About ten sentences; fewer while runs are missing, none while the rule has chosen nothing."""
    if decision is None:
        return []
    makers: tuple[Callable[[Summary, str], Iterator[str]], ...] = (
        _quality,
        _gossip,
        _price,
        _other_sizes,
        _non_iid,
        _straggler,
        _churn,
        _uneven,
        _at_home,
        _data_parallel,
    )
    sentences = [sentence for maker in makers for sentence in maker(summary, decision.contender)]
    missed = [row for row in reached if row.reached is False]
    sentences.append(f"Of {len(reached)} rows of goals below {len(missed)} were missed.")
    return [
        *sentences,
        "All of it is one model of 123,000 parameters on simulated lines: how it goes on at a billion is not known.",
    ]


def _quality(summary: Summary, mine: str) -> Iterator[str]:
    for experiment, whose in (("R1", "the seeds that chose it"), ("R11", "seeds that chose nothing")):
        pairs = [_losses(summary, experiment, mine, "diloco", key) for key in (AT_10, AT_30)]
        if all(pairs):
            ten, thirty = (_against(*pair) for pair in pairs if pair)
            yield (
                f"At equal tokens among 8 peers the default, {mine}, over tuned DiLoCo's loss, on {whose}: {ten} at "
                f"H = 10 and {thirty} at H = 30."
            )


def _gossip(summary: Summary, mine: str) -> Iterator[str]:
    told = []
    for rival in ("noloco", "gasloc", "factored_gossip"):
        pair = _losses(summary, "R1", mine, rival, AT_10)
        if pair:
            told.append(f"{rival}'s {_against(*pair)}")
    if told:
        yield f"Over the loss of those who gossip, at H = 10: {_listed(told)}{_traffic(summary, mine)}."
    told = []
    for one, other, alike in (
        ("swarm half", "gasloc", "bytes"),
        ("swarm", "gasloc-2", "exchanges"),
    ):
        pair = _losses(summary, "R1", one, other, AT_10)
        if pair:
            told.append(f"with as many {alike} {one} over {other} is {_against(*pair)}")
    if told:
        yield f"At equal traffic, at H = 10: {_listed(told)}."


def _traffic(summary: Summary, mine: str) -> str:
    """What each of them sends, uncompressed."""
    bits = {
        name: found.mean
        for name in (mine, "diloco", "noloco", "gasloc", "factored_gossip")
        if (found := figure(summary, "R1", name, AT_10, "bits_per_parameter")) is not None
    }
    if mine not in bits or len(bits) == 1:
        return ""
    others = _listed([f"{name} {sent:.0f}" for name, sent in bits.items() if name != mine])
    return f"; in fp32 {mine} sends {bits[mine]:.0f} bits per parameter and outer step, {others}"


def _price(summary: Summary, mine: str) -> Iterator[str]:
    exact = figure(summary, "R5", "x fp32", AT_10, "loss") if mine == SWARM_2.name else None
    told = []
    for row in ("x fp32", "x modular4", "x modular4 /2", "x modular4 7/16", "x modular4 /4", "x modular4 /16"):
        bits, loss = (figure(summary, "R5", row, AT_10, name) for name in ("bits_per_parameter", "loss"))
        if exact is not None and bits is not None and loss is not None:
            told.append(f"{bits.mean:.1f} bits {loss.mean / exact.mean:.3f}")
    if told:
        yield (
            f"Fewer bits cost, in loss over that of {mine} in fp32: {_listed(told)} (per parameter and outer step, "
            "all counted)."
        )


def _other_sizes(summary: Summary, mine: str) -> Iterator[str]:
    told = []
    for setting in ALONG_THE_AXES:
        pair = _losses(summary, "R1", mine, "diloco", setting.key())
        if pair:
            told.append(f"N = {setting.peers}, H = {setting.inner_steps}: {_against(*pair)}")
    if told:
        yield f"Elsewhere, over DiLoCo's loss: {'; '.join(told)}."


def _non_iid(summary: Summary, mine: str) -> Iterator[str]:
    for setting in NON_IID:
        told = [
            f"{rival}'s {_against(*pair)}"
            for rival in ("diloco", "noloco", "gasloc", "factored_gossip")
            if (pair := _losses(summary, "R1", mine, rival, setting.key()))
        ]
        if told:
            yield (
                f"Where each reads its own part of the text (H = {setting.inner_steps}), over their losses: "
                f"{_listed(told)}."
            )


def _straggler(summary: Summary, mine: str) -> Iterator[str]:
    slow = STRAGGLERS[-1].key()
    times = {
        name: figure(summary, "R3", name, slow, "seconds_to_target")
        for name in (mine, "diloco", "gasloc", "gasloc-2", "factored_gossip")
    }
    ours = times.pop(mine)
    if ours is not None:
        told = [f"{each.mean / ours.mean:.2f} x {name}'s" for name, each in times.items() if each is not None]
        yield f"With one line of eight at 10 % the same loss comes at a speed of {_listed(told)}."


def _churn(summary: Summary, mine: str) -> Iterator[str]:
    told = []
    for setting, what in ((FAILING[2], "three exchanges of ten fail"), (MOVING, "a quarter leaves and as many come")):
        one = figure(summary, "R6", mine, setting.key(), "loss")
        calm = figure(summary, "R1", mine, AT_10, "loss")
        if one is not None and calm is not None:
            told.append(f"where {what} {_against(one, calm)}")
    if told:
        yield f"Its loss over what it is undisturbed: {_listed(told)}."


def _uneven(summary: Summary, mine: str) -> Iterator[str]:
    for name, how in ((mine, "With equal shares"), (WEIGHTED.name, "With shares by work")):
        told = []
        for setting in UNEVEN[1:]:
            ratios = {rung: figure(summary, "R9", name, setting.key(), f"fast_ratio:{rung}") for rung in SHOWN}
            known = {rung: ratio.mean for rung, ratio in ratios.items() if ratio is not None}
            worst = figure(summary, "R9", name, setting.key(), "fast_delay")
            if known and worst is not None:
                last = min(known)
                told.append(
                    f"{setting.speed_ratio:g} times as fast as the others needs {known[last]:.2f} times its "
                    f"time alone for a loss of {last:g}, and {worst.mean:.2f} times for the loss where it is worst"
                )
        if told:
            yield f"{how} a peer {_listed(told)}."


def _at_home(summary: Summary, mine: str) -> Iterator[str]:
    row = f"{mine} modular4"
    busy, sent = (figure(summary, "R4", row, Line(HOME, 20).key(), each) for each in ("utilization", "delivered"))
    if busy is None or sent is None:
        return
    rival = figure(summary, "R4", "diloco int8", Line(HOME, 20).key(), "utilization")
    beside = "" if rival is None else f"; diloco in int8 computes {100 * rival.mean:.0f} %, and sends all"
    yield (
        f"On a home's line ({HOME}, H = 30) {row} computes {100 * busy.mean:.1f} % of its time and sends "
        f"{100 * sent.mean:.0f} % of its exchanges{beside}."
    )
    few = figure(summary, "R5", QUARTER, AT_10, "loss")
    told = [
        f"{name}'s {_against(few, other)}"
        for name in ("diloco", "factored_gossip", "gasloc", "noloco")
        if few is not None and (other := figure(summary, "R1", name, AT_10, "loss")) is not None
    ]
    if told and sent.mean < 1:
        yield (
            "What sending less costs was not run at that size. The nearest row, which sends a quarter of what the "
            f"default sends ({QUARTER}, H = 10), has over the losses of those who send all in fp32: {_listed(told)}."
        )


def _data_parallel(summary: Summary, mine: str) -> Iterator[str]:
    best = figure(summary, "R1", "ddp", EVERY_STEP.key(), "loss")
    ours = figure(summary, "R1", mine, CENTRAL.key(), "loss")
    if best is not None and ours is not None:
        yield f"Over the loss of averaging every gradient (ddp), which no home line carries: {_against(ours, best)}."


def _losses(summary: Summary, experiment: str, one: str, other: str, key: Key) -> tuple[Figure, Figure] | None:
    found = [figure(summary, experiment, name, key, "loss") for name in (one, other)]
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def _against(one: Figure, other: Figure) -> str:
    """The ratio, and what can be said of it."""
    if better(one, other, "low"):
        word = "clearly better"
    elif better(other, one, "low"):
        word = "clearly worse"
    else:
        word = "no clear difference"
    return f"{one.mean / other.mean:.3f} ({word})"


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
