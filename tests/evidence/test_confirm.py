"""Results of older code: believed where a run of their kind comes out equal, and only there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.evidence import fake
from bench.evidence.cells import CENTRAL, Cell, Choice, Setting
from bench.evidence.confirm import confirm, kind
from bench.evidence.contenders import DILOCO, SWARM
from bench.evidence.documents import document
from bench.evidence.experiments import EXPERIMENTS
from bench.evidence.grid import tuning_cells
from bench.evidence.layout import Experiment
from bench.evidence.plan import Job, State
from bench.evidence.run import Campaign
from bench.evidence.store import Store

FINAL = [
    Cell(experiment="R1", contender=each, setting=CENTRAL, seed=seed) for seed in (1, 2) for each in (DILOCO, SWARM)
]
CELLS = [*tuning_cells([DILOCO, SWARM]), *FINAL]


def campaign(folder: Path, code: str, cells: Sequence[Cell] = CELLS) -> tuple[Campaign, list[str]]:
    said: list[str] = []
    environment = {"machine": "m", "commit": f"of {code}", "date": "2026-01-01"}
    return Campaign(cells, Store(folder), {}, code, environment, said.append), said


def states(made: Campaign) -> dict[str, set[State]]:
    found: dict[str, set[State]] = {}
    for job in made.jobs():
        assert job.scenario is not None
        found.setdefault(job.scenario["outer"]["recipe"], set()).add(job.state)
    return found


def all_run(folder: Path) -> None:
    made, _ = campaign(folder, "old")
    made.run(fake.InlinePool(fake.simulate), 2, 1e9)


def with_other_swarm(scenario: Mapping[str, Any], device: str) -> Mapping[str, Any]:
    report = fake.simulate(scenario, device)
    if scenario["outer"]["recipe"] == "swarm":
        report["curve"][-1]["validation"] += 1e-3
    return report


def test_one_run_of_each_kind_vouches_for_all_that_come_out_equal(tmp_path: Path) -> None:
    all_run(tmp_path)
    made, said = campaign(tmp_path, "new")
    assert set.union(*states(made).values()) == {State.STALE}

    pool = fake.InlinePool(with_other_swarm)
    confirm(made, pool)

    recipes = [each["outer"]["recipe"] for each in pool.scenarios]
    assert sorted(recipes) == ["diloco"] * 4 + ["swarm"] * 4, "two of each kind: with momentum and without"
    found = states(campaign(tmp_path, "new")[0])  # as the next process reads it
    assert found == {recipe: {State.STALE if recipe == "swarm" else State.DONE} for recipe in found}
    assert sum("stay stale" in line for line in said) == 2
    assert set.union(*states(campaign(tmp_path, "newer")[0]).values()) == {State.STALE}


def test_a_run_that_breaks_vouches_for_nothing(tmp_path: Path) -> None:
    def broken(scenario: Mapping[str, Any], device: str) -> Mapping[str, Any]:
        raise ValueError("it broke")

    all_run(tmp_path)
    made, said = campaign(tmp_path, "new")
    confirm(made, fake.InlinePool(broken))
    assert set.union(*states(made).values()) == {State.STALE}
    assert len(said) == 4
    assert all("it broke" in line for line in said)


def test_the_dearest_of_a_kind_must_come_out_equal_too(tmp_path: Path) -> None:
    long = Cell(experiment="R1", contender=DILOCO, setting=Setting(steps=6_400), seed=1)

    def with_other_long_runs(scenario: Mapping[str, Any], device: str) -> Mapping[str, Any]:
        report = fake.simulate(scenario, device)
        if scenario["run"]["tokens_per_peer"] > 500_000:
            report["curve"][-1]["validation"] += 1e-3
        return report

    made, _ = campaign(tmp_path, "old", [*CELLS, long])
    made.run(fake.InlinePool(fake.simulate), 2, 1e9)
    made, said = campaign(tmp_path, "new", [*CELLS, long])
    confirm(made, fake.InlinePool(with_other_long_runs))
    found = {(job.cell.choice or Choice("", 0.7, 0.5)).momentum == 0: job.state for job in of_diloco(made)}
    assert found == {True: State.DONE, False: State.STALE}, "the long run has momentum"
    assert sum("stay stale" in line for line in said) == 1


def of_diloco(made: Campaign) -> list[Job]:
    return [job for job in made.jobs() if job.cell.contender == DILOCO]


def test_how_fast_the_machine_was_does_not_count(tmp_path: Path) -> None:
    def faster(scenario: Mapping[str, Any], device: str) -> Mapping[str, Any]:
        report = fake.simulate(scenario, device)
        report["cost"]["events_per_s"] *= 2
        return report

    all_run(tmp_path)
    made, _ = campaign(tmp_path, "new")
    confirm(made, fake.InlinePool(faster))
    assert set.union(*states(made).values()) == {State.DONE}


def test_the_document_says_what_ran_and_what_was_confirmed(tmp_path: Path) -> None:
    all_run(tmp_path)
    made, _ = campaign(tmp_path, "new")
    confirm(made, fake.InlinePool(fake.simulate))
    experiment = Experiment(id="R1", question="", notes=(), cells=tuple(FINAL), keeps=EXPERIMENTS["R1"].keeps)
    entry = document(experiment, made.store, made.results(), None, made.environment)["cells"][0]
    assert (entry["code"], entry["confirmed"]) == ("old", ["new"])


def test_kinds_differ_by_code_not_by_numbers() -> None:
    scenario = {"run": {"seed": 1}, "outer": {"recipe": "swarm", "momentum": 0.5}, "codec": {"name": "fp32"}}
    same = {"run": {"seed": 2}, "outer": {"momentum": 0.8, "recipe": "swarm"}, "codec": {"name": "fp32"}}
    assert kind(scenario) == kind(same) != kind({**scenario, "codec": {"name": "int8"}})
    for changes in ({"momentum": 0}, {"exchanges_per_step": 2}, {"partners": 2}):
        assert kind(scenario) != kind({**scenario, "outer": {"recipe": "swarm", "momentum": 0.5, **changes}})
    assert kind(scenario) != kind({**scenario, "run": {"seed": 1, "failed_exchanges": 0.1}})
