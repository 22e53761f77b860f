"""The sweep removes what hivemind's dead processes left, and nothing of live ones."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from bench.rivals.__main__ import sweep


def test_sockets_of_the_dead_are_removed_and_others_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # socket paths must be short
    dead, alive, other = Path("dead.sock"), Path("alive.sock"), Path("a file")
    other.write_text("of somebody's")
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(dead))
        gone.listen()
    with socket.socket(socket.AF_UNIX) as here:
        here.bind(str(alive))
        here.listen()
        sweep([dead, alive, other, Path("never there")])
        assert (dead.exists(), alive.exists()) == (False, True)
    assert other.exists()
