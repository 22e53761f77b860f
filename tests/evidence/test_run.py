"""Cells are run once, saved at once, and resumed."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from evidence.made_up import simulate

import bench.evidence.__main__ as command
import bench.evidence.run as module
from bench.evidence.cells import CENTRAL, Cell, block
from bench.evidence.contenders import DILOCO, SWARM_2
from bench.evidence.run import UNKNOWN_CELL_S, core_hours, digest, missing, pending, read, run
from bench.evidence.tuning import GRIDS, STAGES, tuning_cells

ENVIRONMENT = {"machine": "m", "commit": "c", "date": "2026-01-01"}
GRID = tuning_cells([DILOCO, SWARM_2])
RATES = [each for each in GRID if each.choice is not None and each.choice.inner_rate is not None]
FINAL = block("R1", [DILOCO, SWARM_2], [CENTRAL], seeds=(1, 2))


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


def test_sigterm_interrupts_also_where_sigint_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a start in the background of a script: its SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(command, "_verify", lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        done = CliRunner().invoke(command.main, ["--verify", "--out", str(tmp_path)])
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
    assert (done.exit_code, done.output) == (130, "Interrupted. Finished cells are kept; the next call continues.\n")


def test_the_tuning_decides_the_numbers_of_the_rest(tmp_path: Path) -> None:
    assert play(tmp_path, FINAL) == ([], 0), "nothing is tuned yet"
    tuned(tmp_path)
    scenarios, _ = play(tmp_path, FINAL)
    assert {(each["outer"]["learning_rate"], each["outer"]["momentum"]) for each in scenarios} == {(0.7, 0.6)}
    assert {each["learner"]["learning_rate"] for each in scenarios} == {0.012}
    assert [each["run"]["seed"] for each in scenarios] == [1, 1, 2, 2]
    cells = read(tmp_path, "R1")["cells"]
    assert [(each["contender"], each["seed"]) for each in cells] == [
        ("swarm-2", 1),
        ("diloco", 1),
        ("swarm-2", 2),
        ("diloco", 2),
    ]
    assert read(tmp_path, "R1")["builds"] == {"c": {"date": "2026-01-01", "machine": "m"}}


def tuned(folder: Path) -> None:
    """Run the tuning at N = 8 in its two stages; one of the nine points of a grid is among the runs of inner rates."""
    assert [len(play(folder, GRID)[0]) for _ in range(STAGES)] == [8, 16, 0]


def test_finished_cells_are_not_run_again(tmp_path: Path) -> None:
    play(tmp_path, RATES[:3])
    assert len(play(tmp_path, RATES)[0]) == 5
    assert play(tmp_path, RATES) == ([], 0)


def test_an_incomplete_grid_chooses_nothing(tmp_path: Path) -> None:
    for _ in range(STAGES):
        play(tmp_path, GRID[:-1])  # one point of swarm-2 is missing
    assert {each["outer"]["recipe"] for each in play(tmp_path, FINAL)[0]} == {"diloco"}


def test_results_of_other_code_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(tmp_path, RATES)
    play(tmp_path, RATES[:2])
    monkeypatch.setattr(module, "fingerprint", lambda: "other code")
    assert read(tmp_path, "tuning") == {"experiment": "tuning", "builds": {}, "cells": []}
    assert len(play(tmp_path, RATES[:3])[0]) == 3
    assert len(json.loads((tmp_path / "tuning.json").read_bytes())["cells"]) == 3, "stale entries are not kept"


def test_an_interrupted_run_loses_only_the_cells_in_progress(tmp_path: Path) -> None:
    calls = 0

    def interrupted(wanted: Mapping[str, Any]) -> Mapping[str, Any]:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise KeyboardInterrupt
        return simulate(wanted)

    with pytest.raises(KeyboardInterrupt):
        play(tmp_path, RATES, interrupted)
    assert len(RATES) - 5 <= len(play(tmp_path, RATES)[0]) < len(RATES)


def test_a_failed_cell_names_its_reason_and_is_tried_again(tmp_path: Path) -> None:
    def refusing(wanted: Mapping[str, Any]) -> Mapping[str, Any]:
        if wanted["learner"]["learning_rate"] == GRIDS["muon"].inner_rates[0]:
            raise ValueError("not\ntoday")
        return simulate(wanted)

    assert play(tmp_path, GRID, refusing)[1] == 2
    reasons = {each.get("failure") for each in read(tmp_path, "tuning")["cells"]}
    assert reasons == {None, "ValueError: not today"}
    assert len(play(tmp_path, GRID)[0]) == 2, "the rates have holes, so the grid waits"


def test_equal_scenarios_run_once(tmp_path: Path) -> None:
    choice = RATES[0].choice
    one, other = (block(name, [DILOCO], [CENTRAL], seeds=(0,), choice=choice) for name in ("R1", "R6"))
    renamed = block("R5", [replace(DILOCO, name="fp32")], [CENTRAL], seeds=(0,), choice=choice)
    assert len(play(tmp_path, [*one, *other])[0]) == 1
    assert play(tmp_path, renamed) == ([], 0), "a result of another experiment is copied"
    assert [len(read(tmp_path, name)["cells"]) for name in ("R1", "R5", "R6")] == [1, 1, 1]
    assert read(tmp_path, "R5")["cells"][0]["headline"] == read(tmp_path, "R1")["cells"][0]["headline"]


def test_the_estimate_counts_what_waits_for_its_tuning(tmp_path: Path) -> None:
    assert missing([*GRID, *FINAL], tmp_path) == [*GRID, *FINAL]
    assert core_hours(FINAL, tmp_path) == pytest.approx(len(FINAL) * UNKNOWN_CELL_S / 3_600)
    tuned(tmp_path)
    assert missing([*GRID, *FINAL], tmp_path) == list(FINAL)
    assert core_hours(FINAL, tmp_path) < 0.1, "by the seconds of what was run"


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


def test_the_list_ends_with_an_estimate(tmp_path: Path) -> None:
    done = CliRunner().invoke(command.main, ["--only", "R5", "--list", "--out", str(tmp_path)], catch_exceptions=False)
    *names, last = done.output.splitlines()
    assert last == f"{len(names)} cells, about {len(names) / 60:.1f} core hours."
