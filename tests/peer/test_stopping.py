"""A start that fails, and a Ctrl+C that falls into what is cleaned up after it: the error is told all the same."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2ptrain.errors import HomeError
from p2ptrain.manifest import SignedManifest
from p2ptrain.telemetry import MemoryLog
from p2ptrain.train.loop import Signals
from peer import app
from peer.app import run_peer
from peer.building import Options
from peer.home import Home
from peer.owner.hand import Hand
from peer.stopping import JoiningStopped, Stopping


@contextlib.contextmanager
def interrupted_clean_up(times: int = 1) -> Iterator[None]:
    try:
        yield
    finally:
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("error", [HomeError("It is full.", "Free some."), ZeroDivisionError()])
def test_the_error_is_how_it_ends(error: Exception) -> None:
    signals, log = Signals(), MemoryLog()
    with (
        pytest.raises(type(error)) as caught,
        Stopping(signals, log) as stopping,
        interrupted_clean_up(),
        stopping.minding_errors(),
    ):
        raise error
    assert caught.value is error
    assert list(log.notes) == []


def test_an_error_that_was_dealt_with_is_not_how_it_ends() -> None:
    """Libraries look for something in one place and then, within an ``except``, in another."""
    with Stopping(Signals(), MemoryLog()) as stopping, stopping.minding_errors():
        try:
            raise ImportError
        except ImportError:
            signal.raise_signal(signal.SIGINT)
        pytest.fail("joining goes on")


def test_a_second_ctrl_c_ends_the_clean_up_at_once() -> None:
    with (
        pytest.raises(KeyboardInterrupt) as caught,
        Stopping(Signals(), MemoryLog()) as stopping,
        interrupted_clean_up(times=2),
        stopping.minding_errors(),
    ):
        raise HomeError("It is full.", "Free some.")
    assert not isinstance(caught.value, JoiningStopped)


def test_a_peer_that_could_not_start_says_so(
    tmp_path: Path, signed_run: Callable[..., SignedManifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise HomeError("It is full.", "Free some.")

    closes = Hand.__exit__

    def interrupted(*arguments: object) -> None:
        signal.raise_signal(signal.SIGINT)
        closes(*arguments)  # type: ignore[arg-type]

    home = Home(tmp_path / "home")
    home.path.mkdir()
    home.save_manifest(signed_run())
    monkeypatch.setattr(app, "build", fail)
    monkeypatch.setattr(Hand, "__exit__", interrupted)
    with pytest.raises(HomeError, match="It is full"):
        run_peer(Options(None, home.path))
