"""docs/RESULTS.md says what docs/results/*.json say, and the tables say it plainly."""

from __future__ import annotations

import json
from typing import Any

from bench.evidence import documents, figures
from bench.evidence.experiments import EXPERIMENTS
from bench.evidence.layout import Column, Panel, Point, Row, Table
from bench.evidence.run import expected
from bench.evidence.summary import Figure, Summary, key, summaries
from bench.evidence.tables import DOCUMENT, RESULTS, drawings, evidence_lines, load, summary_of, table_lines
from bench.results import replaced

TABLE = Table("T", (Row("swarm"), Row("diloco", label="DiLoCo")), (Column("loss", "loss", best="low"),))


def found(**losses: Figure) -> dict[tuple[str, str], Summary]:
    return {(name, key({})): Summary(name, {}, {"loss": loss}) for name, loss in losses.items()}


def lines(**losses: Figure) -> list[str]:
    return list(table_lines(TABLE, found(**losses)))[2:]


# --- the committed documents ----------------------------------------------------------------------


def test_the_document_is_what_the_files_give() -> None:
    """After new results: python -m bench.evidence.tables."""
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == replaced(text, "evidence", evidence_lines(load(), drawings()))


def test_every_figure_is_shown() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for figure in (RESULTS / "figures").iterdir():
        assert f"(results/figures/{figure.name})" in text


def test_the_summary_is_what_the_files_give() -> None:
    assert (RESULTS / "summary.json").read_text(encoding="utf-8") == documents.text(summary_of(load()))


def test_the_computed_experiment_is_up_to_date() -> None:
    """After a change of the cost model: python -m bench.evidence --only R4."""
    published, computed = documents.read(RESULTS / "R4.json"), EXPERIMENTS["R4"].computed
    assert published is not None
    assert computed is not None
    assert published["cells"] == computed()


def test_published_files_are_as_they_are_written() -> None:
    for name, made in load().items():
        assert (RESULTS / f"{name}.json").read_text(encoding="utf-8") == documents.text(made)


# --- tables ---------------------------------------------------------------------------------------


def test_the_best_and_what_is_not_clearly_worse_are_bold() -> None:
    assert lines(swarm=Figure(1.6, 0.01, (1, 2)), diloco=Figure(1.5, 0.01, (1, 2))) == [
        "| swarm | 1.600 ± 0.010 |",
        "| DiLoCo | **1.500 ± 0.010** |",
    ]
    assert lines(swarm=Figure(1.51, 0.01, (1, 2)), diloco=Figure(1.5, 0.01, (1, 2))) == [
        "| swarm | **1.510 ± 0.010** |",
        "| DiLoCo | **1.500 ± 0.010** |",
    ]


def test_what_was_not_run_is_a_dash_and_what_failed_says_so() -> None:
    assert lines(swarm=Figure(1.6, None, (1,))) == ["| swarm | 1.600 |", "| DiLoCo | - |"]
    broken = {("swarm", key({})): Summary("swarm", {}, {}, failed=2, runs=3)}
    assert list(table_lines(TABLE, broken))[2] == "| swarm | 2 of 3 diverged |"
    broken = {("swarm", key({})): Summary("swarm", {}, {}, failed=2, broken=1, runs=3)}
    assert list(table_lines(TABLE, broken))[2] == "| swarm | 1 of 3 diverged, 1 of 3 failed |"
    some = {("swarm", key({})): Summary("swarm", {}, {"loss": Figure(1.6, 0.1, (1, 2))}, runs=3)}
    assert list(table_lines(TABLE, some))[2] == "| swarm | 1.600 ± 0.100 (2 of 3 runs) |"


def entries(contender: str, loss: float) -> list[dict[str, Any]]:
    return [
        {"contender": contender, "setting": {}, "seed": seed, "headline": {"loss": loss + seed / 1_000}, "code": "1"}
        for seed in (1, 2, 3)
    ]


def test_where_others_win_is_said() -> None:
    document = {
        "experiment": "R1",
        "builds": {},
        "planned": 9,
        "cells": [*entries("swarm", 1.6), *entries("diloco", 1.5)],
    }
    text = " ".join("\n".join(evidence_lines({"R1": document})).split())
    assert "diloco 1.502 ± 0.001 against swarm's 1.602 ± 0.001" in text
    document["cells"] = [*entries("swarm", 1.5), *entries("diloco", 1.6)]
    assert "Nowhere yet by more than two standard errors." in "\n".join(evidence_lines({"R1": document}))


def test_an_empty_house_says_that_nothing_has_run() -> None:
    text = "\n".join(evidence_lines({}))
    assert text.count("Not run yet.") == 11
    assert "Nothing yet: the rule needs R1, R4 and R5." in text


# --- documents ------------------------------------------------------------------------------------


def test_a_document_has_a_line_for_each_cell_and_is_json() -> None:
    made = {"version": 1, "builds": {"a": {"b": 1}}, "cells": [{"x": 1}, {"x": 2}], "none": [], "list": [1, 2]}
    text = documents.text(made)
    assert json.loads(text) == made
    assert text.splitlines()[5:9] == [' "cells": [', '  {"x": 1},', '  {"x": 2}', " ],"]


# --- drawings -------------------------------------------------------------------------------------


def test_a_drawing_shows_the_tables_figures() -> None:
    at = EXPERIMENTS["R1"].cells[0].setting
    panel = Panel("p", "x", "y", {"a": (Point("swarm", at, 2.0, "loss"), Point("diloco", at, 1.0, "loss"))})
    drawn = figures.lines(panel, summaries(EXPERIMENTS["R1"], [*entries("swarm", 1.6), *entries("diloco", 1.5)]))
    assert [(line.label, line.xs) for line in drawn] == [("a", (1.0, 2.0))]
    assert [round(y, 3) for y in drawn[0].ys] == [1.502, 1.602]
    assert figures.lines(panel, []) == []


def test_hours_are_counted_by_experiment() -> None:
    count, core_hours = expected(EXPERIMENTS["R2"].cells[:3])["R2"]
    assert count == 3
    assert 0 < core_hours < 1
