"""Results of older code: believed where a run of their kind comes out equal, and only there."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.evidence import fake, pool, worker
from bench.evidence.cells import CENTRAL, Cell, Choice, Setting
from bench.evidence.confirm import confirm, kind, kinds
from bench.evidence.contenders import DILOCO, SWARM
from bench.evidence.documents import document
from bench.evidence.experiments import EXPERIMENTS
from bench.evidence.grid import tuning_cells
from bench.evidence.layout import Experiment
from bench.evidence.older import OlderCodeError, older
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


@contextmanager
def elsewhere(commit: str, code: str) -> Iterator[fake.InlinePool]:
    """The older code, on which the made-up numbers rest."""
    assert (commit, code) == ("of old", "old")
    yield fake.InlinePool(fake.simulate)


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

    today = fake.InlinePool(with_other_swarm)
    confirm(made, today, elsewhere)

    recipes = [each["outer"]["recipe"] for each in today.scenarios]
    assert sorted(recipes) == ["diloco"] * 2 + ["swarm"] * 2, "one of each kind: with momentum and without"
    found = states(campaign(tmp_path, "new")[0])  # as the next process reads it
    assert found == {recipe: {State.STALE if recipe == "swarm" else State.DONE} for recipe in found}
    assert sum("stay stale" in line for line in said) == 2
    assert set.union(*states(campaign(tmp_path, "newer")[0]).values()) == {State.STALE}


def test_longer_records_are_let_pass_and_said_and_other_payloads_are_not(tmp_path: Path) -> None:
    def with_traffic(control: float, payload: float) -> pool.Simulate:
        def simulate(scenario: Mapping[str, Any], device: str) -> Mapping[str, Any]:
            report = dict(fake.simulate(scenario, device))
            up = {"payload": payload, "control": control, "total": payload + control}
            return report | {"overall": {"bits_per_parameter": payload + control, "up": up}, "events": control}

        return simulate

    @contextmanager
    def before(commit: str, code: str) -> Iterator[fake.InlinePool]:
        yield fake.InlinePool(with_traffic(10.0, 90.0))

    all_run(tmp_path)
    made, _ = campaign(tmp_path, "other payloads")
    confirm(made, fake.InlinePool(with_traffic(10.0, 90.5)), before)
    assert set.union(*states(made).values()) == {State.STALE}
    made, said = campaign(tmp_path, "longer records")
    confirm(made, fake.InlinePool(with_traffic(12.0, 90.0)), before)
    assert set.union(*states(made).values()) == {State.DONE}
    assert all("with which bits are 1.0200 times" in line for line in said)


def test_a_run_that_breaks_vouches_for_nothing(tmp_path: Path) -> None:
    def broken(scenario: Mapping[str, Any], device: str) -> Mapping[str, Any]:
        raise ValueError("it broke")

    all_run(tmp_path)
    made, said = campaign(tmp_path, "new")
    confirm(made, fake.InlinePool(broken), elsewhere)
    assert set.union(*states(made).values()) == {State.STALE}
    assert len(said) == 4
    assert all("it broke" in line for line in said)


def test_the_dearest_of_a_kind_must_come_out_equal_too(tmp_path: Path) -> None:
    long = Cell(experiment="R1", contender=DILOCO, setting=Setting(steps=6_400), seed=1)

    def with_other_long_runs(scenario: Mapping[str, Any], device: str) -> Mapping[str, Any]:
        report = fake.simulate(scenario, device)
        if scenario["run"]["tokens_per_peer"] > 40_000:
            report["curve"][-1]["validation"] += 1e-3
        return report

    made, _ = campaign(tmp_path, "old", [*CELLS, long])
    made.run(fake.InlinePool(fake.simulate), 2, 1e9)
    made, said = campaign(tmp_path, "new", [*CELLS, long])
    confirm(made, fake.InlinePool(with_other_long_runs), elsewhere)
    found = {(job.cell.choice or Choice("", 0.7, 0.5)).momentum == 0: job.state for job in of_diloco(made)}
    assert found == {True: State.DONE, False: State.STALE}, "the long run has momentum"
    assert sum("stay stale" in line for line in said) == 1


def of_diloco(made: Campaign) -> list[Job]:
    return [job for job in made.jobs() if job.cell.contender == DILOCO]


def test_what_is_run_is_short(tmp_path: Path) -> None:
    all_run(tmp_path)
    today = fake.InlinePool(fake.simulate)
    confirm(campaign(tmp_path, "new")[0], today, elsewhere)
    assert {each["run"]["tokens_per_peer"] for each in today.scenarios} == {CENTRAL.steps * 128 // 16}


def test_a_newer_report_may_say_more_and_not_less(tmp_path: Path) -> None:
    def without(scenario: Mapping[str, Any], device: str) -> Mapping[str, Any]:
        report = fake.simulate(scenario, device)
        return {name: each for name, each in report.items() if name != "simulated_s"}

    def with_more(scenario: Mapping[str, Any], device: str) -> Mapping[str, Any]:
        return {**fake.simulate(scenario, device), "more": 1}

    all_run(tmp_path)
    made, _ = campaign(tmp_path, "new")
    confirm(made, fake.InlinePool(without), elsewhere)
    assert set.union(*states(made).values()) == {State.STALE}
    confirm(made, fake.InlinePool(with_more), elsewhere)
    assert set.union(*states(made).values()) == {State.DONE}


def test_code_that_is_not_to_be_had_vouches_for_nothing(tmp_path: Path) -> None:
    @contextmanager
    def nowhere(commit: str, code: str) -> Iterator[fake.InlinePool]:
        raise OlderCodeError(f"commit {commit} is not in this clone")
        yield

    all_run(tmp_path)
    made, said = campaign(tmp_path, "new")
    confirm(made, fake.InlinePool(fake.simulate), nowhere)
    assert set.union(*states(made).values()) == {State.STALE}
    assert said == [f"commit of old is not in this clone; {len(CELLS)} cells of that code stay stale"]


def test_what_was_confirmed_is_compared_with_the_last_code_that_is_known(tmp_path: Path) -> None:
    """Of a cell of "old" that "new" yields too, when "new" has run a cell itself: its commit is the nearer one."""
    all_run(tmp_path)
    made, _ = campaign(tmp_path, "new")
    confirm(made, fake.InlinePool(fake.simulate), elsewhere)
    more = Cell(experiment="R1", contender=SWARM, setting=CENTRAL, seed=3)
    made, _ = campaign(tmp_path, "new", [*CELLS, more])
    made.run(fake.InlinePool(fake.simulate), 2, 1e9)
    newest, _ = campaign(tmp_path, "newest", [*CELLS, more])
    assert {(each.code, each.commits) for each in kinds(newest.jobs())} == {("new", ("of new",))}


def test_of_a_code_that_was_measured_on_many_commits_one_that_can_be_had_is_enough(tmp_path: Path) -> None:
    asked: list[str] = []

    @contextmanager
    def not_the_newest(commit: str, code: str) -> Iterator[fake.InlinePool]:
        asked.append(commit)
        if commit == "lost":
            raise OlderCodeError(f"commit {commit} is not in this clone")
        yield fake.InlinePool(fake.simulate)

    all_run(tmp_path)
    made, _ = campaign(tmp_path, "new")
    for job in made.jobs()[:3]:
        assert job.record is not None
        made.store.keep(replace(job.record, commit="lost", date="2026-01-02"))
    made, said = campaign(tmp_path, "new")
    confirm(made, fake.InlinePool(fake.simulate), not_the_newest)
    assert set.union(*states(made).values()) == {State.DONE}
    assert asked == ["lost", "of old"]
    assert not any("stay stale" in line for line in said)


# --- an older commit, really ----------------------------------------------------------------------


def in_git(folder: Path, *arguments: str) -> str:
    made = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(made, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose first commit answers 1 and whose second answers 2."""
    package = tmp_path / "repository" / "bench" / "evidence"
    package.mkdir(parents=True)
    in_git(tmp_path, "init", "--quiet", "repository")
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "worker.py").write_bytes(Path(worker.__file__).read_bytes())
    (package / "pool.py").write_bytes(Path(pool.__file__).read_bytes())
    for answer in (1, 2):
        (package / "identity.py").write_text(f"def numeric_digest(): return 'digest {answer}'\n")
        (package / "answer.py").write_text(f"def simulate(scenario, device): return {{'answer': {answer}}}\n")
        in_git(tmp_path / "repository", "add", "-A")
        in_git(tmp_path / "repository", "commit", "--quiet", "-m", f"answer {answer}")
        in_git(tmp_path / "repository", "tag", f"of-{answer}")
    monkeypatch.setattr("bench.evidence.older.ROOT", tmp_path / "repository")
    return tmp_path / "repository"


@pytest.mark.parametrize("answer", [1, 2])
def test_an_older_commit_runs_its_own_code(history: Path, answer: int) -> None:
    with older(f"of-{answer}", f"digest {answer}", 1, "bench.evidence.answer:simulate", "cpu") as workers:
        workers.start(0, {})
        outcome = workers.next()
    assert (outcome.report, outcome.failure) == ({"answer": answer}, None)


def test_a_commit_that_is_other_code_than_was_recorded_is_refused(history: Path) -> None:
    with (
        pytest.raises(OlderCodeError, match="has the numeric digest digest 1, not digest 2"),
        older("of-1", "digest 2", 1, "bench.evidence.answer:simulate", "cpu"),
    ):
        pass


def test_a_commit_that_is_not_here_is_named_with_what_to_do(history: Path) -> None:
    with (
        pytest.raises(OlderCodeError, match="commit c0ffee is not in this clone; git fetch"),
        older("c0ffee", "digest 1", 1, "bench.evidence.answer:simulate", "cpu"),
    ):
        pass


def test_how_fast_the_machine_was_does_not_count(tmp_path: Path) -> None:
    def faster(scenario: Mapping[str, Any], device: str) -> Mapping[str, Any]:
        report = fake.simulate(scenario, device)
        report["cost"]["events_per_s"] *= 2
        return report

    all_run(tmp_path)
    made, _ = campaign(tmp_path, "new")
    confirm(made, fake.InlinePool(faster), elsewhere)
    assert set.union(*states(made).values()) == {State.DONE}


def test_the_document_says_what_ran_and_what_was_confirmed(tmp_path: Path) -> None:
    all_run(tmp_path)
    made, _ = campaign(tmp_path, "new")
    confirm(made, fake.InlinePool(fake.simulate), elsewhere)
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
    line, slower = ({**scenario, "peers": [{"up_mbit_s": speed}]} for speed in (10.0, 1.0))
    assert kind(line) != kind(slower), "what is late or left out goes by the line"
