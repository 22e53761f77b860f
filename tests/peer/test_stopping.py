"""Signals that stop a peer: before training, while it trains, and during the clean-up after an error."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from p2ptrain.base.errors import HomeError
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.host.loop import Signals
from p2ptrain.manifest import SignedManifest
from peer import app
from peer.app import run
from peer.home import Home
from peer.owner.control import OwnerControl
from peer.start_options import PeerOptions
from peer.stopping import DOUBLED_S, Stopping

LONG_S = 60.0


def in_loop(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


async def press(*numbers: int) -> None:
    """Send signals to this process, and let the loop handle each."""
    for number in numbers:
        signal.raise_signal(number)
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def interrupted_clean_up(times: int = 1) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await press(*[signal.SIGINT] * times)


@pytest.mark.parametrize("error", [HomeError("It is full.", "Free some."), ZeroDivisionError()])
def test_the_error_is_how_it_ends(error: Exception) -> None:
    log = MemoryLog()

    async def peer() -> None:
        with Stopping(Signals(), log) as stopping:
            async with interrupted_clean_up():
                with stopping.handling_errors():
                    raise error

    with pytest.raises(type(error)) as caught:
        in_loop(peer())
    assert caught.value is error
    assert list(log.notes) == []


def test_a_second_ctrl_c_ends_the_clean_up_at_once() -> None:
    async def peer() -> None:
        with Stopping(Signals(), MemoryLog()) as stopping:
            async with interrupted_clean_up(times=2):
                with stopping.handling_errors():
                    raise HomeError("It is full.", "Free some.")

    with pytest.raises(KeyboardInterrupt):
        in_loop(peer())


def test_the_first_signal_ends_joining_where_it_stands() -> None:
    before = signal.getsignal(signal.SIGTERM)
    log, reached = MemoryLog(), False

    async def peer() -> None:
        nonlocal reached
        with Stopping(Signals(), log):
            await press(signal.SIGTERM)
            reached = True

    in_loop(peer())
    assert not reached
    assert list(log.notes) == [("stopping", {"signal": "SIGTERM", "training": False})]
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_first_signal_lets_the_trainer_finish_and_the_second_ends_it_at_once() -> None:
    signals, log, woken = Signals(), MemoryLog(), list[int]()

    async def peer() -> None:
        with Stopping(signals, log) as stopping:
            stopping.let_finish(lambda: woken.append(1))
            assert not signals.stop.is_set()
            await press(signal.SIGTERM)
            assert signals.stop.is_set()
            assert woken == [1]
            await press(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        in_loop(peer())
    assert list(log.notes) == [("stopping", {"signal": "SIGTERM", "training": True})]


def test_two_sigterm_at_one_moment_are_one_and_later_ones_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("peer.stopping.time.monotonic", lambda: now)
    reached = False

    async def peer() -> None:
        nonlocal now, reached
        with Stopping(Signals(), MemoryLog()) as stopping:
            stopping.let_finish(lambda: None)
            await press(signal.SIGTERM, signal.SIGTERM)
            now += 2 * DOUBLED_S
            reached = True
            await press(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        in_loop(peer())
    assert reached


@pytest.fixture
def hangup() -> Iterator[signal.Signals]:
    """Return SIGHUP with its default action, since these tests may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield signal.SIGHUP
    signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_closes_lets_the_trainer_finish(hangup: signal.Signals) -> None:
    """Check repeated signals: the kernel and the shell may send SIGHUP, and a service manager adds one to its
    SIGTERM."""
    signals, log, reached = Signals(), MemoryLog(), False

    async def peer() -> None:
        nonlocal reached
        with Stopping(signals, log) as stopping:
            stopping.let_finish(lambda: None)
            await press(hangup, hangup, hangup)
            reached = signals.stop.is_set()
            await press(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        in_loop(peer())
    assert reached
    assert list(log.notes) == [("stopping", {"signal": "SIGHUP", "training": True})]
    assert signal.getsignal(hangup) is signal.SIG_DFL


def test_under_nohup_a_terminal_may_close(hangup: signal.Signals) -> None:
    signal.signal(hangup, signal.SIG_IGN)
    signals = Signals()

    async def peer() -> None:
        with Stopping(signals, MemoryLog()) as stopping:
            stopping.let_finish(lambda: None)
            await press(hangup)
            assert not signals.stop.is_set()
            await press(signal.SIGTERM)
            assert signals.stop.is_set()

    in_loop(peer())
    assert signal.getsignal(hangup) is signal.SIG_IGN


def test_a_signal_whose_exception_was_lost_still_ends_joining() -> None:
    reached = False

    async def peer() -> None:
        nonlocal reached
        with Stopping(Signals(), MemoryLog()) as stopping:
            with contextlib.suppress(asyncio.CancelledError):
                await press(signal.SIGTERM)
            stopping.let_finish(lambda: None)
            reached = True

    in_loop(peer())
    assert not reached


@pytest.mark.parametrize("trains", [False, True])
def test_a_background_task_that_fails_stops_the_peer_which_ends_with_its_error(trains: bool) -> None:
    signals = Signals()

    async def fail() -> None:
        raise ZeroDivisionError

    async def peer() -> None:
        with Stopping(signals, MemoryLog()) as stopping:
            left = asyncio.Event()
            if trains:
                stopping.let_finish(left.set)
            stopping.watch(fail())
            await asyncio.wait_for(left.wait(), LONG_S)

    with pytest.raises(ZeroDivisionError):
        in_loop(peer())
    assert signals.stop.is_set()


def test_background_tasks_end_with_the_peer() -> None:
    ended = list[str]()

    async def wait() -> None:
        try:
            await asyncio.sleep(LONG_S)
        finally:
            ended.append("cancelled")

    async def peer() -> None:
        with Stopping(Signals(), MemoryLog()) as stopping:
            stopping.watch(wait())
            await asyncio.sleep(0.01)

    in_loop(peer())
    assert ended == ["cancelled"]


def test_a_peer_that_could_not_start_says_so(
    tmp_path: Path, signed_run: Callable[..., SignedManifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise HomeError("It is full.", "Free some.")

    running = OwnerControl.running

    @contextlib.asynccontextmanager
    async def interrupted(*arguments: Any) -> AsyncIterator[None]:
        async with running(*arguments):
            try:
                yield
            finally:
                await press(signal.SIGINT)

    home = Home(tmp_path / "home")
    home.path.mkdir()
    home.save_manifest(signed_run())
    monkeypatch.setattr(app, "build", fail)
    monkeypatch.setattr(OwnerControl, "running", interrupted)
    with pytest.raises(HomeError, match="It is full"):
        run(PeerOptions(None, home.path))
