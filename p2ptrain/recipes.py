"""Recipes as data: which of the known ways of training together a run follows.

Every method of the DiLoCo family answers six questions, and a recipe is a set of answers::

    WHAT    is mixed between peers                    Recipe.mixes
    WHEN    relative to the inner phase               Recipe.when
    WHO     with whom                                 Recipe.partners
    OUTER   how an inner phase enters the slow weights   Recipe.outer
    CODEC   in what form weights travel               the manifest's codec section
    H       how many inner steps between outer steps  the manifest's outer.inner_steps

The last two are numbers of a run and live in its manifest; so do the outer learning rate and momentum. The vocabulary
of an answer grows with the recipe that first needs the word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

RecipeName = Literal["local", "swarm"]
"""What a manifest may name."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One set of answers; pure data, interpreted by the trainer and the protocol core."""

    name: RecipeName
    """What the manifest calls it."""

    mixes: tuple[Literal["slow"], ...]
    """What peers average: the slow weights x. Momentum buffers are never exchanged."""

    when: Literal["never", "overlapped"]
    """Overlapped: an exchange runs beside the inner steps and its displacement is applied between two of them."""

    partners: Literal["none", "random"]
    """Random: one live, compatible peer that is not busy, drawn anew for every exchange."""

    outer: Literal["hand_over", "momentum"]
    """Momentum: g = x - theta enters SGD with momentum. Hand-over: x becomes theta itself, never subtracted."""

    summary: str
    """One sentence for a reader."""

    @property
    def exchanges(self) -> bool:
        """Whether peers of this recipe exchange anything at all."""
        return self.when != "never"


_ALL = (
    Recipe(
        name="local",
        mixes=(),
        when="never",
        partners="none",
        outer="hand_over",
        summary="Plain AdamW on one machine, bit for bit: the reference that a swarm has to beat.",
    ),
    Recipe(
        name="swarm",
        mixes=("slow",),
        when="overlapped",
        partners="random",
        outer="momentum",
        summary="A local outer step, then asynchronous pairwise averaging of the slow weights with random live peers.",
    ),
)

RECIPES: Mapping[RecipeName, Recipe] = MappingProxyType({recipe.name: recipe for recipe in _ALL})
"""Every recipe by its name."""

__all__ = ["RECIPES", "Recipe", "RecipeName"]
