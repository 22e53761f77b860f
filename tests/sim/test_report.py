"""Reports on disk, and comparisons of reports."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from sim import report as reports
from sim.errors import ScenarioError
from sim.scenario import Scenario
from sim.simulate import simulate
from sim.tables import by_group, changed_settings, comparison, summary


def test_what_is_saved_is_read_back(make, tmp_path: Path):
    made = simulate(make(), title="some swarm")
    reports.save(made, tmp_path / "r.json")
    assert reports.load(tmp_path / "r.json") == made
    assert Scenario.model_validate(made.scenario) == make()


@pytest.mark.parametrize("learner", ["bytes", "quadratic"])
def test_nothing_in_it_is_infinite_or_no_number(make, learner):
    made = simulate(make(f"learner={{kind = '{learner}', parameters = 2048}}", "run.seconds=2"))
    json.dumps(made.model_dump(), allow_nan=False)
    assert made.overall.loss is None
    assert made.overall.exchanges == 0


def test_what_is_no_report_is_refused(make, tmp_path: Path):
    path = tmp_path / "r.json"
    with pytest.raises(ScenarioError, match="is not a report"):
        reports.load(path)
    path.write_text("{")
    with pytest.raises(ScenarioError, match="is not a report"):
        reports.load(path)
    whole = simulate(make("run.seconds=5")).model_dump()
    path.write_text(json.dumps({**whole, "version": reports.REPORT_VERSION + 1}))
    with pytest.raises(ScenarioError, match=f"it does not have version {reports.REPORT_VERSION}"):
        reports.load(path)
    del whole["overall"]["solo_share"]
    path.write_text(json.dumps(whole))
    with pytest.raises(ScenarioError, match=r"is not a report: overall\.solo_share: missing"):
        reports.load(path)
    with pytest.raises(ScenarioError, match="cannot be written"):
        reports.save(simulate(make("run.seconds=5")), tmp_path / "absent" / "r.json")


def test_differing_settings_are_named(make):
    one, other = (simulate(make("run.seconds=5", *more)) for more in ((), ("outer.momentum=0.9", "peers.home.count=4")))
    assert changed_settings(other, one) == ["outer.momentum: 0.5 -> 0.9", "peers[0].count: 6 -> 4"]
    assert changed_settings(one, one) == []


def test_many_groups_get_a_line_each(make):
    groups = [{"name": f"group-{each}", "count": 1, "step_s": 1.0} for each in range(4)]
    many, few = simulate(make("run.seconds=5", groups=groups)), simulate(make("run.seconds=5", groups=groups[:2]))
    assert by_group(few) is None
    assert len(summary(few).columns) == 2 + 3
    assert len(summary(many).columns) == 2
    table = by_group(many)
    assert table is not None
    assert table.row_count == 5


def test_titles_are_text_of_one_short_line(make):
    mine = simulate(make("run.seconds=5"), title="[/red]:smile:")
    theirs = mine.model_copy(update={"title": "\x1b[2J\n" + 9999 * "x"})
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(summary(mine), comparison(mine, theirs))
    shown = console.export_text()
    assert "[/red]:smile:: 5 simulated seconds" in " ".join(shown.split())
    assert "[/red]:smile: against [2J xx" in shown
    assert "\x1b" not in shown
    assert 61 * "x" not in shown


def test_a_strangers_settings_are_one_short_line_each(make):
    mine = simulate(make("run.seconds=5"))
    theirs = mine.model_copy(update={"scenario": {**mine.scenario, "x\x1b]0;y": "\n\r" + 999 * "z"}})
    lines = changed_settings(mine, theirs)
    assert len(lines) == 1
    assert all(line.isprintable() and len(line) < 400 for line in lines)
