"""Recipes are data, and their fields are consistent."""

from __future__ import annotations

import dataclasses

import pytest

from p2ptrain.recipes import RECIPES

PUBLISHED = "ddp dpsgd ad_psgd diloco streaming_diloco eager_diloco noloco gasloc factored_gossip dilocox sparseloco"


def test_every_recipe_is_found_under_its_own_name() -> None:
    assert all(recipe.name == name for name, recipe in RECIPES.items())
    assert set(RECIPES) >= {"local", "swarm", *PUBLISHED.split()}


def test_local_hands_over_and_meets_nobody() -> None:
    local = RECIPES["local"]
    assert (local.mixes, local.outer, local.exchanges, local.blocks) == ((), "hand_over", False, False)


def test_swarm_mixes_weights_with_random_peers_in_the_background() -> None:
    for name, stream in ("swarm", "fast"), ("swarm_slow", "slow"):
        swarm = RECIPES[name]
        assert [(mix.stream, mix.when) for mix in swarm.mixes] == [(stream, "overlapped")]
        assert swarm.outer == "momentum"
        assert swarm.is_random
        assert not swarm.is_collective


def test_who_waits_and_for_what() -> None:
    assert RECIPES["gasloc"].blocking == ("slow",)
    assert not RECIPES["gasloc"].mixes_before_step
    assert RECIPES["noloco"].blocking == ("slow", "pseudo_gradient")
    assert RECIPES["noloco"].mixes_before_step
    assert RECIPES["factored_gossip"].mixes[0].when == "overlapped"
    assert RECIPES["factored_gossip"].blocking == ("pseudo_gradient",)
    assert {name for name, recipe in RECIPES.items() if recipe.every_step} == {"ddp", "dpsgd", "ad_psgd"}


def test_eight_ways_to_mix_in_factored_gossip() -> None:
    of_all = {name: recipe for name, recipe in RECIPES.items() if all(mix.share == 1 for mix in recipe.mixes)}
    grid = {name: recipe for name, recipe in of_all.items() if name.startswith("factored_gossip")}
    assert len(grid) == 8
    assert {name for name, recipe in grid.items() if not recipe.is_collective} == {
        "factored_gossip",
        "factored_gossip_none_local",
        "factored_gossip_local_none",
    }


def test_a_mix_may_cover_the_first_fragments_alone() -> None:
    weights, gradients = RECIPES["factored_gossip_half"].mixes
    assert (weights, gradients.stream, gradients.who) == (
        RECIPES["factored_gossip"].mixes[0],
        "pseudo_gradient",
        "planned",
    )
    assert [list(weights.fragments(count)) for count in (2, 3)] == [[0, 1], [0, 1, 2]]
    assert [list(gradients.fragments(count)) for count in (2, 3)] == [[0], [0, 1]]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_recipe_is_one_that_can_be_carried_out(recipe) -> None:
    assert recipe.summary.endswith(".")
    assert recipe.source
    assert len({mix.stream for mix in recipe.mixes}) == len(recipe.mixes), "a stream is mixed in one way"
    assert not {"slow", "fast"} <= {mix.stream for mix in recipe.mixes}, "x or theta travel, not both"
    assert recipe.mix("fast") is None or recipe.is_random, "fast weights change while the others wait for a round"
    assert recipe.follow == 1 or recipe.mix("fast") is not None
    if recipe.outer in ("consensus", "y_form", "z_form"):
        assert recipe.blocks, "these forms need what the round brings"
    if recipe.delay != "none":
        assert recipe.is_collective or recipe.uses_late_gradients
    if recipe.outer == "hand_over" and not recipe.gradients:
        assert recipe.mix("pseudo_gradient") is None, "theta is handed over: there is no pseudo-gradient"


def test_dilocox_gossips_and_its_authors_average_all() -> None:
    ours, theirs = RECIPES["dilocox"], RECIPES["dilocox_global"]
    assert (ours.is_random, ours.is_collective, ours.blocks, ours.uses_late_gradients) == (True, False, False, True)
    assert (theirs.is_random, theirs.is_collective, theirs.uses_late_gradients) == (False, True, False)
    assert ours.delay == theirs.delay == "phase"


def test_recipes_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECIPES["local"].outer = "momentum"
    with pytest.raises(TypeError):
        RECIPES["local"] = RECIPES["swarm"]
