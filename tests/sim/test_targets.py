"""Output files of ``p2ptrain simulate`` that must not be replaced, checked before the simulation."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from commanding import SCENARIO, run

from p2ptrain import cli
from p2ptrain.base import files
from sim import simulate as door


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "swarm.toml"
    file.write_text(SCENARIO, encoding="utf-8")
    return file


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Check that a command is refused before the simulation, with this line, and leaves no file."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it was simulated")

    def refused(line: str, path: Path, *words: object) -> None:
        before = {each: each.lstat().st_ino for each in path.parent.rglob("*")}
        with monkeypatch.context() as patched:
            patched.setattr(door, "simulate", never)
            assert run(path, *words) == cli.EXIT_USER_ERROR
        assert line in capsys.readouterr().err
        assert {each: each.lstat().st_ino for each in path.parent.rglob("*")} == before
        assert path.read_text(encoding="utf-8") == SCENARIO

    return refused


def test_the_scenario_is_not_replaced(path: Path, refused: Any) -> None:
    refused("is the scenario; --report would replace it.", path, "--report", path)
    refused("is the scenario; --report would replace it.", path, "--report", path.parent / "." / path.name)
    link = path.with_name("link.json")
    link.symlink_to(path)
    refused("is the scenario; --report would replace it.", path, "--report", link)


def test_report_and_plot_do_not_replace_each_other(path: Path, refused: Any) -> None:
    picture, link = path.with_name("p.svg"), path.with_name("link.json")
    refused("p.svg is the report; --plot would replace it.", path, "--report", picture, "--plot", picture)
    link.symlink_to(picture)
    refused("p.svg is the report; --plot would replace it.", path, "--report", link, "--plot", picture)
    link.unlink()
    assert run(path, "--report", picture) == 0
    refused(
        "is the report that --against reads; --plot would replace it.", path, "--against", picture, "--plot", picture
    )


def test_an_earlier_report_is_compared_with_and_then_replaced(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = path.with_name("r.json")
    assert run(path, "--report", report) == 0
    capsys.readouterr()
    assert run(path, "--set", "run.seed=7", "--report", report, "--against", report) == 0
    assert "run.seed: 0 -> 7" in capsys.readouterr().out
    assert json.loads(report.read_bytes())["scenario"]["run"]["seed"] == 7


def test_existing_files_are_replaced(path: Path) -> None:
    report, plot = path.with_name("r.json"), path.with_name("p.svg")
    report.write_text("mine", encoding="utf-8")
    plot.touch()
    assert run(path, "--report", report, "--plot", plot) == 0
    assert json.loads(report.read_bytes())["title"] == "swarm"
    assert b"matplotlib" in plot.read_bytes()


def test_devices_and_pipes_are_refused(path: Path, refused: Any) -> None:
    refused("/dev/null is not a regular file.", path, "--report", "/dev/null")
    os.mkfifo(path.with_name("pipe.svg"))
    refused("pipe.svg is not a regular file.", path, "--plot", path.with_name("pipe.svg"))


def test_symlinks_are_followed(path: Path) -> None:
    links = path.with_name("r.json"), path.with_name("p.svg")
    (path.parent / "there").mkdir()
    for link in links:
        link.symlink_to(Path("there") / link.stem)
    assert run(path, "--report", links[0], "--plot", links[1]) == 0
    assert all(link.is_symlink() for link in links)
    assert sorted(each.name for each in (path.parent / "there").iterdir()) == ["p", "r"]
    assert json.loads(links[0].read_bytes())["title"] == "swarm"


def test_what_cannot_be_written_is_told_first(path: Path, refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(
        "absent/r.json cannot be written: No such file or directory.",
        path,
        "--report",
        path.parent / "absent" / "r.json",
    )
    for length in (250, 253, 255, 256, 5000):
        refused("cannot be written: File name too long.", path, "--report", path.with_name(length * "r"))
    if Path("/proc").is_dir():
        refused("/proc/r.json cannot be written: ", path, "--report", "/proc/r.json")
        refused("/proc/p.svg cannot be written: ", path, "--plot", "/proc/p.svg")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write_new", full)
    refused("r.json cannot be written: No space left on device.", path, "--report", path.with_name("r.json"))


def test_results_are_printed_though_the_disk_fills_meanwhile(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fills(target: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "replace", fills)
    report = path.with_name("r.json")
    assert run(path, "--report", report) == cli.EXIT_USER_ERROR
    printed = capsys.readouterr()
    assert "exchanges made" in printed.out
    assert f"{report} cannot be written: No space left on device." in printed.err
