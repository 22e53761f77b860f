"""Figures for TensorBoard: what is written, and that a disk which fails or hangs costs nothing but points."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from p2ptrain.base.errors import UserError
from p2ptrain.base.ids import PeerId
from p2ptrain.base.telemetry import MemoryLog
from peer.cli import peer
from peer.state import Sources, StatusView
from peer.trackers import MOST_QUEUED, Tracker, folder_of, open_tensorboard, peer_name, tracker_name

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
PATIENCE_S = 20.0


class Recording:
    """A writer that records figures, in memory."""

    def __init__(self, fail: Callable[[int], None] = lambda step: None) -> None:
        self.points: list[tuple[str, float, int]] = []
        self.threads: set[str] = set()
        self.is_closed = False
        self._fail = fail

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.threads.add(threading.current_thread().name)
        self._fail(global_step)
        self.points.append((tag, scalar_value, global_step))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


def counting() -> Callable[[], tuple[int, dict[str, float]]]:
    """Return a source of figures whose step grows with each call."""
    step = iter(range(1, 10_000))
    return lambda: (next(step), {"loss": 2.0})


# --- the thread ------------------------------------------------------------------------------------------------------


def test_each_point_is_written_in_order_by_another_thread() -> None:
    writer, log = Recording(), MemoryLog()
    with Tracker(lambda: writer, counting(), log) as tracker:
        tracker.record()
        tracker.on_note("held out", {})
        tracker.on_note("exchanged", {})
        tracker.on_note("final loss", {})
    assert writer.points == [("p2ptrain/loss", 2.0, step) for step in (1, 2, 3)]
    assert writer.threads == {"tracker"}
    assert writer.is_closed
    assert log.kinds() == []


def test_a_directory_that_cannot_be_opened_is_noted_once() -> None:
    def fail() -> Recording:
        raise PermissionError("no\nway")

    log = MemoryLog()
    with Tracker(fail, counting(), log) as tracker:
        for _ in range(3):
            tracker.record()
    assert list(log.notes) == [("not tracked", {"why": "PermissionError: no way"})]


def test_a_disk_that_fails_stops_nobody() -> None:
    def fail(step: int) -> None:
        if step == 2:
            raise OSError("disk full")

    writer, log = Recording(fail), MemoryLog()
    with Tracker(lambda: writer, counting(), log) as tracker:
        for _ in range(3):
            tracker.record()
    assert [step for _, _, step in writer.points] == [1]
    assert log.kinds() == ["not tracked"]


def test_a_disk_that_hangs_holds_nobody_up() -> None:
    """Check that points beyond the queue are dropped, and that the end does not wait for the disk."""
    release, is_hanging = threading.Event(), threading.Event()

    def hang(step: int) -> None:
        is_hanging.set()
        assert release.wait(PATIENCE_S)

    writer, log = Recording(hang), MemoryLog()
    try:
        with Tracker(lambda: writer, counting(), log, close_s=0.05) as tracker:
            tracker.record()
            assert is_hanging.wait(PATIENCE_S)
            for _ in range(MOST_QUEUED):
                tracker.record()
            assert log.kinds() == []
            tracker.record()
        assert list(log.notes) == [("not tracked", {"why": "the disk is too slow, or hangs"})]
        assert not writer.is_closed
    finally:
        release.set()


# --- what is written -------------------------------------------------------------------------------------------------


def test_the_figures_are_those_of_the_page() -> None:
    figures = {"step": 3, "progress": 300.0, "fraction": 0.3, "loss": 2.0, "val_loss": 2.5, "tokens": 310}
    state = StatusView(PeerId("me"), "fox", lambda: ("training", ""))
    state.set_sources(Sources(lambda: figures, lambda: (5.0, 6.0), lambda: (100, 200)))
    step, sent = state.momentary()
    assert step == 3
    assert sent == state.document()["figures"] | {"progress": 300.0, "peers": 1.0}
    assert (sent["loss"], sent["held_out"], sent["tokens"]) == (2.0, 2.5, 310.0)


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Tracker(lambda: open_tensorboard(tmp_path), counting(), MemoryLog(), close_s=PATIENCE_S) as tracker:
        for _ in range(3):
            tracker.record()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("p2ptrain/loss")] == [(1, 2.0), (2, 2.0), (3, 2.0)]


# --- the option ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "tensorboard", "tensorboard:", "tensorboard: ", "tensorboard:a\nb", "mlflow:x"])
def test_a_wrong_tracker_is_refused_with_the_right_one(text: str) -> None:
    with pytest.raises(ValueError, match="tensorboard:DIR"):
        tracker_name(text)
    with pytest.raises(UserError) as raised:
        folder_of(text)
    assert raised.value.remedy.startswith("Use tensorboard:DIR.")


def test_a_directory_stays_the_same_at_a_start_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "ada"))
    assert folder_of("tensorboard:runs") == tmp_path / "runs"
    assert folder_of("tensorboard:~/runs") == tmp_path / "ada" / "runs"


def test_none_is_no_tracker() -> None:
    assert folder_of(None) is folder_of("none") is None
    assert tracker_name("none") == "none"


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs the package tensorboard, which is not installed") as raised:
        folder_of("tensorboard:x")
    assert raised.value.remedy.endswith("-m pip install tensorboard")


def test_the_command_refuses_another_tracker_before_it_writes_anything(tmp_path: Path) -> None:
    link = f"p2ptrain://{'a' * 64}@/ip4/127.0.0.1/tcp/1/p2p/{PEER}"
    done = CliRunner().invoke(peer, [link, "--home", str(tmp_path / "home"), "--track", "wandb:x"])
    assert isinstance(done.exception, UserError)
    assert done.exception.remedy == "Use tensorboard:DIR. To see its files in wandb: wandb sync DIR/PEER."
    assert list(tmp_path.iterdir()) == []


def test_a_peer_has_one_name_and_no_directory() -> None:
    assert peer_name("fox/hen", PEER) == "fox-hen-x6nXTN"
