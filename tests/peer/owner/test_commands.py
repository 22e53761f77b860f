"""Output of ``p2ptrain status`` for a peer that does not answer."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

from p2ptrain.base.errors import HomeError
from peer.owner import commands, status
from peer.owner import control_socket as doors


def shown(home: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    with pytest.raises(HomeError):
        commands.status.main([str(home), *options], standalone_mode=False)
    return capsys.readouterr().out


def test_where_nobody_is_the_peer_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(tmp_path, capsys) == "state     not running\n"
    assert json.loads(shown(tmp_path, capsys, "--json"))["state"] == "not running"


def test_a_finished_peer_is_no_fault_and_says_how_to_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = {"val_loss_last": 1.50471, "exchanges_ok": 3, "finished": True, "why": "the swarm agrees"}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "manifest.signed").touch()
    commands.status.main([str(tmp_path)], standalone_mode=False)
    assert capsys.readouterr().out.splitlines() == [
        "state     finished",
        "ended     0 s ago, at the run's end; nothing is left to train",
        "last time held-out loss 1.5047, 3 exchanges; the swarm agrees",
        f"model     to use it with transformers: p2ptrain export {tmp_path} model-of-{tmp_path.name}",
    ]
    commands.status.main([str(tmp_path), "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["state"] == "finished"
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"ended_at": time.time() - 7_200.0}))
    commands.status.main([str(tmp_path)], standalone_mode=False)  # a later session has written the summary again
    assert "ended     2 h ago, at the run's end; nothing is left to train\n" in capsys.readouterr().out
    for order in (commands.pause, commands.resume, commands.finish):
        with pytest.raises(HomeError, match="has finished its run"):
            order.main([str(tmp_path)], standalone_mode=False)


def test_finish_tells_the_loss_and_how_to_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    training: dict[str, Any] = {"step": 0, "loss": None}
    monkeypatch.setattr(commands, "ask", lambda *_, **__: {"told": "finishing", "status": {"training": training}})
    commands.finish.main([str(tmp_path)], standalone_mode=False)
    training |= {"step": 7, "loss": 2.5}
    commands.finish.main([str(tmp_path)], standalone_mode=False)
    assert capsys.readouterr().out.splitlines() == [
        "finishing",
        "finishing",
        f"training loss 2.500; once it has ended, the held-out loss: p2ptrain status {tmp_path}",
        f"to use the model with transformers: p2ptrain export {tmp_path} model-of-{tmp_path.name}",
    ]


def test_a_peer_that_is_frozen_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "ANSWER_DEADLINE_S", 0.05)
    summary = {"val_loss_last": 2.5, "val_loss_last_tokens": 16, "val_loss_of_tokens": 64, "exchanges_ok": 3}
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"why": "well"}))
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(tmp_path / "frozen"))
        frozen.listen()
        (tmp_path / doors.POINTER).write_text(str(tmp_path / "frozen"))
        screen = shown(tmp_path, capsys)
        assert "state     does not answer\n" in screen
        assert "held-out loss 2.5000 (from 16 of 64 tokens), 3 exchanges; well" in screen
        assert json.loads(shown(tmp_path, capsys, "--json"))["state"] == "does not answer"


def test_a_checkpoint_that_goes_meanwhile_is_no_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a checkpoint may disappear while it is read: a peer that saves removes the oldest."""
    state = tmp_path / "checkpoints" / "step-00000007" / "state.json"
    state.parent.mkdir(parents=True)
    read = status._read

    def read_and_gone(path: Path, *names: str) -> object:
        found = read(path, *names)
        state.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(status, "_read", read_and_gone)
    state.write_text('{"step": 7}')
    assert "saved     outer step 7\n" in shown(tmp_path, capsys)
    state.write_text('{"step": 7}')
    assert json.loads(shown(tmp_path, capsys, "--json"))["saved_s_ago"] is None


def test_a_peer_of_another_user_is_not_called_dead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(home: Path) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(home))

    monkeypatch.setattr(doors, "_where", closed)
    assert "does not answer" in shown(tmp_path, capsys)
