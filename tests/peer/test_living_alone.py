"""A peer's life in this process, by recipe ``local``: the end, resuming, the summary, stopping in the middle."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from p2ptrain import checkpoint
from p2ptrain.errors import HomeError
from p2ptrain.manifest import SignedManifest
from p2ptrain.telemetry import MemoryLog
from p2ptrain.train.loop import Signals
from peer import model
from peer.app import run_peer
from peer.building import Options
from peer.home import Home
from peer.stopping import JoiningStopped, Stopping

SignedRun = Callable[..., SignedManifest]


@pytest.fixture
def home(tmp_path: Path, signed_run: SignedRun) -> Home:
    (tmp_path / "home").mkdir()
    home = Home(tmp_path / "home")
    home.save_manifest(signed_run())
    return home


def notes(home: Home, kind: str) -> list[dict[str, Any]]:
    return [note for line in home.events.read_text().splitlines() if (note := json.loads(line))["kind"] == kind]


def stop_at_inner_step(monkeypatch: pytest.MonkeyPatch, number: int, times: int = 1) -> None:
    """Press Ctrl+C (so many times) after the inner step with this number."""
    from p2ptrain.train import LanguageModelTask

    taken = 0
    step = LanguageModelTask.inner_step

    def watched(self: LanguageModelTask, progress: float) -> Any:
        nonlocal taken
        taken += 1
        if taken == number:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return step(self, progress)

    monkeypatch.setattr(LanguageModelTask, "inner_step", watched)


def test_a_run_to_its_end(home: Home) -> None:
    run_peer(Options(None, home.path))
    summary = json.loads(home.summary.read_text())
    assert summary["finished"]
    assert summary["outer_steps"] == 5
    assert summary["tokens"] == 6_400
    assert summary["val_loss_last"] < summary["val_loss_first"]
    assert len(notes(home, "first inner step")) == 1


def test_an_ended_run_is_not_trained_further(home: Home) -> None:
    run_peer(Options(None, home.path))
    before = checkpoint.load_latest(home.checkpoints).checkpoint
    run_peer(Options(None, home.path))
    after = checkpoint.load_latest(home.checkpoints).checkpoint
    assert before is not None
    assert after is not None
    assert torch.equal(before.tensors["slow"], after.tensors["slow"])


def test_stopped_in_the_middle_and_resumed_equals_never_stopped(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_at_inner_step(patch, 13)
        run_peer(Options(None, home.path))
    assert [note["signal"] for note in notes(home, "stopping")] == ["SIGINT"]
    summary = json.loads(home.summary.read_text())
    assert (summary["tokens"], summary["finished"]) == (13 * 256, False)

    twin = Home(tmp_path / "twin")
    twin.path.mkdir()
    for name in ("identity.key", "manifest.signed"):
        (twin.path / name).write_bytes((home.path / name).read_bytes())
    run_peer(Options(None, home.path))
    run_peer(Options(None, twin.path))
    assert notes(home, "resumed")[0]["step"] == 2
    resumed, straight = (checkpoint.load_latest(each.checkpoints).checkpoint for each in (home, twin))
    assert resumed is not None
    assert straight is not None
    assert torch.equal(resumed.tensors["slow"], straight.tensors["slow"])
    assert resumed.state["val_loss_first"] == straight.state["val_loss_first"]


def test_a_second_ctrl_c_ends_at_once(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at_inner_step(monkeypatch, 3, times=2)
    with pytest.raises(KeyboardInterrupt):
        run_peer(Options(None, home.path))
    assert not home.summary.exists()
    with home.locked():  # and the home is free
        pass


def test_the_first_signal_ends_joining_where_it_stands() -> None:
    before = signal.getsignal(signal.SIGTERM)
    signals, log, reached = Signals(), MemoryLog(), False
    with Stopping(signals, log):
        signal.raise_signal(signal.SIGTERM)
        reached = True
    assert not reached
    assert list(log.notes) == [("stopping", {"signal": "SIGTERM", "training": False})]
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_first_signal_lets_the_trainer_finish() -> None:
    signals, log, woken = Signals(), MemoryLog(), []
    with Stopping(signals, log) as stopping:
        stopping.let_finish(lambda: woken.append(True))
        assert not signals.stop.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert signals.stop.is_set()
        assert woken == [True]
        with pytest.raises(KeyboardInterrupt) as caught:
            signal.raise_signal(signal.SIGINT)
        assert not isinstance(caught.value, JoiningStopped)
    assert list(log.notes) == [("stopping", {"signal": "SIGTERM", "training": True})]


def test_a_signal_whose_exception_was_lost_still_ends_joining() -> None:
    signals, reached = Signals(), False
    with Stopping(signals, MemoryLog()) as stopping:
        signals.stop.set()
        stopping.let_finish(lambda: None)
        reached = True
    assert not reached


def test_the_model_of_a_home(home: Home) -> None:
    run_peer(Options(None, home.path))
    found = checkpoint.load_latest(home.checkpoints).checkpoint
    assert found is not None
    loaded, tokenizer, signed = model.load_model(home)
    assert torch.equal(loaded.theta, found.tensors["slow"])
    assert tokenizer.vocabulary_size == 256
    assert signed.manifest.run.name == "demo"


def test_weights_of_another_model(signed_run: SignedRun) -> None:
    with pytest.raises(HomeError, match="holds 5 weights, and the run's model"):
        model.model_of(signed_run(), torch.zeros(5))


def test_mean_of_weights() -> None:
    assert model.mean([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]).tolist() == [2.0, 4.0]
