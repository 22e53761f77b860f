"""Tuning in three stages: inner learning rates, outer numbers, inner learning rates by number of peers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.evidence.cells import CENTRAL, TUNING_SEED, Cell, Choice, Contender
from bench.evidence.contenders import (
    DDP,
    GASLOC,
    LOCAL,
    SWARM_2,
    SWARM_ADAMW,
    SWARM_ADAMW_MODULAR4,
    SWARM_MODULAR4,
    SWARM_WSD,
    TUNED,
)
from bench.evidence.experiments import EXPERIMENTS
from bench.evidence.tuning import (
    GRIDS,
    RATES_BY_PEERS,
    choice_of,
    chosen_for,
    has_outer_optimizer,
    inner_points,
    outer_points,
    peers_setting,
    rate_contender,
    tuned_at,
    tuned_number,
    tuning_cells,
)
from p2ptrain.recipes import RECIPES


def entry(contender: Contender, choice: Choice, loss: float | None) -> dict[str, Any]:
    return {
        "contender": contender.name,
        "setting": tuned_at(contender).key(),
        "recipe": choice.recipe,
        "eta": choice.learning_rate,
        "mu": choice.momentum,
        "inner_rate": choice.inner_rate,
        "headline": {"diverged": 1.0} if loss is None else {"loss": loss},
    }


def cell(contender: Contender, choice: Choice | None = None) -> Cell:
    return Cell(experiment="R1", contender=contender, setting=CENTRAL, seed=1, choice=choice)


def rates(contender: Contender, *losses: float | None) -> list[dict[str, Any]]:
    return [entry(contender, *each) for each in zip(inner_points(contender), losses, strict=True)]


def grid(contender: Contender, inner_rate: float, best: int) -> list[dict[str, Any]]:
    points = [Choice(p.recipe, p.learning_rate, p.momentum, inner_rate) for p in outer_points(contender)]
    return [entry(contender, point, 1.5 if index == best else 1.6) for index, point in enumerate(points)]


RATES = rates(SWARM_2, 1.9, None, 1.7, 1.8)
RATE = GRIDS["muon"].inner_rates[2]


def test_inner_rates_come_first_and_the_grid_takes_the_best_one() -> None:
    (point, *_) = outer_points(SWARM_2)
    assert choice_of(cell(SWARM_2, point), RATES[:-1]) is None, "a rate is missing"
    assert choice_of(cell(SWARM_2, point), RATES) == Choice("swarm", 0.5, 0.4, RATE)
    assert choice_of(cell(SWARM_2), RATES) is None, "the grid is missing"
    assert choice_of(cell(SWARM_2), [*RATES, *grid(SWARM_2, RATE, 5)]) == Choice("swarm", 0.7, 0.8, RATE)
    assert choice_of(cell(SWARM_2), [*RATES, *grid(SWARM_2, RATE, 5)[1:]]) is None
    failed = {**grid(SWARM_2, RATE, 5)[0], "failure": "out of memory"}
    assert choice_of(cell(SWARM_2), [*RATES, failed, *grid(SWARM_2, RATE, 5)[1:]]) is None


def test_the_first_of_equal_losses_wins() -> None:
    assert chosen_for(SWARM_2, [*rates(SWARM_2, 1.7, 1.7, 1.8, 1.8), *grid(SWARM_2, 0.006, 0)]) == Choice(
        "swarm", 0.5, 0.4, 0.006
    )


def test_a_form_represents_its_method() -> None:
    recipe = outer_points(GASLOC)[-1].recipe
    last = len(outer_points(GASLOC)) - 1
    found = choice_of(cell(GASLOC), [*rates(GASLOC, 1.7, 1.8, 1.8, 1.8), *grid(GASLOC, 0.006, last)])
    assert found == Choice(recipe, 1.0, 0.5, 0.006)


def test_the_inner_rate_follows_the_number_of_peers() -> None:
    at_eight = [*RATES, *grid(SWARM_2, RATE, 5)]
    chosen = Choice("swarm", 0.7, 0.8, RATE)
    many = [
        entry(rate_contender(SWARM_2, rate), replace(chosen, inner_rate=rate), 2.0 - rate)
        | {"setting": peers_setting(SWARM_2, 32).key()}
        for rate in RATES_BY_PEERS[32]
    ]
    few = replace(cell(SWARM_MODULAR4), setting=replace(CENTRAL, peers=6))
    most = replace(cell(SWARM_MODULAR4), setting=replace(CENTRAL, peers=64))
    assert choice_of(few, at_eight) == chosen
    assert choice_of(most, [*at_eight, *many[1:]]) is None, "a rate is missing"
    assert choice_of(most, [*at_eight, *many]) == replace(chosen, inner_rate=0.02)


def test_uneven_computers_use_the_inner_rate_of_as_many_equal_ones() -> None:
    one_fast = tuple([1.0] * 7)
    assert tuned_number(replace(CENTRAL, peers=6)) == 6
    assert tuned_number(replace(CENTRAL, speeds=(*one_fast, 1.0))) == 8
    assert tuned_number(replace(CENTRAL, speeds=(*one_fast, 4.0))) == 4, "11^2 / 23 = 5.3"
    assert tuned_number(replace(CENTRAL, speeds=(*one_fast, 20.0))) == 2, "27^2 / 407 = 1.8"


@pytest.mark.parametrize("contender", [DDP, LOCAL])
def test_a_method_without_outer_optimizer_has_an_inner_rate_alone(contender: Contender) -> None:
    assert outer_points(contender) == []
    assert choice_of(cell(contender), rates(contender, 1.9, 1.7, 1.8, 1.8)) == inner_points(contender)[1]


def test_variants_take_the_numbers_of_their_method_and_optimizer() -> None:
    found = [*RATES, *grid(SWARM_2, RATE, 5)]
    assert (
        choice_of(cell(SWARM_MODULAR4), found) == choice_of(cell(SWARM_WSD), found) == choice_of(cell(SWARM_2), found)
    )
    assert choice_of(cell(SWARM_ADAMW), found) is None
    adamw = [*rates(SWARM_ADAMW, 1.9, 1.9, 1.8, 1.9), *grid(SWARM_ADAMW, 0.006, 1)]
    assert choice_of(cell(SWARM_ADAMW_MODULAR4), adamw) == Choice("swarm", 0.4, 0.8, 0.006)


def test_rivals_are_tuned_on_as_many_points_as_we_are() -> None:
    muon = {each.name: each for each in TUNED if each.learner["optimizer"] == "muon" and has_outer_optimizer(each)}
    ours = len(outer_points(muon["swarm-2"]))
    assert {name: len(outer_points(each)) >= ours for name, each in muon.items()} == dict.fromkeys(muon, True)
    assert {len(inner_points(each)) for each in muon.values()} == {len(GRIDS["muon"].inner_rates)}


def test_tuning_sees_the_validation_split_and_one_seed() -> None:
    cells = tuning_cells(TUNED)
    assert {(each.seed, each.split) for each in cells} == {(TUNING_SEED, "validation")}
    assert {each.contender.name for each in cells} == {each.name for each in TUNED}
    assert all(RECIPES[each.choice.recipe].name in each.contender.forms for each in cells if each.choice)
    wanted = {each.contender.tuned_as for one in EXPERIMENTS.values() for each in one.cells}
    assert wanted == {each.name for each in TUNED}, "nothing is tuned that no experiment uses"
