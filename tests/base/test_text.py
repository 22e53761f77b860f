"""Paths of the command line in sentences and commands."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from p2ptrain.base.text import UserPath, command_line, printable
from p2ptrain.cli import cli


def test_a_sentence_names_a_path_as_a_shell_takes_it() -> None:
    home = UserPath("my runs")
    assert f"{home / 'lock'} is taken" == "'my runs/lock' is taken"
    assert printable(home) == "'my runs'"
    assert f"{UserPath('out/run-1')}" == "out/run-1"
    assert f"{UserPath('red' + chr(27))}" == "'red\N{REPLACEMENT CHARACTER}'"
    assert (str(home), os.fspath(home), home) == ("my runs", "my runs", Path("my runs"))


@pytest.mark.parametrize("name", ["my run?", "it's", "-x", "a b"])
def test_a_command_can_be_pasted_whatever_the_folders_name(name: str) -> None:
    *_, word = shlex.split(command_line("p2ptrain", "sign", UserPath(name)))
    assert not word.startswith("-")
    assert Path(word) == Path(name)


def test_a_command_says_the_path_that_it_was_given_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (["sign", "my runs"], ["status", "my runs"], ["peer", "--home", "my runs"]):
        error = CliRunner().invoke(cli, arguments).exception
        assert "'my runs" in getattr(error, "problem", str(error)), arguments
