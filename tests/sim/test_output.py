"""``p2ptrain simulate`` with a standard output that accepts no more data: one line, and complete files."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from pathlib import Path

import pytest
from commanding import SCENARIO, run

from p2ptrain import cli
from p2ptrain.base.errors import OutputError
from p2ptrain.page.listen_address import ListenAddress
from sim import scenario_file
from sim.serving import simulate_and_show


class Gone(io.StringIO):
    """A stream on which writing fails."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._error = OSError(number, os.strerror(number))

    def write(self, text: str) -> int:
        raise self._error


class Terminal(Gone):
    """A terminal that is closed once the progress bar is shown."""

    def __init__(self) -> None:
        super().__init__(errno.EIO)
        self.taken: list[str] = []

    def write(self, text: str) -> int:
        if any("swarm" in each for each in self.taken):
            return super().write(text)
        self.taken.append(text)
        return len(text)

    def isatty(self) -> bool:
        return True


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "swarm.toml"
    file.write_text(SCENARIO, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("number", "status"), [(errno.ENOSPC, cli.EXIT_USER_ERROR), (errno.EPIPE, cli.EXIT_CLOSED_PIPE)]
)
def test_report_and_plot_are_saved_still(
    path: Path, number: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", Gone(number))
    report, plot = path.with_name("r.json"), path.with_name("p.svg")
    assert run(path, "--report", report, "--plot", plot) == status
    told = capsys.readouterr().err
    if number == errno.EPIPE:
        assert told == ""
    else:
        assert told.startswith(f"error: The output cannot be written: {os.strerror(number)}.\n")
        assert len(told.splitlines()) == 2
    assert json.loads(report.read_bytes())["title"] == "swarm"
    assert plot.read_bytes().startswith(b"<?xml")


def test_a_terminal_that_goes_away_costs_no_report(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal, report = Terminal(), path.with_name("r.json")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert run(path, "--report", report) == cli.EXIT_USER_ERROR
    assert terminal.taken, "the bar was there"
    assert f"The output cannot be written: {os.strerror(errno.EIO)}." in capsys.readouterr().err
    assert json.loads(report.read_bytes())["title"] == "swarm"


def test_a_reader_who_goes_after_the_pages_address_costs_no_report(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def say(text: str) -> None:
        if "ended" in text:
            raise OutputError("The output cannot be written: Broken pipe.", "")

    monkeypatch.setattr("sim.serving.until_interrupted", lambda: None)
    report = simulate_and_show(
        scenario_file.load(path),
        ListenAddress.parse("0"),
        title="",
        device="cpu",
        say=say,
        progress=lambda share: None,
    )
    assert report.overall.peers == 4
