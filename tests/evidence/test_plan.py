"""Cells of the experiments: which are planned, with which numbers, and as which scenario."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from bench.evidence.__main__ import QUICK_SHARE
from bench.evidence.cells import CENTRAL, FINAL_SEEDS, TUNING_SEED, Cell, CellSetting, Choice
from bench.evidence.contenders import DDP, DILOCOX, DPSGD, SWARM, TUNED, on
from bench.evidence.experiments import EXPERIMENTS
from bench.evidence.experiments.r1_quality import RIVALS
from bench.evidence.experiments.r11_doubts import JUDGED
from bench.evidence.pages import RESULTS
from bench.evidence.run import digest, read
from bench.evidence.scenario import TOKENS_PER_STEP, scenario
from bench.evidence.tuning import DECAYS, LEARNING_RATES, MOMENTA, best, choice_of, points, tuning_cells
from p2ptrain.recipes import RECIPES
from p2ptrain.sim.scenario import Scenario

CHOICE = Choice("swarm", 0.7, 0.9)


def cell(**changes: object) -> Cell:
    return replace(Cell(experiment="R1", contender=SWARM, setting=CENTRAL, seed=1), **changes)  # type: ignore[arg-type]


def all_cells() -> list[Cell]:
    return [cell for each in EXPERIMENTS.values() for cell in each.cells]


# --- existing experiments --------------------------------------------------------------------------


def test_the_issue_is_covered() -> None:
    assert list(EXPERIMENTS) == ["tuning", *(f"R{number}" for number in range(1, 12))]
    settings = {(each.setting.peers, each.setting.inner_steps) for each in EXPERIMENTS["R1"].cells}
    assert {(peers, inner_steps) for peers in (4, 8, 16) for inner_steps in (1, 10, 30, 100)} <= settings
    for contender in RIVALS:
        for peers in (4, 8, 16):
            for inner_steps in (1, 10, 30, 100):
                seeds = {
                    each.seed
                    for each in EXPERIMENTS["R1"].cells
                    if each.contender == contender
                    and (each.setting.peers, each.setting.inner_steps, each.setting.data) == (peers, inner_steps, "iid")
                }
                assert seeds >= set(FINAL_SEEDS)


def test_what_judges_the_default_has_not_chosen_it() -> None:
    chose = {each.seed for name in ("tuning", "R1", "R5") for each in all_cells() if each.experiment == name}
    judged = [each for each in EXPERIMENTS["R11"].cells if each.contender in JUDGED and each.choice is None]
    assert judged
    assert not chose & {each.seed for each in judged}


def test_outer_steps_are_enough() -> None:
    for each in EXPERIMENTS["R1"].cells:
        setting = each.setting
        assert setting.steps / setting.inner_steps >= (300 if setting.inner_steps == 10 else 100)


def test_all_rows_of_a_column_see_the_same_tokens() -> None:
    for experiment in EXPERIMENTS.values():
        if experiment.computed is None and experiment.id != "R7":  # there, rows are numbers of peers
            for table in experiment.tables:
                for column in table.columns:
                    keys = [column.circumstances(row) for row in table.rows]
                    assert len({(key.get("peers"), key.get("steps")) for key in keys}) == 1, table.title


def test_final_numbers_are_of_the_test_split_and_of_other_seeds() -> None:
    for each in all_cells():
        tuning = each.seed == TUNING_SEED
        assert each.split == ("validation" if tuning else "test")
        assert not tuning or each.choice is not None


def test_every_table_and_panel_names_cells_that_are_planned() -> None:
    for experiment in (each for each in EXPERIMENTS.values() if each.id != "tuning"):
        if experiment.computed is not None:
            planned = {(each["contender"], repr(sorted(each["setting"].items()))) for each in experiment.computed()}
        else:
            planned = {(each.contender.name, repr(sorted(each.setting.key().items()))) for each in experiment.cells}
        shown = {
            (row.contender, repr(sorted(column.circumstances(row).items())))
            for table in experiment.tables
            for column in table.columns
            for row in table.rows
        }
        drawn = {
            (each.contender, repr(sorted(each.setting.key().items())))
            for panel in experiment.panels
            for line in panel.lines.values()
            for each in line
        }
        missing = (shown | drawn) - planned
        if experiment.id == "R1":  # all others are run only at H of 10 and 30
            missing = {each for each in missing if each[0] in {rival.name for rival in RIVALS}}
        if experiment.id == "R6":  # no peer can join an average over all
            missing = {each for each in missing if each[0] != "diloco"}
        assert missing == set()
        if experiment.computed is not None:  # costs no time, so each method must appear somewhere
            shown |= {each for each in planned if each[0] in {contender for contender, _ in shown}}
        assert planned - shown == set(), "nothing is run that no table shows"


def test_every_recipe_exists_and_every_step_recipes_have_h_of_one() -> None:
    for each in all_cells():
        recipes = each.contender.forms if each.choice is None else (each.choice.recipe,)
        for recipe in recipes:
            assert recipe in RECIPES
            assert not RECIPES[recipe].every_step or each.setting.inner_steps == 1


def test_the_simulator_takes_every_scenario() -> None:
    """Check that the simulator accepts every scenario, whatever the tuning chooses."""
    for each in all_cells():
        forms = each.contender.forms if each.choice is None else (each.choice.recipe,)
        for form in forms:
            Scenario.model_validate(scenario(each, each.choice or Choice(form, 0.7, 0.9)))


def test_published_results_are_of_planned_cells() -> None:
    tuning = read(RESULTS, "tuning")["cells"]
    for name, experiment in EXPERIMENTS.items():
        wanted = {
            (each.contender.name, each.seed, digest(scenario(each, choice)))
            for each in experiment.cells
            if (choice := choice_of(each, tuning)) is not None
        }
        entries = read(RESULTS, name)["cells"] if experiment.computed is None else []
        assert {(each["contender"], each["seed"], each["scenario"]) for each in entries} <= wanted


# --- numbers --------------------------------------------------------------------------------------


def test_the_same_nine_cells_for_every_form() -> None:
    assert (len(LEARNING_RATES), len(MOMENTA), len(DECAYS)) == (3, 3, 3)
    cells = tuning_cells(TUNED)
    forms = [(each.contender.name, each.choice.recipe) for each in cells if each.choice is not None]
    assert {forms.count(form) for form in forms} == {9}
    assert {(each.setting, each.seed, each.split) for each in cells} == {(CENTRAL, TUNING_SEED, "validation")}
    assert {each.momentum for each in points("sparseloco")} == {0.8, 0.95, 0.99}, "decays of error feedback"
    assert {each.momentum for each in points("diloco")} == set(MOMENTA)
    names = {each.tuned_as for each in (cell.contender for cell in all_cells()) if each.tuned_as is not None}
    assert names == {each.name for each in TUNED}


def entry(choice: Choice, loss: float | None, contender: str = "swarm") -> dict[str, Any]:
    headline = {"diverged": 1.0} if loss is None else {"loss": loss}
    numbers = {"recipe": choice.recipe, "eta": choice.learning_rate, "mu": choice.momentum}
    return {"contender": contender, **numbers, "headline": headline}


def test_the_lowest_loss_wins_and_diverged_runs_never_do() -> None:
    one, two, three = points("swarm")[:3]
    assert best([entry(one, 1.6), entry(two, 1.5), entry(three, 1.5)]) == two
    assert best([entry(one, None), entry(two, 2.0)]) == two


def test_a_form_that_was_not_tuned_takes_the_numbers_of_its_method() -> None:
    grid = [entry(choice, 1.5 + index / 100) for index, choice in enumerate(points("swarm"))]
    assert choice_of(cell(), grid) == Choice("swarm", 0.4, 0.0)
    assert choice_of(cell(contender=replace(SWARM, forms=("swarm_half",))), grid) == Choice("swarm_half", 0.4, 0.0)
    assert choice_of(cell(contender=DDP), []) == Choice("ddp", 1.0, 0.0)
    assert choice_of(cell(), grid[1:]) is None, "the grid is incomplete"
    assert choice_of(cell(), [*grid[1:], {**grid[0], "failure": "out of memory"}]) is None


# --- the scenario ---------------------------------------------------------------------------------


def test_a_scenario_by_hand() -> None:
    made = scenario(cell(setting=CellSetting(peers=4, exchange_steps=2.0, failures=0.1)), CHOICE)
    assert made["run"]["run_tokens"] == 3_200 * TOKENS_PER_STEP
    assert made["run"]["failed_exchanges"] == 0.1
    assert made["peers"] == [
        {
            "name": "others",
            "count": 4,
            "step_s": 1.0,
            "step_jitter": 0.1,
            "up_mbit_s": 123_000 * 32 / 2 / 1e6,
            "down_mbit_s": 123_000 * 32 / 2 / 1e6,
            "latency_s": 0.025,
        }
    ]
    assert (made["outer"]["recipe"], made["outer"]["exchanges_per_step"]) == ("swarm", 1)
    assert scenario(cell(), Choice("gasloc", 0.7, 0.9))["outer"]["exchanges_per_step"] == 0


def test_a_step_is_long_where_every_step_is_an_exchange_and_time_is_not_judged() -> None:
    def group(setting: CellSetting) -> Mapping[str, object]:
        peers: list[Mapping[str, object]] = scenario(cell(setting=setting), CHOICE)["peers"]
        return peers[-1]

    fast, slow = group(CellSetting()), group(CellSetting(inner_steps=1))
    assert (fast["step_s"], slow["step_s"]) == (1.0, 10.0)
    assert slow["up_mbit_s"] == pytest.approx(0.1 * float(str(fast["up_mbit_s"]))), "the same line in steps"
    straggler = {each.setting for each in EXPERIMENTS["R3"].cells if each.setting.inner_steps == 1}
    assert {group(setting)["step_s"] for setting in straggler} == {1.0}, "in seconds beside H = 30"


def test_graphs_are_of_one_kind_for_those_who_plan_and_those_who_draw() -> None:
    assert on(DPSGD, "random", 2).outer["partners"] == 2
    assert on(SWARM, "random", 2).outer == {"exchanges_per_step": 2, "topology": "random"}
    assert "swarm 2-peer" not in {each.contender.name for each in EXPERIMENTS["R2"].cells}, "a step has one exchange"
    assert on(SWARM, "ring").outer == {"exchanges_per_step": 1, "topology": "ring"}


def test_the_odd_peer_is_a_group_of_one() -> None:
    slow = scenario(cell(setting=CellSetting(straggler=0.1)), CHOICE)["peers"]
    assert [group["count"] for group in slow] == [1, 7]
    assert slow[0]["up_mbit_s"] == pytest.approx(0.1 * slow[1]["up_mbit_s"])
    fast = scenario(cell(setting=CellSetting(speed_ratio=4.0)), CHOICE)["peers"]
    assert (fast[0]["step_s"], fast[1]["step_s"]) == (0.25, 1.0)
    assert "pace" not in scenario(cell(setting=CellSetting(straggler=0.1)), CHOICE)
    assert scenario(cell(setting=CellSetting(straggler=0.1)), Choice("gasloc_y", 1, 0))["pace"] == {
        "policy": "straggler"
    }
    assert scenario(cell(contender=DILOCOX), Choice("dilocox", 0.7, 0.5))["pace"] == {"policy": "rank"}


def test_who_comes_and_goes_keeps_the_number_of_peers() -> None:
    groups = scenario(cell(setting=CellSetting(comings_and_goings=True)), CHOICE)["peers"]
    assert [(group["name"], group["count"]) for group in groups] == [("others", 6), ("leaving", 2), ("coming", 2)]
    assert groups[1]["leaves_at_s"] == 1_600
    assert groups[2]["arrives_at_s"] == pytest.approx(3_200 / 3)


def test_quick_cells_are_shorter_and_keep_their_columns() -> None:
    full = next(each for each in all_cells() if each.quick and each.setting.learner == "lm")
    short = replace(full, shorter=QUICK_SHARE)
    assert 10 * short.setting.inner_steps <= short.steps < full.steps / 4


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_no_experiment_has_a_cell_twice(name: str) -> None:
    """Check that cells are distinct: tables would count a duplicate as two runs."""
    places = [(each.contender.name, str(each.setting), each.choice, each.seed) for each in EXPERIMENTS[name].cells]
    assert len(set(places)) == len(places)
