"""Cells of the experiments: which are planned, and as which scenario."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.evidence.__main__ import QUICK_SHARE
from bench.evidence.cells import ALONE, CENTRAL, FINAL_SEEDS, TUNING_SEED, Cell, CellSetting, Choice
from bench.evidence.contenders import DILOCO, LOCAL, SWARM_2, SWARM_ADAMW, SWARM_BY_SPEED
from bench.evidence.experiments import EXPERIMENTS
from bench.evidence.experiments.r2_speedup import METHODS_OF, PEERS, at_home
from bench.evidence.pages import RESULTS
from bench.evidence.run import digest, load
from bench.evidence.scenario import MODELS, relative_size, scenario
from bench.evidence.tuning import choice_of, quick
from p2ptrain.recipes import RECIPES
from sim.scenario import Scenario

CHOICE = Choice("swarm", 0.7, 0.6, 0.02)


def cell(**changes: object) -> Cell:
    return replace(Cell(experiment="R1", contender=SWARM_2, setting=CENTRAL, seed=1), **changes)  # type: ignore[arg-type]


def all_cells() -> list[Cell]:
    return [cell for each in EXPERIMENTS.values() for cell in each.cells]


# --- planned experiments --------------------------------------------------------------------------


def test_what_decides_most_comes_first() -> None:
    assert list(EXPERIMENTS) == ["tuning", "R1", "R2", "R9", "R5", "R3", "R6", "R10", "R7", "R8", "R4"]


def test_the_budget_is_twenty_tokens_per_parameter_in_whole_steps() -> None:
    assert CENTRAL.tokens / MODELS["small"].parameters == pytest.approx(20, rel=0.01)
    assert MODELS["large"].parameters >= 3e6
    for each in all_cells():
        if not each.setting.speeds:
            step = MODELS[each.setting.model].tokens_per_step * each.setting.inner_steps
            honest = each.setting.peers - each.setting.liars
            assert each.setting.tokens % (honest * step) == 0, each.name


def test_all_rows_of_a_column_see_the_same_tokens() -> None:
    for experiment in EXPERIMENTS.values():
        for table in experiment.tables:
            for column in table.columns:
                shown = (*table.rows, *([table.over] if table.over is not None else []))
                assert len({column.circumstances(row).get("tokens") for row in shown}) == 1, table.title


def test_final_numbers_are_of_the_test_split_and_of_other_seeds() -> None:
    for each in all_cells():
        assert (each.experiment == "tuning") == (each.seed == TUNING_SEED)
        assert each.split == ("validation" if each.seed == TUNING_SEED else "test")


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
            for row in (*table.rows, *([table.over] if table.over is not None else []))
        }
        drawn = {
            (each.contender, repr(sorted(each.setting.key().items())))
            for panel in experiment.panels
            for line in panel.lines.values()
            for each in line
        }
        missing = (shown | drawn) - planned
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
        for form in each.contender.forms if each.choice is None else (each.choice.recipe,):
            Scenario.model_validate(scenario(each, Choice(form, 0.7, 0.6, 0.02)))


def test_published_results_are_of_planned_cells() -> None:
    tuning = load(RESULTS, "tuning")["cells"]
    for name, experiment in EXPERIMENTS.items():
        if experiment.computed is None:
            wanted = {
                (each.contender.name, each.seed, digest(scenario(each, choice)))
                for each in experiment.cells
                if (choice := choice_of(each, tuning)) is not None
            }
            entries = load(RESULTS, name)["cells"]
            assert {(each["contender"], each["seed"], each["scenario"]) for each in entries} <= wanted


def test_what_a_claim_rests_on_has_three_seeds() -> None:
    places: dict[tuple[str, str, str], set[int]] = {}
    for each in all_cells():
        places.setdefault((each.experiment, each.contender.name, str(each.setting)), set()).add(each.seed)
    few = {place for place, seeds in places.items() if place[0] != "tuning" and seeds != set(FINAL_SEEDS)}
    assert {experiment for experiment, _, _ in few} == {"R2", "R7", "R8", "R9"}
    assert {name for experiment, name, _ in few if experiment == "R9"} == {"swarm-2 equal", "swarm-2, H by speed"}


def test_at_home_the_loss_of_swarm_does_not_depend_on_the_line() -> None:
    assert {round(at_home("swarm-2 modular4", peers), 2) for peers in PEERS} == {0.99}
    for name in set(METHODS_OF) - {"swarm-2 modular4"}:
        assert at_home(name, 64) < at_home(name, 2) < 0.9


# --- the scenario ---------------------------------------------------------------------------------


def test_a_scenario_by_hand() -> None:
    made = scenario(cell(setting=CellSetting(peers=4, exchange_steps=2.0, failures=0.1)), CHOICE)
    assert made["run"]["tokens"] == 2_457_600
    assert made["run"]["failed_exchanges"] == 0.1
    line = MODELS["small"].parameters * 32 / 2 / 1e6
    assert made["peers"] == [
        {
            "name": "others",
            "count": 4,
            "step_s": 1.0,
            "step_jitter": 0.1,
            "up_mbit_s": line,
            "down_mbit_s": line,
            "latency_s": 0.025,
        }
    ]
    outer = made["outer"]
    assert (outer["recipe"], outer["exchanges_per_step"], outer["weights"]) == ("swarm", 2, "work")
    assert scenario(cell(contender=DILOCO), Choice("diloco", 0.7, 0.6, 0.02))["outer"]["exchanges_per_step"] == 0
    assert (made["learner"]["optimizer"], made["learner"]["learning_rate"]) == ("muon", 0.02)
    assert scenario(cell(contender=SWARM_ADAMW), CHOICE)["learner"]["optimizer"] == "adamw"


@pytest.mark.parametrize("setting", [ALONE, CENTRAL, CellSetting(peers=64), CellSetting(liars=2, lie="stale")])
def test_the_budget_is_that_of_all_peers_however_many(setting: CellSetting) -> None:
    contender = LOCAL if setting == ALONE else SWARM_2
    made = Scenario.model_validate(
        scenario(cell(contender=contender, setting=setting), replace(CHOICE, recipe=contender.forms[0]))
    )
    assert made.run_tokens == CENTRAL.tokens


def test_the_large_model_is_that_of_its_name() -> None:
    setting = next(each.setting for each in all_cells() if each.setting.model == "large")
    made = Scenario.model_validate(scenario(cell(setting=setting), CHOICE))
    assert made.learner.parameters == MODELS["large"].parameters


def test_the_size_of_a_cell_counts_training_and_evaluation() -> None:
    assert relative_size(CENTRAL) == 1
    assert relative_size(CellSetting(tokens=2 * CENTRAL.tokens)) < 2 < relative_size(CellSetting(peers=64)) < 3
    assert relative_size(CellSetting(points=150)) == pytest.approx(1.5, abs=0.1)
    assert relative_size(CellSetting(model="large")) == pytest.approx(27, abs=0.5)


def test_the_peer_with_the_slow_line_is_a_group_of_one() -> None:
    slow = scenario(cell(setting=CellSetting(straggler=0.1)), CHOICE)["peers"]
    assert [group["count"] for group in slow] == [1, 7]
    assert slow[0]["up_mbit_s"] == pytest.approx(0.1 * slow[1]["up_mbit_s"])
    assert "pace" not in scenario(cell(setting=CellSetting(straggler=0.1)), CHOICE)
    assert scenario(cell(setting=CellSetting(straggler=0.1)), Choice("gasloc_y", 1, 0))["pace"] == {
        "policy": "straggler"
    }


def test_uneven_computers_are_groups_by_speed() -> None:
    def groups(*speeds: float) -> list[tuple[str, int, float]]:
        made = scenario(cell(setting=CellSetting(speeds=speeds)), CHOICE)["peers"]
        return [(group["name"], group["count"], group["step_s"]) for group in made]

    assert groups(*[1.0] * 7, 4.0) == [("slow", 7, 1.0), ("fast", 1, 0.25)]
    assert groups(*[1.0] * 4, 4.0, 4.0, 20.0, 20.0) == [("slow", 4, 1.0), ("middle", 2, 0.25), ("fast", 2, 0.05)]
    assert all(len(each.setting.speeds) in (0, each.setting.peers) for each in all_cells())
    assert scenario(cell(contender=SWARM_BY_SPEED), CHOICE)["pace"] == {"policy": "by_speed"}


def test_who_comes_and_goes_keeps_the_number_of_peers() -> None:
    groups = scenario(cell(setting=CellSetting(comings_and_goings=True)), CHOICE)["peers"]
    assert [(group["name"], group["count"]) for group in groups] == [("others", 6), ("leaving", 2), ("coming", 2)]
    assert groups[1]["leaves_at_s"] == 1_200
    assert groups[2]["arrives_at_s"] == 800


def test_quick_cells_are_shorter_and_need_no_tuning() -> None:
    some = [quick(each, QUICK_SHARE) for each in all_cells() if each.quick]
    assert {each.contender.name for each in some} == {"swarm-2", "diloco", "ddp"}
    for each in some:
        choice = choice_of(each, [])
        assert choice is not None
        made = Scenario.model_validate(scenario(each, choice))
        assert made.run_tokens == CENTRAL.tokens // QUICK_SHARE
        assert made.run_tokens >= 10 * made.tokens_per_outer_step * 8


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_no_experiment_has_a_cell_twice(name: str) -> None:
    """Check that cells are distinct: tables would count a duplicate as two runs."""
    places = [(each.contender.name, str(each.setting), each.choice, each.seed) for each in EXPERIMENTS[name].cells]
    assert len(set(places)) == len(places)
