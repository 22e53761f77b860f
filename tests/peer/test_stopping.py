"""A start that fails, with Ctrl+C during the clean-up: the error is reported all the same."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2ptrain.base.errors import HomeError
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.host.loop import Signals
from p2ptrain.manifest import SignedManifest
from peer import app
from peer.app import run_peer
from peer.assembly import PeerOptions
from peer.home import Home
from peer.owner.control import OwnerControl
from peer.stopping import DOUBLED_S, JoiningStopped, Stopping


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
        stopping.handling_errors(),
    ):
        raise error
    assert caught.value is error
    assert list(log.notes) == []


def test_an_error_that_was_dealt_with_is_not_how_it_ends() -> None:
    """Check an interrupt within a handled exception: libraries look for a module in an ``except`` clause."""
    with Stopping(Signals(), MemoryLog()) as stopping, stopping.handling_errors():
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
        stopping.handling_errors(),
    ):
        raise HomeError("It is full.", "Free some.")
    assert not isinstance(caught.value, JoiningStopped)


def test_a_signal_amid_a_lock_of_what_it_sets_does_not_hang() -> None:
    """Check a signal while the main thread holds the lock of the event that the handler sets."""
    signals, woken = Signals(), threading.Event()
    with Stopping(signals, MemoryLog()) as stopping:
        stopping.let_finish(woken.set)
        with signals.stop._cond, woken._cond:  # type: ignore[attr-defined]
            signal.raise_signal(signal.SIGTERM)
        assert signals.stop.wait(60.0)
        assert woken.wait(60.0)


def test_two_sigterm_at_one_moment_are_one_and_later_ones_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("peer.stopping.time.monotonic", lambda: now)
    with Stopping(Signals(), MemoryLog()) as stopping:
        stopping.let_finish(lambda: None)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        now += 2 * DOUBLED_S
        with pytest.raises(KeyboardInterrupt) as caught:
            signal.raise_signal(signal.SIGTERM)
    assert not isinstance(caught.value, JoiningStopped)


def test_a_peer_that_could_not_start_says_so(
    tmp_path: Path, signed_run: Callable[..., SignedManifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise HomeError("It is full.", "Free some.")

    closes = OwnerControl.__exit__

    def interrupted(*arguments: object) -> None:
        signal.raise_signal(signal.SIGINT)
        closes(*arguments)  # type: ignore[arg-type]

    home = Home(tmp_path / "home")
    home.path.mkdir()
    home.save_manifest(signed_run())
    monkeypatch.setattr(app, "build", fail)
    monkeypatch.setattr(OwnerControl, "__exit__", interrupted)
    with pytest.raises(HomeError, match="It is full"):
        run_peer(PeerOptions(None, home.path))
