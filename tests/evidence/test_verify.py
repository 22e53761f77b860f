"""Results of other code are kept if, and only if, today's code computes the same short runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from evidence import made_up

import bench.evidence.__main__ as command
from bench.evidence import run, verify
from bench.evidence.cells import CENTRAL, TOKENS, Cell, CellSetting, Choice, block
from bench.evidence.contenders import DILOCO, SWARM_2, SWARM_MODULAR4
from bench.evidence.experiments import EXPERIMENTS
from bench.evidence.headline import headline
from bench.evidence.pages import page
from bench.evidence.run import digest, pending, read
from bench.evidence.scenario import tokens_per_step
from bench.evidence.tuning import GRIDS, STAGES, inner_points, tuning_cells
from bench.evidence.verify import TIME_TOLERANCE, TOLERANCE, agree, shortened, simulated_briefly
from p2ptrain.host import rules
from p2ptrain.swarm.messages import Terms
from sim.scenario import Scenario

GRID = tuning_cells([DILOCO, SWARM_2])
CHOICE = Choice("swarm", 0.7, 0.6, 0.02)
PAIR = CellSetting(peers=2, inner_steps=2)


class Code:
    """Code that changes: its fingerprint, and what it makes of the invented losses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.name, self.folder = "first", folder
        self.factor: dict[str, float] = {}
        """Factor of the loss by recipe."""
        self.simulated = 0
        for module in (run, verify):
            monkeypatch.setattr(module, "fingerprint", lambda: self.name)

    def simulate(self, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
        self.simulated += 1
        report = dict(made_up.simulate(wanted))
        factor = self.factor.get(wanted["outer"]["recipe"], 1.0)
        *points, last = report["curve"]
        report["curve"] = [*points, {**last, "validation": factor * last["validation"]}]
        return report

    def run(self, cells: tuple[Cell, ...]) -> None:
        with ThreadPoolExecutor(1) as pool:
            for _ in range(STAGES):
                jobs = pending(cells, self.folder, read(self.folder, "tuning")["cells"])
                run.run(jobs, self.folder, pool, here("measured"), lambda line: None, self.simulate)

    def verify(self, name: str, **factor: float) -> list[str]:
        """Verify with other code; return the names of the cells that are lost."""
        self.name, self.factor, self.simulated = name, {**self.factor, **factor}, 0
        with ThreadPoolExecutor(1) as pool:
            lost = verify.verify(self.folder, pool, here(f"commit of {name}"), lambda line: None, self.simulate)
        return [cell.name for cell in lost]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Code:
    """Return code that has just run the tuning of two methods and the cells of one experiment."""
    code = Code(monkeypatch, tmp_path)
    code.run(GRID)
    code.run(EXPERIMENTS["R10"].cells)
    return code


def here(commit: str) -> dict[str, str]:
    return {"machine": "m", "commit": commit, "date": f"2026-01-0{1 + len(commit) % 9}"}


def kept(code: Code) -> int:
    return sum(len(read(code.folder, name)["cells"]) for name in ("tuning", "R10"))


# --- keeping entries ----------------------------------------------------------------------------------------------


def test_results_are_kept_if_the_code_still_computes_them(measured: Code) -> None:
    before = kept(measured)
    assert measured.verify("first") == []
    assert measured.verify("other") == []
    assert kept(measured) == before
    for entry in read(measured.folder, "R10")["cells"]:
        assert (entry["code"], entry["commit"], entry["verified"]) == ("other", "measured", "commit of other")
    assert set(read(measured.folder, "R10")["builds"]) == {"measured", "commit of other"}
    assert measured.verify("other") == []
    assert measured.simulated == 0, "all is known"
    assert measured.verify("third") == []
    builds = json.loads((measured.folder / "R10.json").read_bytes())["builds"]
    assert set(builds) == {"measured", "commit of third"}, "the last check alone is named"


def test_results_that_the_code_no_longer_computes_are_missing(measured: Code) -> None:
    measured.verify("first")
    lost = measured.verify("other", swarm=1 + 2 * TOLERANCE)
    assert len(lost) == len(inner_points(SWARM_2)) - 1 + 9 + len(EXPERIMENTS["R10"].cells)
    assert not any("diloco" in name for name in lost)
    assert {each["contender"] for each in read(measured.folder, "tuning")["cells"]} == {"diloco"}
    assert read(measured.folder, "R10")["cells"] == []
    assert "R10 swarm-2 peers=6 seed=1" in lost


def test_a_result_whose_own_code_made_no_short_run_is_missing(measured: Code) -> None:
    assert len(measured.verify("other")) == len(GRID) + len(EXPERIMENTS["R10"].cells)
    assert measured.simulated == 0, "there is nothing to compare with"
    assert kept(measured) == 0


def test_small_differences_do_not_add_up(measured: Code) -> None:
    measured.verify("first")
    assert measured.verify("second", swarm=1 + 0.7 * TOLERANCE) == []
    assert measured.verify("third", swarm=1 + 1.4 * TOLERANCE) != []


def test_a_headline_of_another_processor_is_known_too(measured: Code) -> None:
    """Check that it counts beside the first one, and survives the check."""
    measured.verify("first")
    documents = {name: run.load(measured.folder, name) for name, each in EXPERIMENTS.items() if each.cells}
    _, wanted = verify._groups(documents)
    runs = run.load(measured.folder, verify.SHORT_RUNS)
    measured.factor = {"swarm": 2.0}
    for each in runs["cells"]:
        there = run.measured(measured.simulate, wanted[each["scenario"]])
        each["elsewhere"] = [{"machine": "n", "commit": "c", "headline": there["headline"]}]
    run.write(measured.folder, runs)
    before = kept(measured)
    for name, factor in (("second", 2.0), ("third", 1.0), ("fourth", 2.0)):
        assert measured.verify(name, swarm=factor) == []
        assert kept(measured) == before
    assert measured.verify("fifth", swarm=3.0) != []


def test_code_that_is_restored_computes_its_results_again(measured: Code) -> None:
    measured.verify("first")
    before = kept(measured)
    assert measured.verify("broken", swarm=2.0) != []
    assert kept(measured) < before
    assert measured.verify("repaired", swarm=1.0) == []
    assert kept(measured) == before


def test_a_short_run_that_fails_keeps_nothing(measured: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    measured.verify("first")

    def failing(wanted: Mapping[str, Any]) -> Mapping[str, Any]:
        raise ValueError("not today")

    monkeypatch.setattr(measured, "simulate", failing)
    assert len(measured.verify("other")) == len(GRID) + len(EXPERIMENTS["R10"].cells)


def test_new_results_replace_the_short_run_of_lost_ones(measured: Code) -> None:
    measured.verify("first")
    measured.verify("other", swarm=1.1)
    measured.run(GRID)
    measured.run(EXPERIMENTS["R10"].cells)
    assert measured.verify("other") == []
    assert measured.verify("another") == []


def test_the_page_names_both_commits(measured: Code) -> None:
    measured.verify("first")
    measured.verify("other")
    text = page(EXPERIMENTS["R10"], read(measured.folder, "R10"), measured.folder)
    assert "commits measured; last run 2026-01-09; short runs as before at commits commit of other," in " ".join(
        text.split()
    )


def shown(code: Code) -> str:
    """Return the page of R10, as written with the code of the moment."""
    (code.folder / run.WRITTEN).write_text(json.dumps({"code": code.name}))
    return " ".join(page(EXPERIMENTS["R10"], run.load(code.folder, "R10"), code.folder).split())


def test_a_page_shows_results_of_older_code_and_says_so(measured: Code) -> None:
    measured.verify("first")
    tables = shown(measured).partition("## ")[2]
    assert tables
    assert "Older code" not in shown(measured)
    measured.name = "other"
    assert "**Older code**: 15 runs are of code first; this page is of other; 15 are not verified with it." in shown(
        measured
    )
    measured.verify("other", swarm=2.0)
    assert "this page is of other; 15 differ with it in short runs." in shown(measured)
    assert shown(measured).partition("## ")[2] == tables
    measured.verify("repaired", swarm=1.0)
    assert "Older code" not in shown(measured)
    assert set(run.load(measured.folder, "R10")["builds"]) == {"measured", "commit of repaired"}


def test_one_sentence_says_what_to_type_after_a_change(measured: Code) -> None:
    measured.verify("first")
    assert run.outdated(measured.folder) == ""
    measured.name = "other"
    assert "results are of other code than today's: make results RESULTS=--verify" in run.outdated(measured.folder)
    lost = measured.verify("other", swarm=2.0)
    assert run.outdated(measured.folder).startswith(f"{len(lost)} results differ with today's code: make results ")
    measured.verify("other", swarm=1.0)
    assert run.outdated(measured.folder) == ""


def test_a_remark_stays_with_the_results_of_its_commits(measured: Code) -> None:
    document = run.load(measured.folder, "R10")
    run.write(measured.folder, document | {"remarks": {"In bf16.": ["measured"], "Gone.": ["another"]}})
    measured.verify("first")
    assert "- **In bf16.** (Runs of commits measured.)" in shown(measured)
    assert "Gone" not in shown(measured)
    measured.verify("other", swarm=1.1)
    with ThreadPoolExecutor(1) as pool:
        jobs = pending(EXPERIMENTS["R10"].cells, measured.folder, run.load(measured.folder, "tuning")["cells"])
        assert len(jobs) == 15
        run.run(jobs, measured.folder, pool, here("anew"), lambda line: None, measured.simulate)
    assert "In bf16" not in shown(measured)


def test_the_option_concerns_all_experiments() -> None:
    done = CliRunner().invoke(command.main, ["--verify", "--only", "R1"])
    assert done.exit_code == 2
    assert "leave out --only" in done.output


# --- short runs ---------------------------------------------------------------------------------------------------


def one(**changes: Any) -> Cell:
    return replace(Cell(experiment="R1", contender=SWARM_2, setting=CENTRAL, seed=1), **changes)


def test_cells_that_differ_in_seed_and_budget_share_a_short_run() -> None:
    budgets = (TOKENS, 2 * TOKENS)
    cells = block("R2", (SWARM_2,), [CellSetting(tokens=each) for each in budgets], seeds=(1, 2))
    assert len({digest(shortened(each, CHOICE)) for each in cells}) == 1
    others = [one(setting=PAIR), one(contender=SWARM_MODULAR4), one(setting=CellSetting(failures=0.1))]
    assert len({digest(shortened(each, CHOICE)) for each in [*cells, *others]}) == 4
    rates = [replace(CHOICE, learning_rate=each) for each in GRIDS["muon"].rates]
    assert len({digest(shortened(one(), each)) for each in rates}) == len(rates)


def test_short_runs_have_five_to_ten_outer_steps_with_arrivals_and_departures() -> None:
    for each in (cell for experiment in EXPERIMENTS.values() for cell in experiment.cells):
        recipe = each.contender.forms[0]
        short = Scenario.model_validate(shortened(each, replace(CHOICE, recipe=recipe)))
        together = each.setting.inner_steps * tokens_per_step(each.setting) * each.setting.peers
        assert 5 * together <= (short.run.tokens or 0) <= 10 * together, each.name
    moving = shortened(one(setting=CellSetting(comings_and_goings=True)), CHOICE)["peers"]
    assert [each.get("leaves_at_s") for each in moving] == [None, 50.0, None]


def briefly(contender: Any = SWARM_2) -> dict[str, float]:
    return headline(simulated_briefly(shortened(one(contender=contender, setting=PAIR), CHOICE)))


def test_the_simulator_repeats_a_short_run_and_a_changed_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = briefly()
    assert before == briefly()
    share = Terms.share
    with monkeypatch.context() as patch:
        patch.setattr(Terms, "share", lambda mine, theirs: 0.9 * share(mine, theirs))
        assert not agree(before, briefly())
    rule = rules.OuterRule
    with monkeypatch.context() as patch:
        patch.setattr(rules, "OuterRule", lambda rate, momentum, nesterov: rule(rate, momentum, not nesterov))
        assert not agree(before, briefly())


def test_headlines_with_other_figures_differ() -> None:
    assert agree({"loss": 1.0}, {"loss": 1.0 + TOLERANCE / 2})
    assert not agree({"loss": 1.0}, {"loss": 1.0 + 2 * TOLERANCE})
    assert not agree({"loss": 1.0}, {"loss": 1.0, "diverged": 1.0})
    assert not agree({"seconds_to:2.5": 1.0}, {"seconds_to:2.5": 1.0 + 2 * TIME_TOLERANCE})
