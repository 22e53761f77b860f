"""Folders of scenarios, and scenarios with a comparison: which failures end what."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lab import cell, command
from lab import scenario as scenarios
from p2ptrain.base.errors import DeviceError

NAMES = ("one", "three", "two")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "scenarios"
    made.mkdir()
    for name in NAMES:
        (made / f"{name}.toml").touch()
    return made


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (RuntimeError("the inside ended with status 1"), "RuntimeError: the inside ended with status 1"),
        (DeviceError("It has no line.", "Give it one."), "It has no line.\n  Give it one."),
    ],
)
def test_a_failing_scenario_does_not_fail_others(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, fault: str
) -> None:
    def run_scenario(
        path: Path, changes: Any, stage: Any, out: Path, threads: int, page: str, undisturbed_runs: Any
    ) -> int:
        if path.stem == "three":
            raise error
        out.mkdir(parents=True)
        report = {"scenario": path.stem, "passed": True, "faults": []}
        (out / "report.json").write_text(json.dumps(report))
        return int(path.stem == "two")  # as if closing its containers had failed

    monkeypatch.setattr(command, "run_scenario", run_scenario)
    out = tmp_path / "out"
    assert command.run_scenarios(folder, (), "local", out, 1) == 1
    reports = {each["scenario"]: each for each in json.loads((out / "report.json").read_bytes())}
    assert {name: each["passed"] for name, each in reports.items()} == {"one": True, "three": False, "two": False}
    assert reports["three"]["faults"] == [fault]


def test_an_interrupt_ends_all_scenarios(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_scenario(*arguments: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_scenario", run_scenario)
    with pytest.raises(KeyboardInterrupt):
        command.run_scenarios(folder, (), "local", tmp_path / "out", 1)


def test_a_missing_stage_is_reported_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_means() -> None:
        raise DeviceError("No namespaces.", "Take --stage local.")

    monkeypatch.setattr(command, "check_support", no_means)
    with pytest.raises(DeviceError):
        command.run_scenarios(folder, (), "namespaces", tmp_path / "out", 1)
    assert not (tmp_path / "out").exists()


def test_a_scenario_is_not_run_if_its_undisturbed_run_fails(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {**tiny, "undisturbed": {"peers": [{"name": "home", "count": 3, "step_s": 1.0}]}}
    acted: list[Path] = []

    def acted_out(
        scenario: Any, stage: Any, out: Path, threads: int, page: str
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        acted.append(out)
        return {"troubles": ["home-1 ended with status 1"], "done": [], "missed": []}, {"tokens": float("nan")}

    monkeypatch.setattr(command, "_run_and_read", acted_out)
    monkeypatch.setattr(scenarios, "load", lambda path, changes: scenarios.parse(data))
    out = tmp_path / "out"
    assert command.run_scenario(tmp_path / "it.toml", (), "local", out, 1) == 1
    assert acted == [out / "undisturbed"]
    report = json.loads((out / "report.json").read_bytes())
    assert report["faults"] == ["undisturbed: home-1 ended with status 1"]
    assert report["figures"]["undisturbed"]["tokens"] is None


def test_equal_undisturbed_runs_of_a_folder_run_once(
    folder: Path, tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"one": 3, "three": 4, "two": 3}
    acted: list[str] = []

    def acted_out(
        scenario: Any, stage: Any, out: Path, threads: int, page: str
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        acted.append(str(out.relative_to(tmp_path / "out")))
        record = {"troubles": [], "done": [], "missed": [], "lives": {}}
        return record, {"tokens": 6.0 if out.name == "undisturbed" else 3.0, "peers": {}}

    def load(path: Path, changes: Any) -> Any:
        calm = {"peers": [{"name": "home", "count": counts[path.stem], "step_s": 1.0}]}
        return scenarios.parse({**tiny, "undisturbed": calm, "limits": {"compared.tokens": {"at_most": 0.5}}})

    monkeypatch.setattr(command, "_run_and_read", acted_out)
    monkeypatch.setattr(scenarios, "load", load)
    command.run_scenarios(folder, (), "local", tmp_path / "out", 1)
    assert acted == ["one/undisturbed", "one", "three/undisturbed", "three", "two"]
    for name in NAMES:
        assert (
            json.loads((tmp_path / "out" / name / "report.json").read_bytes())["figures"]["compared"]["tokens"] == 0.5
        )


def test_an_interrupt_is_kept_though_the_cell_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stubborn = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "time.sleep(1); os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)"
    )
    monkeypatch.setattr(cell, "cell_command", lambda command, **_: command)
    with pytest.raises(KeyboardInterrupt):
        cell.run_in_cell([sys.executable, "-c", stubborn], 0.1)
