"""The goals, and what was reached. Pure, over ``summary.json`` and the rule's decision.

They were set before the first number. Rows marked ``ADDED`` were not: they ask more, or the same more fairly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bench.evidence.contenders import SWARM_2
from bench.evidence.experiments.r3_straggler import SETTINGS as STRAGGLERS
from bench.evidence.experiments.r7_growth import COUNTED
from bench.evidence.experiments.r9_uneven import SETTINGS as UNEVEN
from bench.evidence.experiments.r9_uneven import WEIGHTED
from bench.evidence.experiments.r11_doubts import GASLOC_4
from bench.evidence.published import HOME, Line
from bench.evidence.rule import AT_10, AT_30, AT_ITS_BEST, Decision, figure
from bench.evidence.summary import CLEAR, Figure, better, paired
from bench.table import Row

ADDED = " (row added later)"

EQUAL = (
    ("R1", "swarm half", "R1", "gasloc", f", as many bytes{ADDED}"),
    ("R1", "swarm", "R1", "gasloc-2", f", as many exchanges{ADDED}"),
    ("R1", "swarm-2", "R11", GASLOC_4.name, f", as many exchanges{ADDED}"),
)
"""Ours, theirs, and what both have alike: by default ours makes more exchanges, and larger ones, than theirs."""


def goals(summary: Mapping[str, Any], decision: Decision | None) -> list[Row]:
    """One row a goal. A goal whose figures are not there yet is left out."""
    mine = "swarm" if decision is None else decision.contender
    makers: tuple[Callable[[Mapping[str, Any], str], Iterator[Row]], ...] = (
        _against_diloco,
        _against_gossip,
        _few_bits,
        _straggler,
        _fast_peer,
        _home_line,
        _growth,
    )
    return [row for maker in makers for row in maker(summary, mine)]


def _against_diloco(summary: Mapping[str, Any], mine: str) -> Iterator[Row]:
    """On R1's seeds, which also chose the default, and on R11's, which chose nothing."""
    for experiment, seeds in (("R1", ""), ("R11", f", seeds that chose nothing{ADDED}")):
        for setting, inner_steps, target in ((AT_10, 10, 1.0), (AT_30, 30, 1.01)):
            one, other = (figure(summary, experiment, name, setting, "loss") for name in (mine, "diloco"))
            if one is not None and other is not None:
                ratio, slack = one.mean / other.mean, _slack(one, other)
                yield Row(
                    f"{mine}: loss over that of tuned DiLoCo, N = 8, H = {inner_steps}{seeds}",
                    f"<= {target:.2f} within two standard errors",
                    f"{ratio:.4f} (two standard errors: {slack:.4f}{_by_seed(one, other)})",
                    ratio <= target + slack,
                )


def _against_gossip(summary: Mapping[str, Any], mine: str) -> Iterator[Row]:
    """As the goal has it, and then with as many exchanges or as many bytes on both sides."""
    pairs = [("R1", mine, "R1", "noloco", ""), ("R1", mine, "R1", "gasloc", "")]
    for setting, inner_steps in ((AT_10, 10), (AT_30, 30)):
        for experiment, name, theirs, rival, equal in (*pairs, *EQUAL):
            one, other = (
                figure(summary, experiment, name, setting, "loss"),
                figure(summary, theirs, rival, setting, "loss"),
            )
            if rival != name and one is not None and other is not None:
                yield Row(
                    f"{name} against {rival}{equal}: loss at N = 8, H = {inner_steps}",
                    "lower by more than two standard errors",
                    f"{one.mean:.3f} against {other.mean:.3f} (ratio {one.mean / other.mean:.4f} "
                    f"± {_slack(one, other):.4f}{_by_seed(one, other)})",
                    better(one, other, "low"),
                )


def _few_bits(summary: Mapping[str, Any], mine: str) -> Iterator[Row]:
    """Against the same recipe in fp32, and against tuned DiLoCo."""
    for experiment, reference, shown, added in (
        ("R5", "x fp32", "swarm-2's in fp32", ""),
        ("R1", "diloco", "tuned DiLoCo's", ADDED),
    ):
        exact = figure(summary, experiment, reference, AT_10, "loss")
        if exact is not None:
            yield from _few_bits_against(summary, exact, shown, added)


def _few_bits_against(summary: Mapping[str, Any], exact: Figure, shown: str, added: str) -> Iterator[Row]:
    for most, loss_ratio, apart in ((8.0, 1.0, math.inf), (1.0, 1.01, 0.02)):
        fitting, near = [], []
        for row in summary.get("R5", ()):
            loss, bits, disagreement = (
                figure(summary, "R5", row["contender"], AT_10, name)
                for name in ("loss", "bits_per_parameter", "disagreement")
            )
            if loss is None or bits is None or disagreement is None:
                continue
            ratio = loss.mean / exact.mean
            payload = figure(summary, "R5", row["contender"], AT_10, "payload_bits_per_parameter")
            alone = "" if payload is None else f" (payload alone {payload.mean:.2f})"
            told = f"{row['contender']}: {bits.mean:.2f} bits{alone}, loss x {ratio:.4f}"
            is_good = ratio <= loss_ratio + _slack(loss, exact) and disagreement.mean <= apart
            if bits.mean <= most and is_good:
                fitting.append((loss.mean, told))
            elif is_good:
                near.append((bits.mean, told))
        extra = f", disagreement <= {apart:g}" if apart < math.inf else ""
        yield Row(
            f"at most {most:g} bit{'s' * (most != 1)} per parameter and outer step, everything counted{added}",
            f"loss <= {loss_ratio:g} x {shown} within two standard errors{extra}",
            min(fitting)[1] if fitting else f"no row of R5; next {min(near)[1]}" if near else "no row of R5",
            bool(fitting),
        )


def _straggler(summary: Mapping[str, Any], mine: str) -> Iterator[Row]:
    full, slow = STRAGGLERS[0].key(), STRAGGLERS[-1].key()
    row = SWARM_2.name if mine.startswith("swarm") else mine
    with_, without = (figure(summary, "R3", row, each, "others_utilization") for each in (slow, full))
    if with_ is not None and without is not None:
        change = with_.mean / without.mean - 1
        yield Row(
            f"{row}: speed of the others with a straggler at 10 %",
            "within 1 %",
            f"{100 * change:+.2f} %",
            abs(change) <= 0.01,
        )
    one, other = (figure(summary, "R3", name, slow, "seconds_to_target") for name in (row, "diloco"))
    if one is not None and other is not None:
        ratio = other.mean / one.mean
        yield Row(
            f"{row} against DiLoCo there: time to the same loss",
            ">= 2 x faster",
            f"{ratio:.2f} x (two standard errors: {_slack(other, one):.2f})",
            ratio >= 2,
        )


def _fast_peer(summary: Mapping[str, Any], mine: str) -> Iterator[Row]:
    for setting in UNEVEN:
        for name in (SWARM_2.name, WEIGHTED.name):
            delay, never = (figure(summary, "R9", name, setting.key(), each) for each in ("fast_delay", "fast_never"))
            if delay is not None and never is not None:
                slack = CLEAR * (delay.standard_error or 0.0)
                yield Row(
                    f"{name}, 1:{setting.speed_ratio:g}: the fast peer's time to a loss over its time alone, worst",
                    "<= 1 within two standard errors",
                    f"{delay.mean:.2f} (two standard errors: {slack:.2f})"
                    + (f", and {never.mean:.1f} losses never" if never.mean else ""),
                    delay.mean <= 1 + slack and never.mean == 0,
                )


def _home_line(summary: Mapping[str, Any], mine: str) -> Iterator[Row]:
    chosen = AT_ITS_BEST.get(mine, ())[-1:]
    for name in dict.fromkeys((*chosen, "swarm int8", "swarm modular4", "swarm modular4, one swap")):
        busy, sent = (figure(summary, "R4", name, Line(HOME, 20).key(), each) for each in ("utilization", "delivered"))
        if busy is not None:
            share = 1.0 if sent is None else sent.mean
            yield Row(
                f"{name}: utilization, {HOME}, H = 30",
                ">= .99, and all its exchanges sent",
                f"{busy.mean:.3f}, {100 * share:.0f} % of them sent",
                busy.mean >= 0.99 and share == 1.0,
            )


_DIRECTORY = "directory_bytes_per_peer"


def _growth(summary: Mapping[str, Any], mine: str) -> Iterator[Row]:
    for shown, name in (("bytes per peer", "bytes_per_peer"), (f"the directory's, both ways{ADDED}", _DIRECTORY)):
        found = [figure(summary, "R7", "swarm", each.key(), name) for each in COUNTED]
        numbers = [each.mean for each in found if each is not None]
        if len(numbers) == len(COUNTED):
            spread = max(numbers) / min(numbers)
            yield Row(
                f"{shown}, 8 to 10,000 peers (swarm, a quarter in int8): most over least",
                "flat (<= 1.05)",
                f"{spread:.3f}",
                spread <= 1.05,
            )


def _by_seed(one: Figure, other: Figure) -> str:
    ratio = paired(one, other)
    return "" if ratio is None else f"; seed by seed {ratio.mean:.4f} ± {CLEAR * (ratio.standard_error or 0.0):.4f}"


def _slack(one: Figure, other: Figure) -> float:
    """Two standard errors of the ratio of two figures."""
    relative = math.hypot((one.standard_error or 0.0) / one.mean, (other.standard_error or 0.0) / other.mean)
    return CLEAR * relative * one.mean / other.mean
