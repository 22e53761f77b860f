"""What newcomers took of others: weights, and where the swarm is in its schedule. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from statistics import mean

from lab.artifacts import Artifacts

PULLS: Mapping[str, str] = {
    "donors": "donors",
    "pieces": "pieces",
    "donors_lost": "broke_off",
    "pieces_again": "asked_again",
}
"""Figures of pulls, and what a note of a pull calls each."""


def pulled(left: Artifacts) -> dict[str, float | None]:
    """Of a peer that took weights the most in one pull."""
    return {name: left.most("took weights", field) for name, field in PULLS.items()}


def schedules(staying: Sequence[Artifacts], came: Set[str]) -> float | None:
    """The learning rate of those who came over that of the others, all at the last moment at which each still trained:
    a newcomer whose schedule began anew would reach the run's end too, only later. None: nobody tells.
    """
    rates = {each.part.name: told for each in staying if (told := each.learning_rates())}
    until = min((told[-1][0] for told in rates.values()), default=0.0)
    then = {name: [rate for time, rate in told if time <= until][-1:] for name, told in rates.items()}
    theirs = [rate for name, last in then.items() if name in came for rate in last]
    others = [rate for name, last in then.items() if name not in came for rate in last]
    return mean(theirs) / mean(others) if theirs and others and mean(others) else None
