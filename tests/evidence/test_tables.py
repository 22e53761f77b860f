"""Pages of docs/results equal their JSON files, and tables mark the best values."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bench.evidence import figures
from bench.evidence.cells import ALONE, Choice
from bench.evidence.contenders import LOCAL
from bench.evidence.experiments import EXPERIMENTS
from bench.evidence.layout import Column, PlotPanel, PlotPoint, ResultTable, TableRow
from bench.evidence.pages import RESULTS, page, pages, table_lines, write_pages
from bench.evidence.run import load, text
from bench.evidence.summary import CellSummary, Estimate, key, summaries
from bench.evidence.tuning import inner_points
from bench.results import replaced
from bench.rivals.table import markdown

TABLE = ResultTable("T", (TableRow("swarm"), TableRow("diloco", label="DiLoCo")), (Column("loss", "loss", best="low"),))


def estimate(mean: float, error: float | None, *seeds: int) -> Estimate:
    return Estimate(mean, error, dict.fromkeys(seeds, mean))


def lines(table: ResultTable = TABLE, **losses: Estimate) -> list[str]:
    places = {(name, key({})): CellSummary(name, key({}), {"loss": loss}) for name, loss in losses.items()}
    return list(table_lines(table, places))[2:]


# --- committed pages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_pages_equal_what_the_files_give(name: str) -> None:
    """Compare; after new results, run python -m bench.evidence.pages."""
    assert (RESULTS / f"{name}.md").read_text(encoding="utf-8") == pages(RESULTS)[f"{name}.md"]


def test_the_page_of_rivals_equals_its_file() -> None:
    """Compare; after new results, run python -m bench.results --rivals docs/results/rivals.json."""
    shown = (RESULTS / "RIVALS.md").read_text(encoding="utf-8")
    runs = json.loads((RESULTS / "rivals.json").read_bytes())["runs"]
    assert shown == replaced(shown, "rivals", markdown(runs))


def test_every_figure_is_shown() -> None:
    for figure in (RESULTS / "figures").iterdir():
        assert f"(figures/{figure.name})" in (RESULTS / f"{figure.stem}.md").read_text(encoding="utf-8")


def test_the_computed_experiment_is_up_to_date() -> None:
    """Compare; after a change of the cost model, run python -m bench.evidence --only R4."""
    computed = EXPERIMENTS["R4"].computed
    assert computed is not None
    assert load(RESULTS, "R4")["cells"] == computed()


def test_published_files_have_the_form_in_which_they_are_written() -> None:
    for name in EXPERIMENTS:
        if (RESULTS / f"{name}.json").exists():
            assert (RESULTS / f"{name}.json").read_text(encoding="utf-8") == text(load(RESULTS, name))


def test_an_experiment_without_results_has_a_page() -> None:
    shown = page(EXPERIMENTS["R1"], {"experiment": "R1", "builds": {}, "cells": []}, RESULTS)
    assert f"- Not yet measured: {len(EXPERIMENTS['R1'].cells)} runs are planned." in shown
    assert "| - |" not in shown


# --- tables -------------------------------------------------------------------------------------------------------


def test_the_best_and_what_is_not_clearly_worse_are_bold() -> None:
    assert lines(swarm=estimate(1.6, 0.01, 1, 2), diloco=estimate(1.5, 0.01, 1, 2)) == [
        "| swarm | 1.600 ± 0.010 |",
        "| DiLoCo | **1.500 ± 0.010** |",
    ]
    assert lines(swarm=estimate(1.51, 0.01, 1, 2), diloco=estimate(1.5, 0.01, 1, 2)) == [
        "| swarm | **1.510 ± 0.010** |",
        "| DiLoCo | **1.500 ± 0.010** |",
    ]


def test_missing_and_failed_runs_are_marked() -> None:
    assert lines(swarm=estimate(1.6, None, 1)) == ["| swarm | 1.600 |", "| DiLoCo | - |"]
    broken = {("swarm", key({})): CellSummary("swarm", key({}), {}, failed=1, diverged=1, runs=3)}
    assert list(table_lines(TABLE, broken))[2] == "| swarm | 1 of 3 diverged, 1 of 3 failed |"
    some = {("swarm", key({})): CellSummary("swarm", key({}), {"loss": estimate(1.6, 0.1, 1, 2)}, runs=3)}
    assert list(table_lines(TABLE, some))[2] == "| swarm | 1.600 ± 0.100 (2 of 3 runs) |"


def test_ratios_are_taken_seed_by_seed() -> None:
    table = ResultTable("T", (TableRow("swarm"),), (Column("ratio", "loss"),), over=TableRow("diloco"))
    swarm, diloco = Estimate(3.0, 1.0, {1: 2.0, 2: 4.0}), Estimate(6.0, 2.0, {1: 4.0, 2: 8.0})
    assert lines(table, swarm=swarm, diloco=diloco) == ["| swarm | 0.500 |"]


def test_a_table_is_over_a_row_with_its_own_setting() -> None:
    table = ResultTable("T", (TableRow("swarm"),), (Column("ratio", "loss"),), over=TableRow("ddp", {"inner_steps": 1}))
    found = {
        (name, key(setting)): CellSummary(name, key(setting), {"loss": Estimate(loss, 0.1, {1: loss, 2: loss})})
        for name, setting, loss in (("swarm", {}, 1.5), ("ddp", {"inner_steps": 1}, 1.2))
    }
    assert list(table_lines(table, found))[2] == "| swarm | 1.250 |"


def test_the_tuning_shows_what_was_chosen() -> None:
    tuning = EXPERIMENTS["tuning"]
    entries = [{**tuned_entry(each, 1.6 + 0.01 * place), "seed": 0} for place, each in enumerate(inner_points(LOCAL))]
    shown = page(tuning, {"builds": {"c": {"date": "2026-01-01", "machine": "m"}}, "cells": entries}, RESULTS)
    assert "| local | `local` | 0.003 |  |  | 1.600 | 0.003: 1.600, 0.006: 1.610, 0.012: 1.620, 0.02: 1.630 |" in shown
    assert "| diloco | - |" in shown


def test_a_figure_without_results_is_removed(tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "R3.svg").write_text("of older code", encoding="utf-8")
    write_pages(tmp_path)
    assert list((tmp_path / "figures").iterdir()) == []
    assert "figures/" not in (tmp_path / "R3.md").read_text(encoding="utf-8")


def tuned_entry(choice: Choice, loss: float) -> dict[str, Any]:
    numbers = {"eta": choice.learning_rate, "mu": choice.momentum, "inner_rate": choice.inner_rate}
    place = {"contender": "local", "setting": ALONE.key(), "recipe": choice.recipe}
    return {**place, **numbers, "headline": {"loss": loss}, "seconds": 1.0}


# --- files and figures --------------------------------------------------------------------------------------------


def test_a_document_has_a_line_for_each_cell_and_is_json() -> None:
    made = {"experiment": "R1", "builds": {"a": {"b": 1}}, "cells": [{"x": 1}, {"x": 2}]}
    assert json.loads(text(made)) == made
    assert text(made).splitlines()[5:9] == [' "cells": [', '  {"x": 1},', '  {"x": 2}', " ]"]


def entries(contender: str, loss: float) -> list[dict[str, Any]]:
    return [
        {"contender": contender, "setting": {}, "seed": seed, "headline": {"loss": loss + seed / 1_000}}
        for seed in (1, 2, 3)
    ]


def test_a_plotted_line_shows_the_figures_of_the_tables() -> None:
    at = EXPERIMENTS["R1"].cells[0].setting
    panel = PlotPanel("p", "x", "y", {"a": (PlotPoint("swarm", at, 2.0, "loss"), PlotPoint("diloco", at, 1.0, "loss"))})
    drawn = figures.lines(panel, summaries(EXPERIMENTS["R1"], [*entries("swarm", 1.6), *entries("diloco", 1.5)]))
    assert [(line.label, line.xs) for line in drawn] == [("a", (1.0, 2.0))]
    assert [round(y, 3) for y in drawn[0].ys] == [1.502, 1.602]
    assert figures.lines(panel, []) == []


def test_a_line_has_a_gap_where_a_figure_is_missing() -> None:
    at = EXPERIMENTS["R1"].cells[0].setting
    points = (PlotPoint("swarm", at, 1.0, "loss"), PlotPoint("missing", at, 2.0, "loss"))
    (drawn,) = figures.lines(
        PlotPanel("p", "x", "y", {"a": points}), summaries(EXPERIMENTS["R1"], entries("swarm", 1.6))
    )
    assert drawn.xs == (1.0, 2.0)
    assert [math.isnan(y) for y in drawn.ys] == [False, True]
