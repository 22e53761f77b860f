"""Cells are run once, saved at once, and resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from evidence.made_up import simulate

import bench.evidence.__main__ as command
from bench.evidence.cells import CENTRAL, Cell, block
from bench.evidence.contenders import DILOCO, SWARM
from bench.evidence.run import digest, pending, read, run
from bench.evidence.tuning import tuning_cells

ENVIRONMENT = {"machine": "m", "commit": "c", "date": "2026-01-01"}
GRID = tuning_cells([DILOCO, SWARM])
FINAL = block("R1", [DILOCO, SWARM], [CENTRAL], seeds=(1, 2))


def play(folder: Path, cells: Sequence[Cell], simulated: Any = simulate) -> tuple[list[Mapping[str, Any]], int]:
    """Run the missing cells; return the scenarios that ran and the number of failed cells."""
    scenarios: list[Mapping[str, Any]] = []

    def noted(wanted: Mapping[str, Any]) -> Mapping[str, Any]:
        scenarios.append(wanted)
        return simulated(wanted)

    with ThreadPoolExecutor(1) as pool:
        jobs = pending(cells, folder, read(folder, "tuning")["cells"])
        failed = run(jobs, folder, pool, ENVIRONMENT, lambda line: None, noted)
    return scenarios, failed


def test_the_tuning_decides_the_numbers_of_the_rest(tmp_path: Path) -> None:
    assert play(tmp_path, FINAL) == ([], 0), "nothing is tuned yet"
    assert len(play(tmp_path, GRID)[0]) == 18
    scenarios, _ = play(tmp_path, FINAL)
    assert {(each["outer"]["learning_rate"], each["outer"]["momentum"]) for each in scenarios} == {(0.7, 0.5)}
    assert [each["run"]["seed"] for each in scenarios] == [1, 1, 2, 2]
    cells = read(tmp_path, "R1")["cells"]
    assert [(each["contender"], each["seed"]) for each in cells] == [
        ("diloco", 1),
        ("swarm", 1),
        ("diloco", 2),
        ("swarm", 2),
    ]
    assert read(tmp_path, "R1")["builds"] == {"c": {"date": "2026-01-01", "machine": "m"}}


def test_finished_cells_are_not_run_again(tmp_path: Path) -> None:
    play(tmp_path, GRID[:3])
    assert len(play(tmp_path, GRID)[0]) == 15
    assert play(tmp_path, GRID) == ([], 0)


def test_an_incomplete_grid_chooses_nothing(tmp_path: Path) -> None:
    play(tmp_path, GRID[:-1])  # one point of swarm is missing
    assert {each["outer"]["recipe"] for each in play(tmp_path, FINAL)[0]} == {"diloco"}


def test_an_interrupted_run_loses_only_the_cells_in_progress(tmp_path: Path) -> None:
    calls = 0

    def interrupted(wanted: Mapping[str, Any]) -> Mapping[str, Any]:
        nonlocal calls
        calls += 1
        if calls > 10:
            raise KeyboardInterrupt
        return simulate(wanted)

    with pytest.raises(KeyboardInterrupt):
        play(tmp_path, GRID, interrupted)
    assert len(play(tmp_path, GRID)[0]) >= len(GRID) - 10


def test_a_failed_cell_names_its_reason_and_is_tried_again(tmp_path: Path) -> None:
    def refusing(wanted: Mapping[str, Any]) -> Mapping[str, Any]:
        if wanted["outer"]["learning_rate"] == 1.0:
            raise ValueError("not\ntoday")
        return simulate(wanted)

    assert play(tmp_path, GRID, refusing)[1] == 6
    reasons = {each.get("failure") for each in read(tmp_path, "tuning")["cells"]}
    assert reasons == {None, "ValueError: not today"}
    assert play(tmp_path, FINAL)[0] == [], "the grid has holes"
    assert len(play(tmp_path, GRID)[0]) == 6


def test_equal_scenarios_run_once(tmp_path: Path) -> None:
    (choice,) = {GRID[0].choice}
    cells = [cell for name in ("R1", "R8") for cell in block(name, [DILOCO], [CENTRAL], seeds=(0,), choice=choice)]
    assert len(play(tmp_path, cells)[0]) == 1
    assert len(read(tmp_path, "R1")["cells"]) == len(read(tmp_path, "R8")["cells"]) == 1


def test_a_scenarios_digest_ignores_the_order_of_fields() -> None:
    assert digest({"a": 1, "b": {"c": 2, "d": 3}}) == digest({"b": {"d": 3, "c": 2}, "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})


def test_an_unknown_experiment_is_refused() -> None:
    done = CliRunner().invoke(command.main, ["--only", "R99", "--list"])
    assert done.exit_code == 2
    assert "There is no experiment 'R99'" in done.output


def test_computed_experiments_and_pages_need_no_worker(tmp_path: Path) -> None:
    done = CliRunner().invoke(command.main, ["--only", "R4", "--out", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "| diloco |" in (tmp_path / "R4.md").read_text(encoding="utf-8")
