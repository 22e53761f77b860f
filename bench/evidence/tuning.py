"""Tuning: the same nine points for each form of each method (N = 8, H = 10, one seed, validation split).

The learning rates bracket the .7 of DiLoCo (arXiv 2311.08105) and NoLoCo (arXiv 2506.10911). The momenta are 0 (GASLoC
without acceleration), .5 (NoLoCo) and .8: with .9, DiLoCo's own value, DiLoCo was far worse in this setting (1.916
against 1.751 to 1.768).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from bench.evidence.cells import CENTRAL, TUNING_SEED, Cell, Choice, Contender, block
from bench.evidence.contenders import TUNED
from bench.evidence.layout import Entry, Experiment
from p2ptrain.recipes import RECIPES

LEARNING_RATES = (0.4, 0.7, 1.0)
MOMENTA = (0.0, 0.5, 0.8)
DECAYS = (0.8, 0.95, 0.99)
"""Decays of error feedback, for recipes that have it in place of momentum; .95 is SparseLoCo's (arXiv 2508.15706)."""


def momenta(recipe: str) -> tuple[float, ...]:
    """Return the three momenta, or decays, of the grid for a recipe."""
    return DECAYS if RECIPES[recipe].feedback else MOMENTA


def points(recipe: str) -> list[Choice]:
    """Return the nine points of the grid for a recipe."""
    return [Choice(recipe, rate, momentum) for rate in LEARNING_RATES for momentum in momenta(recipe)]


def tuning_cells(contenders: Iterable[Contender]) -> tuple[Cell, ...]:
    """Return all cells that tune these contenders."""
    return tuple(
        cell
        for contender in contenders
        for form in contender.forms
        for choice in points(form)
        for cell in block("tuning", (contender,), (CENTRAL,), seeds=(TUNING_SEED,), choice=choice)
    )


TUNING = Experiment(
    id="tuning",
    question="Outer learning rate and momentum of each method",
    notes=(
        "Validation split, seed 0, N = 8, H = 10: eta of .4, .7 and 1 times mu of 0, .5 and .8 for each form of each "
        "method. For sparseloco mu is the decay of error feedback: .8, .95 and .99.",
        "R8 lists the grids of five recipes point by point.",
    ),
    cells=tuning_cells(TUNED),
)


def choice_of(cell: Cell, tuning: Sequence[Entry]) -> Choice | None:
    """Return the numbers of a cell, or None if the grid of its method is incomplete.

    A form that was not tuned itself takes the learning rate and momentum of the contender named by ``tuned_as``.

    Args:
        tuning: entries of ``tuning.json``, in the order of the grid, which decides between equal losses.
    """
    contender = cell.contender
    if cell.choice is not None:
        return cell.choice
    if contender.tuned_as is None:  # the recipe reads neither number
        return Choice(contender.forms[0], learning_rate=1.0, momentum=0.0)
    found = [each for each in tuning if each["contender"] == contender.tuned_as and "failure" not in each]
    if len(found) < sum(each.contender.name == contender.tuned_as for each in TUNING.cells):
        return None
    usable = [each for each in found if "loss" in each["headline"]]
    own = [each for each in usable if each["recipe"] in contender.forms]
    if own:
        return best(own)
    return replace(best(usable), recipe=contender.forms[0]) if usable else None


def best(entries: Sequence[Entry]) -> Choice:
    """Return the choice with the lowest loss; the first one of equal losses."""
    entry = min(entries, key=lambda each: each["headline"].get("loss", math.inf))
    return Choice(entry["recipe"], entry["eta"], entry["mu"])
