"""``p2ptrain simulate`` as a user runs it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from commanding import SCENARIO, run

from p2ptrain import cli


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "swarm.toml"
    file.write_text(SCENARIO, encoding="utf-8")
    return file


def test_it_prints_what_became_of_the_swarm_and_writes_a_report(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = path.with_name("report.json")
    assert run(path, "--report", report) == 0
    printed = capsys.readouterr().out
    assert "exchanges made" in printed
    assert "left out:" in printed
    written = json.loads(report.read_text(encoding="utf-8"))
    assert written["overall"]["peers"] == 4
    assert written["overall"]["exchanges"] >= 12


def test_the_same_twice_and_a_change(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = path.with_name("one.json"), path.with_name("other.json")
    assert run(path, "--report", one) == run(path, "--report", other) == 0
    first, second = (json.loads(each.read_text(encoding="utf-8")) for each in (one, other))
    del first["cost"], second["cost"]
    assert first == second
    capsys.readouterr()
    changes = ("peers.home.count=6", "outer.recipe=diloco", "outer.exchanges_per_step=0")
    words = [word for change in changes for word in ("--set", change)]
    assert run(path, *words, "--against", one) == 0
    printed = capsys.readouterr().out
    assert "against swarm" in printed
    assert "ratio" in printed


def test_a_plot_is_drawn(path: Path) -> None:
    assert run(path, "--plot", path.with_suffix(".svg")) == 0
    assert path.with_suffix(".svg").read_text(encoding="utf-8").lstrip().startswith("<?xml")
    assert run(path, "--plot", path.with_suffix(".PNG")) == 0
    assert path.with_suffix(".PNG").read_bytes().startswith(b"\x89PNG")


def test_curves_that_have_no_axis_are_one_clear_line(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = path.with_name("r.json")
    assert run(path, "--report", report) == 0
    theirs = json.loads(report.read_text(encoding="utf-8"))
    for place, point in enumerate(theirs["curve"]):
        point["time_s"] = 1.7e308 * (-1) ** place
    report.with_name("theirs.json").write_text(json.dumps(theirs), encoding="utf-8")
    report.unlink()
    words = ("--against", report.with_name("theirs.json"), "--plot", path.with_suffix(".png"), "--report", report)
    assert run(path, *words) == cli.EXIT_USER_ERROR
    assert "error: The curves cannot be drawn: " in capsys.readouterr().err
    assert report.is_file()
    assert not path.with_suffix(".png").exists()


def test_names_in_brackets_are_names(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = path.rename(path.with_name("[red]h:smile:$x$.toml"))
    report = path.with_name("e[") / "x]:smile:.json"
    report.parent.mkdir()
    assert run(odd, "--report", report, "--plot", path.with_name("p.svg")) == 0
    printed = capsys.readouterr().out
    assert "[red]h:smile:$x$: " in printed
    assert f"report: {report}\n" in printed
    theirs = json.loads(report.read_text(encoding="utf-8")) | {"title": "[/red]"}
    report.write_text(json.dumps(theirs), encoding="utf-8")
    assert run(odd, "--against", report, "--plot", path.with_name("p.svg")) == 0
    assert "[red]h:smile:$x$ against [/red]" in capsys.readouterr().out


def test_the_bar_shows_such_a_name_too(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert run(path.rename(path.with_name("[red]h.toml"))) == 0
    assert "[red]h.toml" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--set", "outer.recipe=swarn"], "outer.recipe: unknown recipe 'swarn'; did you mean swarm?"),
        (["--set", "outer.inner_step=3"], "outer.inner_step: unknown field; did you mean outer.inner_steps?"),
        (["--set", "outer.recipe=gasloc"], "outer.exchanges_per_step: 1, and recipe gasloc plans its exchanges"),
        (["--set", "codec.name=topk"], "codec.name: "),
        (["--set", "outer.partners=4"], "outer.partners: 4, and recipe swarm has one partner at a time; set it to 1"),
        (["--set", "learner.learning_rate=3"], "learner.learning_rate: 3.0 diverges"),
        (["--set", "peers.away.count=1"], "there is no away; there are home, [0] to [0]"),
        (["--set", "outer"], "'outer' is not of the form KEY=VALUE"),
        (["--plot", "x.doc"], "Unsupported image format: x.doc"),
        (["--device", "gpu"], "There is no device 'gpu'"),
        (["--set", "run.seed=1", "--set", ".=3"], "'.=3' is not of the form KEY=VALUE"),
        (["--set", "peers[²].count=1"], "there is no [²]; there are home, [0] to [0]"),
        (["--set", "run.seed=" + 5000 * "9"], "run.seed: input should be a valid integer"),
        (["--report", ""], ". is not a regular file."),
    ],
)
def test_bad_input_is_one_clear_line(
    path: Path, words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(path, *words) == cli.EXIT_USER_ERROR
    told = capsys.readouterr().err
    assert line in told
    assert "Traceback" not in told
    assert len(told) < 1000


def test_reports_of_other_versions_and_other_files_are_refused(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = path.with_name("old.json")
    old.write_text('{"version": 0}', encoding="utf-8")
    assert run(path, "--against", old) == cli.EXIT_USER_ERROR
    assert "is not a report: it does not have version 1, which this p2ptrain reads" in capsys.readouterr().err
    assert run(path, "--against", path) == cli.EXIT_USER_ERROR
    assert "is not a report" in capsys.readouterr().err
    assert run(path.with_name("missing.toml")) == cli.EXIT_USER_ERROR
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{}", "[]", "1", '"text"', '{"version": "1"}'])
def test_a_report_without_a_version_is_none(path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    old = path.with_name("old.json")
    old.write_text(text, encoding="utf-8")
    assert run(path, "--against", old) == cli.EXIT_USER_ERROR
    told = capsys.readouterr().err
    assert told.startswith(f"error: {old} is not a report: it does not have version 1, which this p2ptrain reads.\n")


def test_a_report_that_comes_through_a_pipe_is_read_once(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"[]")
    os.close(writer)
    assert run(path, "--against", f"/dev/fd/{reader}") == cli.EXIT_USER_ERROR
    os.close(reader)
    assert "is not a report: it does not have version 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("", "folder.png cannot be read: Is a directory."),
        ("--against", "folder.png is not a report: Is a directory"),
        ("--report", "folder.png is not a regular file."),
        ("--plot", "folder.png is not a regular file."),
    ],
)
def test_folders_are_one_clear_line(path: Path, option: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = path.with_name("folder.png")
    folder.mkdir()
    assert run(*([path, option] if option else []), folder) == cli.EXIT_USER_ERROR
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert line in told
    assert len(told.splitlines()) == 2


@pytest.mark.parametrize("option", ["", "--against", "--report", "--plot"])
def test_files_that_may_not_be_read_are_not_clicks_affair(
    path: Path, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    locked = path.with_name("r.svg")
    locked.write_text("", encoding="utf-8")
    monkeypatch.setattr("os.access", lambda *_, **__: False)
    run(*([path, option] if option else []), locked)
    assert "Usage" not in capsys.readouterr().err


def test_drawing_without_matplotlib_is_told_before_anything_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(path, "--plot", "x.png") == cli.EXIT_USER_ERROR
    assert "with its extra plot" in capsys.readouterr().err


def test_what_python_cannot_read_is_one_clear_line(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text(SCENARIO.replace("outer_steps = 6", f"outer_steps = {5000 * '6'}"), encoding="utf-8")
    assert run(path, "--set", "run.seed=1") == cli.EXIT_USER_ERROR
    assert f"error: {path} is not valid TOML: " in capsys.readouterr().err
    path.write_text(SCENARIO, encoding="utf-8-sig")
    assert run(path) == 0


def test_broken_reports_are_refused(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = path.with_name("old.json")
    old.write_text(100_000 * "[" + 100_000 * "]", encoding="utf-8")
    assert run(path, "--against", old) == cli.EXIT_USER_ERROR
    assert "is not a report: " in capsys.readouterr().err
    old.unlink()
    assert run(path, "--report", old) == 0
    old.write_text(json.dumps({**json.loads(old.read_text(encoding="utf-8")), "curve": []}), encoding="utf-8")
    assert run(path, "--against", old) == cli.EXIT_USER_ERROR
    assert "is not a report: curve: " in capsys.readouterr().err
