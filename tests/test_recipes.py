"""Recipes are data; what they say of themselves holds together."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from p2ptrain.recipes import RECIPES, RecipeName


def test_every_name_a_manifest_may_use_is_a_recipe() -> None:
    assert set(RECIPES) == set(get_args(RecipeName))
    assert all(recipe.name == name for name, recipe in RECIPES.items())


def test_local_hands_over_and_meets_nobody() -> None:
    local = RECIPES["local"]
    assert (local.mixes, local.partners, local.outer, local.exchanges) == ((), "none", "hand_over", False)


def test_swarm_mixes_slow_weights_with_random_peers_in_the_background() -> None:
    swarm = RECIPES["swarm"]
    assert (swarm.mixes, swarm.when, swarm.partners, swarm.outer) == (("slow",), "overlapped", "random", "momentum")
    assert swarm.exchanges


def test_recipes_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECIPES["local"].outer = "momentum"
    with pytest.raises(TypeError):
        RECIPES["local"] = RECIPES["swarm"]
