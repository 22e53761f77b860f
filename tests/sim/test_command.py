"""``p2ptrain simulate`` as a person meets it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from p2ptrain import cli
from p2ptrain.sim.command import simulate

SCENARIO = """
[run]
outer_steps = 6

[learner]
kind = "quadratic"
parameters = 512

[outer]
recipe = "swarm"
inner_steps = 5
learning_rate = 0.7
momentum = 0.5
nesterov = true
topology = "random"
partners = 1
weights = "equal"
exchanges_per_step = 1
fragments = 1
fragments_per_exchange = 1

[codec]
name = "int8"
block_size = 1024
gradients = "topk"
rank = 16

[[peers]]
name = "home"
count = 4
step_s = 1.0
step_jitter = 0.1
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "swarm.toml"
    file.write_text(SCENARIO, encoding="utf-8")
    return file


def run(*words: object) -> int:
    """The exit status, through the program's own error boundary."""
    with pytest.raises(SystemExit) as ended:
        cli.run_command(simulate, [str(word) for word in words])
    return int(ended.value.code or 0)


def test_it_prints_what_became_of_the_swarm_and_writes_a_report(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = path.with_name("report.json")
    assert run(path, "--report", report) == 0
    printed = capsys.readouterr().out
    assert "exchanges made" in printed
    assert "left out:" in printed
    written = json.loads(report.read_text(encoding="utf-8"))
    assert written["overall"]["peers"] == 4
    assert written["overall"]["exchanges"] >= 12
    assert not path.with_name("report.json.part").exists()


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


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--set", "outer.recipe=swarn"], "outer.recipe: no recipe is called 'swarn'; did you mean swarm?"),
        (["--set", "outer.inner_step=3"], "outer.inner_step: unknown field; did you mean outer.inner_steps?"),
        (["--set", "outer.recipe=gasloc"], "outer.exchanges_per_step: 1, and recipe gasloc plans its exchanges"),
        (["--set", "codec.name=topk"], "codec.name: "),
        (["--set", "outer.partners=4"], "outer.partners: 4, and there are only 3 others to meet at once"),
        (["--set", "learner.learning_rate=3"], "learner.learning_rate: 3.0 diverges"),
        (["--set", "peers.away.count=1"], "there is no away; there are home, [0] to [0]"),
        (["--set", "outer"], "'outer' is no change"),
        (["--plot", "x.doc"], "x.doc has no name of a picture"),
        (["--device", "gpu"], "there is no device 'gpu'"),
    ],
)
def test_bad_input_is_one_clear_line(
    path: Path, words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(path, *words) == cli.EXIT_USER_ERROR
    told = capsys.readouterr().err
    assert line in told
    assert "Traceback" not in told


def test_reports_of_other_versions_and_other_files_are_refused(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = path.with_name("old.json")
    old.write_text('{"version": 0}', encoding="utf-8")
    assert run(path, "--against", old) == cli.EXIT_USER_ERROR
    assert "is a report of version 0, and this p2ptrain reads version" in capsys.readouterr().err
    assert run(path, "--against", path) == cli.EXIT_USER_ERROR
    assert "is no report" in capsys.readouterr().err
    assert run(path.with_name("missing.toml")) == cli.EXIT_USER_ERROR
    assert "cannot be read" in capsys.readouterr().err


def test_drawing_without_matplotlib_is_told_before_anything_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(path, "--plot", "x.png") == cli.EXIT_USER_ERROR
    assert "pip install 'p2ptrain[plot]'" in capsys.readouterr().err
