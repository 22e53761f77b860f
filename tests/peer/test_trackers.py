"""Trackers: what they get, and that one which fails, hangs or is missing costs nothing but its own points."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from p2ptrain.base.errors import UserError
from p2ptrain.base.ids import PeerId
from p2ptrain.base.telemetry import MemoryLog
from peer.cli import peer
from peer.state import Sources, StatusView
from peer.trackers import KINDS, MOST_QUEUED, TrackedRun, Tracker, TrackerTarget, target_of, tracker_name

TRACKED = TrackedRun("ab" * 32, "demo", "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN", "fox/hen")
PATIENCE_S = 20.0


class Recording:
    """A writer that records points, in memory."""

    def __init__(self, fail: Callable[[int], None] = lambda step: None) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.threads: set[str] = set()
        self.is_closed = False
        self._fail = fail

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self.threads.add(threading.current_thread().name)
        self._fail(step)
        self.points.append((step, dict(figures)))

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
    assert [step for step, _ in writer.points] == [1, 2, 3]
    assert writer.threads == {"tracker"}
    assert writer.is_closed
    assert log.kinds() == []


def test_a_tracker_that_cannot_open_is_noted_once_and_its_points_are_counted() -> None:
    def fail() -> Recording:
        raise SystemExit("no\nserver")  # as some libraries do

    log = MemoryLog()
    with Tracker(fail, counting(), log) as tracker:
        for _ in range(3):
            tracker.record()
    assert list(log.notes) == [("not tracked", {"why": "SystemExit: no server"}), ("points dropped", {"dropped": 3})]


def test_points_after_a_failed_one_are_written() -> None:
    def fail(step: int) -> None:
        if step == 2:
            raise OSError("disk full")

    writer, log = Recording(fail), MemoryLog()
    with Tracker(lambda: writer, counting(), log) as tracker:
        for _ in range(3):
            tracker.record()
    assert [step for step, _ in writer.points] == [1, 3]
    assert log.kinds() == ["not tracked", "points dropped"]


def test_a_tracker_that_hangs_holds_nobody_up() -> None:
    """Check that points beyond the queue are dropped and counted, and that the end does not wait for the tracker."""
    release, is_hanging = threading.Event(), threading.Event()

    def hang(step: int) -> None:
        is_hanging.set()
        assert release.wait(PATIENCE_S)

    log = MemoryLog()
    try:
        with Tracker(lambda: Recording(hang), counting(), log, close_s=0.05) as tracker:
            tracker.record()
            assert is_hanging.wait(PATIENCE_S)
            for _ in range(MOST_QUEUED + 3):
                tracker.record()
            assert tracker.dropped == 3
        assert log.notes[-1] == ("points dropped", {"dropped": MOST_QUEUED + 3})
        assert log.kinds().count("not tracked") == 1
    finally:
        release.set()


# --- what is sent ----------------------------------------------------------------------------------------------------


def test_the_figures_are_those_of_the_page() -> None:
    figures = {"step": 3, "progress": 300.0, "fraction": 0.3, "loss": 2.0, "val_loss": 2.5, "tokens": 310}
    state = StatusView(PeerId("me"), "fox", lambda: ("training", ""))
    state.set_sources(Sources(lambda: figures, lambda: (5.0, 6.0), lambda: (100, 200)))
    step, sent = state.momentary()
    assert step == 3
    assert sent == state.document()["figures"] | {"progress": 300.0, "peers": 1.0}
    assert (sent["loss"], sent["held_out"], sent["tokens"]) == (2.0, 2.5, 310.0)


# --- the option ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "tensorboard", "tensorboard:", "mlflow:x", "wandb: ", "wandb:a/b", "wandb:a\nb"])
def test_a_wrong_tracker_is_refused_with_the_right_ones(text: str) -> None:
    with pytest.raises(ValueError, match=r"tracker is|slash"):
        tracker_name(text)
    with pytest.raises(UserError) as raised:
        target_of(text)
    assert raised.value.remedy == "Name one, as tensorboard:DIR, wandb:PROJECT or trackio:PROJECT."


def test_a_directory_stays_the_same_at_a_start_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "ada"))
    assert TrackerTarget.parse("tensorboard:runs").text == f"tensorboard:{tmp_path / 'runs'}"
    assert TrackerTarget.parse("tensorboard:~/runs").text == f"tensorboard:{tmp_path / 'ada' / 'runs'}"
    assert TrackerTarget.parse("wandb:runs").text == "wandb:runs"


def test_none_is_no_tracker() -> None:
    assert target_of(None) is target_of("none") is None
    assert tracker_name("none") == "none"


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_package_is_named_with_the_command(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"needs the package {kind}, which is not installed") as raised:
        target_of(f"{kind}:x")
    assert raised.value.remedy.endswith(f"-m pip install {kind}")


@pytest.mark.parametrize(
    ("has_key", "mode", "is_refused"), [(False, "", True), (True, "", False), (False, "offline", False)]
)
def test_wandb_without_a_key_is_noticed_before_training(
    monkeypatch: pytest.MonkeyPatch, has_key: bool, mode: str, is_refused: bool
) -> None:
    def login(*, prompt: bool, verify: bool) -> bool:
        assert not prompt
        assert not verify
        return has_key

    module = types.ModuleType("wandb")
    module.__dict__["login"] = login
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    if not is_refused:
        assert target_of("wandb:x") == TrackerTarget("wandb", "x")
        return
    with pytest.raises(UserError, match="no API key of wandb") as raised:
        target_of("wandb:x")
    assert "WANDB_MODE=offline" in raised.value.remedy


def test_the_command_finds_a_missing_package_before_it_writes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else find(name, *rest))
    link = f"p2ptrain://{'a' * 64}@/ip4/127.0.0.1/tcp/1/p2p/{TRACKED.peer}"
    done = CliRunner().invoke(peer, [link, "--home", str(tmp_path / "home"), "--track", "wandb:x"])
    assert isinstance(done.exception, UserError)
    assert "needs the package wandb" in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_a_peer_has_one_name_and_no_directory() -> None:
    assert TRACKED.name == "fox-hen-x6nXTN"


# --- the libraries ---------------------------------------------------------------------------------------------------

SEND = """
import json, sys
from p2ptrain.base.telemetry import MemoryLog
from peer.trackers import TrackedRun, Tracker, target_of
target, log = target_of(sys.argv[1]), MemoryLog()
steps = iter([1, 2, 2, 3])
tracked = TrackedRun("ab" * 32, "demo", "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN", "fox")
def figures():
    step = next(steps)
    return step, {"loss": 3.0 - step, "tokens": 100.0 * step}
with Tracker(lambda: target.open(tracked), figures, log, close_s=90.0) as tracker:
    for _ in range(4):
        tracker.record()
print(json.dumps(list(log.notes)))
"""
"""Program that sends four points to a tracker, and prints the notes."""


def sent(target: str, folder: Path, **variables: str) -> None:
    """Send points in a process of its own, because these libraries leave threads and files behind."""
    done = subprocess.run(
        [sys.executable, "-c", SEND, target],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"HOME": str(folder), "OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=120.0,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [], done.stderr


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sent(f"tensorboard:{tmp_path / 'runs'}", tmp_path)
    [folder] = (tmp_path / "runs").iterdir()
    assert folder.name == "fox-x6nXTN"
    found = EventAccumulator(str(folder))
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("p2ptrain/loss")] == [
        *((1, 2.0), (2, 1.0), (2, 1.0), (3, 0.0))
    ]
    assert found.Tags()["scalars"] == ["p2ptrain/loss", "p2ptrain/tokens"]


def test_wandb_keeps_points_offline_without_facts_about_the_computer(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    sent("wandb:swarm", tmp_path, WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    [record] = tmp_path.rglob("*.wandb")
    assert b"tokens" in record.read_bytes()
    assert list(tmp_path.rglob("wandb-metadata.json")) == []


def test_trackio_keeps_points_on_this_computer(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="the extra trackio is not installed")
    sent("trackio:swarm", tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"), HF_HUB_OFFLINE="1")
    [record] = (tmp_path / "trackio").rglob("*.db")
    assert b"tokens" in record.read_bytes()
