"""From plan to documents on made-up numbers: resuming, budgets, failures; and real worker processes, once."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import bench.evidence.__main__ as command
from bench.evidence import fake
from bench.evidence.adopted import adopt
from bench.evidence.cells import CENTRAL, Cell
from bench.evidence.contenders import DILOCO, LOCAL, SWARM
from bench.evidence.documents import document
from bench.evidence.experiments import EXPERIMENTS
from bench.evidence.grid import tuning_cells
from bench.evidence.layout import Experiment
from bench.evidence.plan import State
from bench.evidence.pool import Pool
from bench.evidence.run import Campaign, publish
from bench.evidence.store import Store

ENVIRONMENT = {"machine": "m", "commit": "c", "date": "2026-01-01"}
FINAL = [
    Cell(experiment="R1", contender=contender, setting=CENTRAL, seed=seed, tier=1)
    for seed in (1, 2)
    for contender in (DILOCO, SWARM)
]
CELLS = [*tuning_cells([DILOCO, SWARM]), *FINAL]


def campaign(folder: Path, cells: Sequence[Cell] = CELLS, code: str = "1", **more: Any) -> Campaign:
    said: list[str] = []
    made = Campaign(cells, Store(folder), {}, code, ENVIRONMENT, said.append)
    return replace(made, **more)


def run(made: Campaign, simulate: Any = fake.simulate, budget_s: float = math.inf) -> list[Mapping[str, Any]]:
    pool = fake.InlinePool(simulate)
    made.run(pool, 2, budget_s)
    return pool.scenarios


def test_tuning_comes_first_and_decides_the_rest(tmp_path: Path) -> None:
    scenarios = run(campaign(tmp_path))
    assert len(scenarios) == 9 + 9 + 4
    assert [each["run"]["split"] for each in scenarios] == ["validation"] * 18 + ["test"] * 4
    # By the fake's taste .7 and .5 are best, whatever the recipe.
    assert {(each["outer"]["learning_rate"], each["outer"]["momentum"]) for each in scenarios[18:]} == {(0.7, 0.5)}
    assert [each["run"]["seed"] for each in scenarios[18:]] == [1, 1, 2, 2]


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    run(campaign(tmp_path))
    assert run(campaign(tmp_path)) == []
    assert run(campaign(tmp_path, code="2")) == [], "older code: stale, and kept"
    assert len(run(campaign(tmp_path, code="2", refresh_stale=True))) == len(CELLS)


def test_a_run_that_is_killed_loses_only_what_was_under_way(tmp_path: Path) -> None:
    calls = 0

    def killed(scenario: Mapping[str, Any], device: str) -> Mapping[str, Any]:
        nonlocal calls
        calls += 1
        if calls > 10:
            raise KeyboardInterrupt
        return fake.simulate(scenario, device)

    with pytest.raises(KeyboardInterrupt):
        run(campaign(tmp_path), killed)
    assert len(run(campaign(tmp_path))) == len(CELLS) - 10


def test_no_cell_starts_after_the_budget(tmp_path: Path) -> None:
    ticks = iter(range(1_000))
    made = campaign(tmp_path, clock=lambda: float(next(ticks)))
    assert 0 < len(run(made, budget_s=5.0)) < 10


def test_a_failure_is_kept_with_its_reason_and_does_not_stop_the_others(tmp_path: Path) -> None:
    def picky(scenario: Mapping[str, Any], device: str) -> Mapping[str, Any]:
        if scenario["outer"]["recipe"] == "swarm" and scenario["outer"]["learning_rate"] == 1.0:
            raise ValueError("outer.recipe: not today")
        return fake.simulate(scenario, device)

    made = campaign(tmp_path)
    waiting = [each for each in FINAL if each.contender is SWARM]
    assert len(run(made, picky)) == len(CELLS) - len(waiting), "swarm's grid has holes"
    failures = [job.record.failure for job in made.jobs() if job.record is not None and job.record.failure]
    assert failures == ["outer.recipe: not today"] * 3
    assert len(run(campaign(tmp_path), picky)) == 3, "each once more"
    assert len(run(campaign(tmp_path))) == 3 + len(waiting), "it was the day's fault"
    assert run(campaign(tmp_path)) == []


def test_published_tuning_serves_methods_that_are_not_tuned_here(tmp_path: Path) -> None:
    whole = campaign(tmp_path / "whole")
    run(whole)
    made = campaign(tmp_path / "part", cells=FINAL, published=whole.results())
    assert len(run(made)) == len(FINAL)
    assert run(campaign(tmp_path / "nothing", cells=FINAL)) == []


# --- publishing -----------------------------------------------------------------------------------


def experiments(cells: Sequence[Cell] = FINAL) -> dict[str, Experiment]:
    return {
        "R1": replace(EXPERIMENTS["R1"], cells=tuple(cells), panels=()),
        "R4": replace(EXPERIMENTS["R4"], panels=()),
    }


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_documents_hold_every_cell_and_the_summary_their_means(tmp_path: Path) -> None:
    made = campaign(tmp_path / "cells")
    run(made)
    publish(experiments(), made, tmp_path, ["R1", "R4"])
    document = read(tmp_path / "R1.json")
    assert [(each["contender"], each["seed"]) for each in document["cells"]] == [
        ("diloco", 1),
        ("swarm", 1),
        ("diloco", 2),
        ("swarm", 2),
    ]
    assert document["builds"] == {"1": {"commit": "c", "date": "2026-01-01", "machine": "m"}}
    losses = [each["headline"]["loss"] for each in document["cells"] if each["contender"] == "swarm"]
    row = next(each for each in read(tmp_path / "summary.json")["R1"] if each["contender"] == "swarm")
    assert row["figures"]["loss"]["mean"] == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert row["figures"]["loss"]["seeds"] == [1, 2]
    assert read(tmp_path / "tuning.json")["contenders"]["swarm"]["chosen"]["learning_rate"] == 0.7
    assert len(read(tmp_path / "R4.json")["cells"]) > 100


def test_what_was_published_stays_until_it_is_run_again(tmp_path: Path) -> None:
    made = campaign(tmp_path / "cells")
    run(made)
    publish(experiments(), made, tmp_path, ["R1"])
    before = (tmp_path / "R1.json").read_bytes()
    results = made.results()
    empty = campaign(tmp_path / "elsewhere", cells=FINAL, published=results)
    publish(experiments(), empty, tmp_path, ["R1"])
    assert (tmp_path / "R1.json").read_bytes() == before
    newly = {name: [(replace(choice, momentum=0.1), loss) for choice, loss in grid] for name, grid in results.items()}
    unknown = campaign(tmp_path / "elsewhere", cells=CELLS)
    publish(experiments(), unknown, tmp_path, ["R1"])
    assert (tmp_path / "R1.json").read_bytes() == before, "while it is tuned, nothing else is wanted"
    publish(experiments(FINAL[:1]), empty, tmp_path, ["R1"])
    assert len(read(tmp_path / "R1.json")["cells"]) == 1, "what is no longer planned goes"
    (tmp_path / "R1.json").write_bytes(before)
    half = campaign(tmp_path / "elsewhere", cells=FINAL, published={**results, "swarm": newly["swarm"]})
    from_old = document(experiments()["R1"], half.store, half.results(), read(tmp_path / "R1.json"), ENVIRONMENT)
    assert {each["contender"] for each in from_old["cells"]} == {"diloco"}, "swarm's are of an older tuning"


# --- going on elsewhere ---------------------------------------------------------------------------


def elsewhere(tmp_path: Path, cells: Sequence[Cell] = CELLS, code: str = "1") -> Campaign:
    """A computer that has the published documents and no records, after it adopted them."""
    made = campaign(tmp_path / "elsewhere", cells, code)
    adopt(made, tmp_path)
    return made


def test_another_computer_goes_on_from_the_published_documents(tmp_path: Path) -> None:
    made = campaign(tmp_path / "cells", CELLS[:-1])
    run(made)
    publish(experiments(FINAL[:-1]), made, tmp_path, ["R1"])
    document, tuning = (tmp_path / "R1.json").read_bytes(), (tmp_path / "tuning.json").read_bytes()
    other = elsewhere(tmp_path)
    assert other.results() == made.results()
    publish(experiments(FINAL[:-1]), other, tmp_path, ["R1"])
    assert (tmp_path / "R1.json").read_bytes() == document
    assert (tmp_path / "tuning.json").read_bytes() == tuning
    assert [each["run"]["seed"] for each in run(other)] == [FINAL[-1].seed], "one cell was never run"
    assert adopt(other, tmp_path) == 0


def test_what_older_code_published_is_stale_elsewhere_too(tmp_path: Path) -> None:
    made = campaign(tmp_path / "cells")
    run(made)
    publish(experiments(), made, tmp_path, ["R1"])
    assert {job.state for job in elsewhere(tmp_path, code="2").jobs()} == {State.STALE}


def test_published_failures_are_known_elsewhere_with_their_reasons(tmp_path: Path) -> None:
    def picky(scenario: Mapping[str, Any], device: str) -> Mapping[str, Any]:
        if scenario["outer"]["recipe"] == "swarm" and scenario["run"]["split"] == "test":
            raise ValueError("outer.recipe: not today")
        return fake.simulate(scenario, device)

    made = campaign(tmp_path / "cells")
    run(made, picky)
    publish(experiments(), made, tmp_path, ["R1"])
    failed = [job.record for job in elsewhere(tmp_path).jobs() if job.state is State.FAILED]
    assert [each and each.failure for each in failed] == ["outer.recipe: not today"] * 2


def test_an_entry_whose_origin_nobody_knows_is_not_adopted(tmp_path: Path) -> None:
    made = campaign(tmp_path / "cells")
    run(made)
    publish(experiments(), made, tmp_path, ["R1"])
    document = read(tmp_path / "R1.json")
    (tmp_path / "R1.json").write_text(json.dumps({**document, "builds": {}}))
    assert run(elsewhere(tmp_path)) == run(campaign(tmp_path / "alone", FINAL, published=made.results()))


# --- processes and the command --------------------------------------------------------------------


def test_worker_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers: one report, one failure, one death; and nobody is left."""
    (tmp_path / "brittle.py").write_text(
        "import os\n"
        "def simulate(scenario, device):\n"
        "    if scenario['seed'] == 0:\n"
        "        os._exit(3)\n"
        "    if scenario['seed'] == 1:\n"
        "        raise ValueError('first line\\nsecond')\n"
        "    return {'seed': scenario['seed'], 'device': device, 'threads': os.environ['OMP_NUM_THREADS']}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    outcomes = {}
    with Pool(2, "brittle:simulate", "moon") as pool:
        waiting = [0, 1, 2, 3]
        while waiting or pool.is_busy:
            while waiting and pool.has_room:
                seed = waiting.pop(0)
                pool.start(seed, {"seed": seed})
            outcome = pool.next()
            outcomes[outcome.key] = outcome
    assert outcomes[0].lost
    assert outcomes[1].failure == "ValueError: first line second"
    assert not outcomes[1].lost
    assert outcomes[3].report == {"seed": 3, "device": "moon", "threads": "1"}


def test_the_command_rehearses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "REHEARSAL", tmp_path)
    done = CliRunner().invoke(command.main, ["--rehearse", "--quick", "--only", "R1,R4"], catch_exceptions=False)
    assert done.exit_code == 0
    text = (tmp_path / "results" / "RESULTS.md").read_text(encoding="utf-8")
    assert text.startswith("# rehearsal: made-up numbers")
    assert "### R1. Quality at equal tokens" in text
    assert {each["contender"] for each in read(tmp_path / "results" / "R1.json")["cells"]} >= {"swarm", LOCAL.name}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--device", "gpu"], "there is no device 'gpu'"),
        (["--budget-hours", "nan"], "nan is no number of hours"),
        (["--quick", "--anew"], "takes nothing that is published"),
    ],
)
def test_nothing_runs_by_a_mistake(words: list[str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "Pool", None)
    done = CliRunner().invoke(command.main, words)
    assert done.exit_code == 2
    assert told in done.output


def test_an_experiment_that_does_not_exist_is_named() -> None:
    done = CliRunner().invoke(command.main, ["--only", "R99", "--list"])
    assert done.exit_code == 2
    assert "there is no experiment 'R99'" in done.output
