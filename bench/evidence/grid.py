"""The grid on which every method is tuned, and what was best on it. Pure.

The same nine cells for each form of each method: N = 8, H = 10, one seed, validation split. The learning rates bracket
DiLoCo's .7 (arXiv 2311.08105) and NoLoCo's .7 (arXiv 2506.10911); the momenta are none (GASLoC without acceleration),
NoLoCo's .5, and .8 in place of DiLoCo's .9: where the grid was laid out (seed 1, validation split), DiLoCo itself had
1.756 at .7 and .5, 1.751 at .7 and .7, 1.768 at .4 and .8, 1.916 at .7 and .9; .9 would have been three wasted cells.
A method whose "momentum" is the decay of error feedback has other decays in their place: SparseLoCo's .95 (arXiv
2508.15706) and one on either side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from bench.evidence.cells import CENTRAL, TUNING_SEED, Cell, Choice, Contender
from p2ptrain.recipes import RECIPES

LEARNING_RATES = (0.4, 0.7, 1.0)
MOMENTA = (0.0, 0.5, 0.8)
DECAYS = (0.8, 0.95, 0.99)
"""Of error feedback, where a recipe has that for its momentum."""

DIVERGED: Mapping[str, float] = {"diverged": 1.0}
"""The headline of a run without a loss."""

UNTUNED = Choice("", learning_rate=1.0, momentum=0.0)
"""For methods that read neither number; the recipe is filled in."""


def points(recipe: str) -> list[Choice]:
    """The nine choices for one recipe."""
    return [Choice(recipe, rate, momentum) for rate in LEARNING_RATES for momentum in momenta(recipe)]


def momenta(recipe: str) -> tuple[float, ...]:
    """The three momenta, or decays, for one recipe."""
    return DECAYS if RECIPES[recipe].feedback else MOMENTA


def tuning_cells(contenders: Iterable[Contender], tier: int = 0) -> list[Cell]:
    """All cells that tune these contenders."""
    return [
        Cell(
            experiment="tuning",
            contender=contender,
            setting=CENTRAL,
            seed=TUNING_SEED,
            split="validation",
            choice=choice,
            tier=tier,
        )
        for contender in contenders
        for form in contender.forms
        for choice in points(form)
    ]


def best(results: Sequence[tuple[Choice, float | None]]) -> Choice:
    """The choice with the lowest loss; None stands for a run that diverged. ValueError when all did.

    The earlier one of two equal losses is taken, so the order of the grid decides, not the order of finishing.
    """
    if all(loss is None for _, loss in results):
        raise ValueError("every cell of the grid diverged")
    return min(results, key=lambda each: math.inf if each[1] is None else each[1])[0]


def document(
    results: Mapping[str, Sequence[tuple[Choice, float | None]]],
    origins: Mapping[tuple[str, Choice], Mapping[str, Any]] = MappingProxyType({}),
    builds: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> dict[str, Any]:
    """``docs/results/tuning.json``: for each contender what was chosen and the whole grid behind it.

    Args:
        results: of each contender.
        origins: what ``documents.origin`` says of the run of each choice.
        builds: commit, date and machine of each such code.
    """
    return {
        "version": 1,
        "builds": dict(builds),
        "split": "validation",
        "seed": TUNING_SEED,
        "learning_rates": list(LEARNING_RATES),
        "momenta": list(MOMENTA),
        "decays": list(DECAYS),
        "contenders": {
            name: {
                "chosen": asdict(best(cells)),
                "grid": [{**asdict(choice), "loss": loss, **origins.get((name, choice), {})} for choice, loss in cells],
            }
            for name, cells in results.items()
            if any(loss is not None for _, loss in cells)
        },
    }


def chosen(document: Mapping[str, Any]) -> dict[str, Choice]:
    """The choices that a tuning document holds, by contender."""
    return {name: Choice(**each["chosen"]) for name, each in document["contenders"].items()}
