"""Leftovers of a testnet are counted, and its temporary folder is removed."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from lab import command
from lab.inner_main import MARK, sockets_left


def test_sockets_that_the_next_start_would_not_remove_are_counted(tmp_path: Path) -> None:
    assert sockets_left(tmp_path) == 0
    abandoned = tmp_path / "p2ptrain.abandoned"
    abandoned.mkdir()
    ends = [socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
    ends[0].bind(str(abandoned / "in-0.sock"))
    ends[1].bind(str(tmp_path / "stray.sock"))
    for end in ends:
        end.close()
    assert sockets_left(tmp_path) == 1  # the stray one, which the next start would sweep
    assert not abandoned.exists()


def test_the_temporary_folder_is_removed_and_those_of_killed_testnets_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "FOLDER_PREFIX", "p2pt-lab-test-")
    debris = Path(tempfile.mkdtemp(prefix="p2pt-lab-test-", dir="/tmp"))
    before = {name: os.environ.get(name) for name in (MARK, "TMPDIR")}
    with command._marked_environment("the-mark"):
        place = Path(tempfile.gettempdir())
        assert place.name.startswith("p2pt-lab-test-")
        assert os.environ[MARK] == "the-mark"
        assert not debris.exists()
        with command._marked_environment("another"):  # a second testnet must not touch the folder of the first one
            assert place.exists()
            assert Path(tempfile.gettempdir()) != place
    assert not place.exists()
    assert {name: os.environ.get(name) for name in (MARK, "TMPDIR")} == before
