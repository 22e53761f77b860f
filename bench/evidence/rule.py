"""From the tables to the default: which recipe, which numbers, which codec. Pure, over ``summary.json``.

The rule, as docs/RESULTS.md prints it::

    candidates   the methods of R1 that a swarm of strangers can run: pairs of peers, nobody waits for everybody; and
                 at home they must compute at least 90 % of their time (R4: 135M, 100 / 20 Mbit/s, H = 30, with
                 whatever codec of the table serves them best), since strangers must not wait for lines
    1 loss       lowest mean of the test losses at N = 8, H = 10 and H = 30; all that are not clearly worse stay
    2 bits       of those, the fewest bits per parameter and outer step
    numbers      the tuning's, for that method
    codec        of R5's rows for that stream in one piece (fragments are a number of the method, and not tuned): not
                 clearly worse than fp32, disagreement at most 2 %; of those, the fewest bits

"Clearly" is by more than two standard errors. None of its steps names a recipe; docs/RESULTS.md tells what in the list
of candidates and in the first step favours ours all the same. That DiLoCo may train better and
still cannot be the default, since it needs everybody at once, is said beside it with its figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.evidence.contenders import (
    FACTORED,
    GASLOC,
    NOLOCO,
    SWARM,
    SWARM_2,
    SWARM_BLOCKING,
    SWARM_BOTH,
    SWARM_HALF,
    SWARM_SLOW,
)
from bench.evidence.published import HOME, Line
from bench.evidence.summary import CLEAR, EXACT, Figure

TUNED_AS: Mapping[str, str] = {
    each.name: each.tuned_as or each.name
    for each in (FACTORED, GASLOC, NOLOCO, SWARM, SWARM_HALF, SWARM_BOTH, SWARM_BLOCKING, SWARM_2, SWARM_SLOW)
}
"""The candidates, and whose numbers each has."""

CANDIDATES = tuple(sorted(TUNED_AS))
"""In the alphabet's order, which breaks ties of equal loss and equal bits."""

AT_ITS_BEST: Mapping[str, tuple[str, ...]] = {
    "factored_gossip": ("factored_gossip", "factored_gossip int8", "factored_gossip modular4, topk"),
    "gasloc": ("gasloc-1", "gasloc-1 int8", "gasloc-1 modular4"),
    "noloco": ("noloco", "noloco int8", "noloco modular4, topk"),
    "swarm": ("swarm", "swarm int8", "swarm modular4"),
    "swarm half": ("swarm modular4, one swap",),
    "swarm x and g": ("swarm x and g modular4",),
    "swarm, slow": ("swarm", "swarm int8", "swarm modular4"),
    "swarm, blocking": ("gasloc-1", "gasloc-1 int8", "gasloc-1 modular4"),
    "swarm-2": ("swarm-2 modular4",),
}
"""Rows of R4 that are the candidate in one codec or another. "swarm, blocking" uses the line as gasloc does."""

AT_HOME: Mapping[str, Any] = Line(HOME, 20).key()
LEAST_BUSY = 0.9
"""The least share of its time that a candidate's trainer computes at home."""

AT_10: Mapping[str, Any] = {}
AT_30: Mapping[str, Any] = {"inner_steps": 30, "steps": 3_210}

SAME_BITS = 1.02
"""Bits within 2 % of each other count as equal: frames and offers differ a little by chance."""

MOST_DISAGREEMENT = 0.02
"""The issue's goal, and the demo's ``final_disagreement``."""

STREAMS = {"swarm": "x", "swarm_slow": "x", "swarm_gradients": "g", "swarm_both": "x, g"}
"""Recipes by the rows of R5 that judge their codec. R5 has tried codecs on ours alone: another recipe's stays open."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The default."""

    contender: str
    recipe: str
    learning_rate: float
    momentum: float
    codec: str | None
    """R5's row; None while R5 has none that serves."""
    because: tuple[str, ...]
    """The steps of the rule, in words."""


def decide(summary: Mapping[str, Any]) -> Decision | None:
    """The default by the rule; None while R1 has no candidate with both settings and a tuning."""
    names, refused = _runnable(summary)
    scores = {name: score for name in names if (score := _score(summary, name)) is not None}
    if not scores:
        return None
    lowest = min(scores, key=lambda name: scores[name].mean)
    level = [name for name in scores if not _clearly_worse(scores[name], scores[lowest])]
    bits = {name: _mean(summary, "R1", name, AT_10, "bits_per_parameter") for name in level}
    fewest = min(bits.values())
    winner = next(name for name in level if bits[name] <= SAME_BITS * fewest)
    chosen = summary["tuning"][TUNED_AS[winner]]
    codec, why = _codec(summary, STREAMS.get(chosen["recipe"]))
    ranking = ", ".join(
        f"{name} {scores[name].mean:.3f}" for name in sorted(scores, key=lambda each: scores[each].mean)
    )
    because = (
        f"candidates refused: {'; '.join(refused) or 'none'}",
        f"loss, mean of H = 10 and 30: {ranking}",
        f"not clearly worse than {lowest}: {', '.join(level)}",
        f"fewest bits among them: {winner} ({bits[winner]:.3g} per parameter and outer step)",
        why,
    )
    return Decision(winner, chosen["recipe"], chosen["learning_rate"], chosen["momentum"], codec, because)


def _runnable(summary: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Candidates that were tuned and may be the default; and who may not, with the reason."""
    tuning, names, refused = summary.get("tuning", {}), [], []
    for name in CANDIDATES:
        if TUNED_AS[name] not in tuning:
            continue
        busy = _busiest(summary, name)
        if "global" in tuning[TUNED_AS[name]]["recipe"]:
            refused.append(f"{name} (needs everybody at once)")
        elif busy is None:
            refused.append(f"{name} (R4 has no row for it)")
        elif busy.mean < LEAST_BUSY:
            refused.append(f"{name} (computes {100 * busy.mean:.0f} % of its time at best)")
        else:
            names.append(name)
    return names, refused


def _busiest(summary: Mapping[str, Any], name: str) -> Figure | None:
    """Utilization on the home line with the candidate's best row of R4."""
    found = [figure(summary, "R4", row, AT_HOME, "utilization") for row in AT_ITS_BEST[name]]
    return max((each for each in found if each is not None), key=lambda each: each.mean, default=None)


def _score(summary: Mapping[str, Any], contender: str) -> Figure | None:
    found = [figure(summary, "R1", contender, setting, "loss") for setting in (AT_10, AT_30)]
    if any(each is None or each.standard_error is None for each in found):
        return None
    known = [each for each in found if each is not None]
    error = math.hypot(*(each.standard_error or 0.0 for each in known)) / len(known)
    return Figure(sum(each.mean for each in known) / len(known), error, known[0].seeds)


def _codec(summary: Mapping[str, Any], stream: str | None) -> tuple[str | None, str]:
    if stream is None:
        return None, "codec: not decided, R5 has tried none on this recipe"
    names = [row["contender"] for row in summary.get("R5", ()) if row["contender"].startswith(f"{stream} ")]
    exact = f"{stream} fp32, fp32" if stream == "x, g" else f"{stream} fp32"
    reference = figure(summary, "R5", exact, AT_10, "loss")
    if reference is None:
        return None, f"codec: not decided, R5 has no row {exact!r}"
    fitting = {}
    for name in names:
        loss, apart = (figure(summary, "R5", name, AT_10, each) for each in ("loss", "disagreement"))
        bits = figure(summary, "R5", name, AT_10, "bits_per_parameter")
        if loss is None or apart is None or bits is None:
            continue
        if not _clearly_worse(loss, reference) and apart.mean <= MOST_DISAGREEMENT:
            fitting[name] = bits.mean
    whole = {name: bits for name, bits in fitting.items() if "/" not in name}
    pieces = ", ".join(f"{name} ({bits:.3g} bits)" for name, bits in fitting.items() if name not in whole)
    besides = f"; in pieces, which the rule leaves out, would serve: {pieces}" if pieces else ""
    if not whole:
        tried = ", ".join(name for name in names if "/" not in name)
        limit = f"{100 * MOST_DISAGREEMENT:.0f} % disagreement"
        return None, f"codec: none of {tried} is as good as fp32 within {limit}{besides}"
    fewest = min(whole, key=lambda name: whole[name])
    return fewest, f"codec: {fewest} ({whole[fewest]:.3g} bits), of {', '.join(whole)}{besides}"


def figure(
    summary: Mapping[str, Any], experiment: str, contender: str, setting: Mapping[str, Any], name: str
) -> Figure | None:
    """One figure of the summary; None when it is not there."""
    rows: Sequence[Mapping[str, Any]] = summary.get(experiment, ())
    for row in rows:
        if row["contender"] == contender and row["setting"] == dict(setting) and name in row["figures"]:
            return Figure.of_json(row["figures"][name])
    return None


def _mean(summary: Mapping[str, Any], experiment: str, contender: str, setting: Mapping[str, Any], name: str) -> float:
    found = figure(summary, experiment, contender, setting, name)
    return math.inf if found is None else found.mean


def _clearly_worse(one: Figure, best: Figure) -> bool:
    """Lower is better. A figure without a standard error is compared by the other's alone."""
    limit = CLEAR * math.hypot(one.standard_error or 0.0, best.standard_error or 0.0)
    return one.mean - best.mean > max(limit, EXACT * abs(best.mean))
