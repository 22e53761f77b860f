"""Figures that a session recorder derives from the trainer's measurements."""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2ptrain.base.daemon_thread import DaemonThread, nap
from p2ptrain.base.errors import HomeError
from p2ptrain.base.ids import PeerId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.host.loop import Signals
from p2ptrain.host.tasks import TaskFigures
from p2ptrain.ports import HeldOutLoss
from peer.held_out_reader import HASTE_S, LOOK_MOST_S, HeldOutReader
from peer.messages import line
from peer.saving import LAST_PATIENCE_S, CheckpointSaver
from peer.session_recorder import (
    STEPS_REMEMBERED,
    SessionRecorder,
)
from peer.speed import Throughput
from peer.state import Sources, StatusView
from peer.stopping import Stopping


@pytest.fixture
def record() -> SessionRecorder:
    """Return a recorder whose learner has made no inner step yet, and that saves nothing of its own accord."""
    learner = SimpleNamespace(
        tokens=0, progress=0.0, step=0, loss=2.0, blocked_s=0.0, longest_blocked_s=0.0, inner_step_s=0.0
    )
    learner.progress_displacement, learner.peers = 0.0, 1.0
    learner.is_waiting = learner.is_ahead = learner.ended = False
    learner.changes, learner.at_slow = 0, lambda tell: tell()
    learner.progress_displacement, learner.peers = 0.0, 1.0
    parts: dict[str, Any] = dict.fromkeys(("me", "run", "nickname", "run_tokens"), 1)
    parts["home"] = SimpleNamespace(summary=Path("/nowhere/summary.json"), trained=None, foreign_tokens=lambda: 0)
    parts["checkpoints"] = SimpleNamespace(digest=None)
    corpus = SimpleNamespace(held_out_tokens=64, sequence_length=16)
    task = SimpleNamespace(figures=TaskFigures(parameter_count=5, learning_rate=3e-4))
    log = MemoryLog()
    losses = HeldOutReader(*cast(Any, (learner, task, corpus, log)))
    record = SessionRecorder(
        **cast(Any, {**parts, "learner": learner, "task": task, "notebook": log, "losses": losses})
    )
    record.saver._next = math.inf
    return record


def reads(record: SessionRecorder, loss: Callable[[], float], tokens: int = 64) -> None:
    """Let every evaluation return this loss of so many of 64 held-out tokens."""
    cast(Any, record.task).held_out_loss = lambda *_: HeldOutLoss(loss(), tokens, 64)


def steps(record: SessionRecorder, *seconds: float) -> None:
    for each in seconds:
        cast(Any, record.learner).inner_step_s = each
        record.inner_step_done()


def test_the_longest_stall_is_told_in_median_inner_steps_but_the_first(record: SessionRecorder) -> None:
    steps(record, 9.0, 0.2, 0.1, 0.2, 0.3)
    cast(Any, record.learner).longest_blocked_s = 0.5
    assert record.summary()["longest_stall_inner_steps"] == 2.5


def test_of_one_inner_step_no_stall_is_known(record: SessionRecorder) -> None:
    assert record.summary()["longest_stall_inner_steps"] is None
    steps(record, 9.0)
    assert record.summary()["longest_stall_inner_steps"] is None


def test_training_time_is_of_all_sessions_without_pauses(
    record: SessionRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 5000.0
    monkeypatch.setattr("peer.session_recorder.time.monotonic", lambda: now)
    monkeypatch.setattr(CheckpointSaver, "try_to_save", lambda self: None)
    record.earlier_s = 100.0
    assert record.trained_s == 100.0
    steps(record, 1.0)
    now += 10.0
    record.held(True)
    now += 1000.0
    assert record.trained_s == record.figures()["trained_s"] == record._state()["trained_s"] == 110.0


def test_each_outer_step_is_told(record: SessionRecorder) -> None:
    told: list[int] = []
    record.on_outer_step = lambda: told.append(1)
    record.outer_step_done()
    assert told == [1]


def test_progress_tells_the_learning_rate(record: SessionRecorder) -> None:
    steps(record, 0.1)
    assert dict(cast(MemoryLog, record.notebook).notes)["progress"]["learning_rate"] == 3e-4


def test_speed_is_that_of_the_last_minute_and_in_the_summary_the_mean(
    record: SessionRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("peer.session_recorder.time.monotonic", lambda: now)
    record.throughput = Throughput(lambda: now)
    for seconds in (*[1.0] * 101, *[4.0] * 25):
        now += seconds
        record.learner.tokens += 100
        steps(record, seconds)
    assert record.figures()["tokens_per_s"] == pytest.approx(25.0)
    notes = [note for kind, note in cast(MemoryLog, record.notebook).notes if kind == "progress"]
    assert notes[-1]["tokens_per_s"] == pytest.approx(25.0)
    assert record.remaining_s() == pytest.approx((record.run_tokens - record.learner.progress) / 25)
    assert record.figures()["shortened_s"] is None
    record.learner.peers = 4.0
    assert record.figures()["swarm_tokens_per_s"] == notes[-1]["swarm_tokens_per_s"] * 4 == pytest.approx(100.0)
    assert record.remaining_s() == pytest.approx(record.run_tokens / 100)
    assert record.figures()["shortened_s"] == pytest.approx(record.run_tokens / 75 - record.run_tokens / 100)
    assert record.summary()["tokens_per_s"] == pytest.approx(12_500 / 200)
    assert record.figures()["skipped_steps"] == 0
    cast(Any, record.task).figures = TaskFigures(parameter_count=5, skipped_steps=1)
    assert record.figures()["skipped_steps"] == 1
    monkeypatch.setattr(CheckpointSaver, "try_to_save", lambda self: None)
    record.held(True)
    now += 1000.0
    assert record.figures()["tokens_per_s"] == 0.0
    assert record.remaining_s() is None
    record.held(False)
    assert record.summary()["tokens_per_s"] == pytest.approx(12_500 / 200)
    now += 1.0
    record.learner.tokens += 100
    steps(record, 1.0)
    assert record.figures()["tokens_per_s"] == pytest.approx(100.0)
    record._stop_the_clock()
    assert record.figures()["tokens_per_s"] == 0.0  # the final gossip trains nothing


def test_however_long_a_look_takes_the_next_one_comes(record: SessionRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that one slow look, as during the start of many peers, does not postpone the next by eight minutes."""
    now = 0.0
    monkeypatch.setattr("peer.session_recorder.time.monotonic", lambda: now)

    def slow(*_: object, **__: object) -> HeldOutLoss:
        nonlocal now
        now += 10.0
        return HeldOutLoss(2.0, 16, 64)

    cast(Any, record.task).held_out_loss = slow
    record.losses.look()
    assert record.losses._next_look == now + LOOK_MOST_S


def test_a_look_at_the_held_out_loss_is_what_everybody_is_told(record: SessionRecorder) -> None:
    """Check that ``p2ptrain status``, the page and the bootstrap's view have the same held-out loss at one moment."""
    losses = iter((5.5, 4.5, float("nan")))
    reads(record, lambda: next(losses), tokens=0)
    state = StatusView(PeerId("12D3KooWme"), "fox", lambda: ("training", ""))
    state.set_sources(Sources(record.figures, lambda: (0.0, 0.0), lambda: (0, 0)))
    record.losses.sampler = iter(("", "To be")).__next__
    record.begin()
    assert record.figures()["val_loss"] == state.document()["figures"]["held_out"] == 5.5
    record.losses._next_look = 0.0
    record.losses.look()
    assert record.figures()["val_loss"] == state.document()["figures"]["held_out"] == 4.5
    assert state.report(0)[0]["held_out"] == 4.5
    record.losses._next_look = 0.0
    record.losses.look()
    assert [note["text"] for kind, note in cast(MemoryLog, record.notebook).notes if kind == "sample"] == ["To be"]
    assert record.figures()["val_loss"] is None  # JSON has no NaN
    assert "held_out" not in state.document()["figures"]


def test_no_more_steps_are_remembered_than_a_median_needs(record: SessionRecorder) -> None:
    steps(record, *[1.0] * (3 * STEPS_REMEMBERED))
    assert len(record._inner_steps_s) == STEPS_REMEMBERED


class Disk:
    """A full disk that has space again after a while; only sleep advances the time."""

    def __init__(self, record: SessionRecorder, full_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.full_s, self.slept = 0.0, full_s, 0
        self.kept: list[str] = []
        record.saver.clock, record.saver.sleep = (lambda: self.now), self.sleep
        monkeypatch.setattr(CheckpointSaver, "save", lambda _: self.write("checkpoint"))
        reads(record, lambda: 2.0)
        cast(Any, record).home.save_summary = lambda _: self.write("summary")

    def write(self, what: str) -> int:
        if self.now < self.full_s:
            raise HomeError("the disk is full", "Free some space.")
        self.kept.append(what)
        return 0

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += 1


def told(record: SessionRecorder) -> list[str | None]:
    return [line(kind, fields) for kind, fields in cast(MemoryLog, record.notebook).notes]


def test_the_last_checkpoint_waits_for_a_full_disk(record: SessionRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(record, 25.0, monkeypatch)
    record.end()
    assert disk.kept == ["checkpoint", "summary"]
    assert disk.slept == 3
    assert told(record) == [
        "[save] NOT saved yet, the last checkpoint: the disk is full; retrying every 10.0 s for 5 min. Free some "
        "space. A second Ctrl+C stops at once without saving"
    ]


def test_the_loss_of_what_the_final_gossip_left_is_told(
    record: SessionRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(record, 0.0, monkeypatch)
    reads(record, lambda: 2.5 - len(disk.kept), tokens=16)
    monkeypatch.setattr("peer.session_recorder.checkpoint.save", lambda *_: None)
    record.learner.state_dict = lambda: ({"slow": ()}, {})  # type: ignore[method-assign, assignment, return-value]
    record.learner.ended = True
    record.training_ended()
    record.end()
    part = "(from 16 of 64 tokens)"
    assert told(record) == [
        "[train] reached the run's end; the final gossip begins",
        f"[train] the saved model, which export writes: held-out loss 1.5000 {part}",
    ]
    summary = record.summary()
    assert (summary["val_loss_last"], summary["val_loss_last_tokens"], summary["val_loss_of_tokens"]) == (1.5, 16, 64)


def test_the_last_loss_is_of_all_tokens_and_says_how_far_it_is(
    record: SessionRecorder, checkpoints: FakeCheckpoints
) -> None:
    """Check a slow machine: no time limit, progress every two seconds, and the owner's stop ends the reading."""
    patiences: list[float] = []
    record.losses.clock, now = (lambda: now), 0.0

    def read(most_tokens: int, patience_s: float, goes_on: Callable[[int, int], bool]) -> HeldOutLoss:
        nonlocal now
        patiences.append(patience_s)
        for tokens in range(16, 65, 16):
            now += 1.5
            if not goes_on(tokens, 64):
                break
        return HeldOutLoss(2.0, tokens, 64)

    cast(Any, record.task).held_out_loss = read
    record.learner.ended = True
    record.end()
    reading = "[train] reading the held-out text: {} of 64 tokens"
    assert told(record)[1:] == [
        *map(reading.format, (16, 48)),
        "[train] the saved model, which export writes: held-out loss 2.0000",
    ]
    assert patiences == [math.inf]
    record.end()
    assert len(patiences) == 1  # nothing changed, so it is known
    checkpoints.change()
    record.losses.is_stopping = lambda: now > 8.0
    record.end()
    assert record.summary()["val_loss_last_tokens"] == 32
    checkpoints.change()
    record.end()
    assert patiences == [math.inf, math.inf, HASTE_S]


def test_a_disk_that_stays_full_is_an_error_in_the_end(
    record: SessionRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(record, 1e9, monkeypatch)
    with pytest.raises(HomeError, match="the disk is full"):
        record.end()
    assert disk.now == LAST_PATIENCE_S
    assert disk.kept == []
    assert told(record)[1:] == ["[save] NOT saved, the last checkpoint: the disk is full; given up"]


def test_progress_and_status_say_since_when_nothing_was_saved(
    record: SessionRecorder, checkpoints: FakeCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("peer.session_recorder.time.monotonic", lambda: now)

    def said() -> tuple[Any, Any]:
        cast(Any, record)._next_progress = 0.0
        steps(record, 0.1)
        note = [fields for kind, fields in cast(MemoryLog, record.notebook).notes if kind == "progress"][-1]
        return note.get("unsaved_s"), record.figures()["unsaved_s"]

    record.saver.try_to_save()
    assert said() == (None, None)
    checkpoints.is_full, now = True, 400.0
    record.saver.try_to_save()
    assert said() == (300.0, 300.0)
    checkpoints.is_full = False
    record.saver.try_to_save()
    assert said() == (None, None)


def test_who_presses_ctrl_c_again_need_not_wait_for_the_disk(
    record: SessionRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    Disk(record, 1e9, monkeypatch)
    signals = Signals()

    def press_twice(_: float) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            nap(0.1)
        nap(60.0)

    async def end() -> None:
        with Stopping(signals, MemoryLog()) as stopping, DaemonThread("training") as thread:
            stopping.let_finish(lambda: None)
            await thread.run(record.end)

    record.saver.sleep = press_twice
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(end())
    assert told(record) != []


class FakeCheckpoints:
    """Record of the learner's states that were saved, on a disk that may be full."""

    def __init__(self, record: SessionRecorder, place: Path) -> None:
        self.saved, self.is_full, self.digest = list[int](), False, None
        self._place = place
        self._learner: Any = record.learner
        self._learner.state_dict = lambda: ({}, {"changes": self._learner.changes})
        reads(record, lambda: 2.0)
        cast(Any, record).home.save_summary = lambda _: None
        cast(Any, record).checkpoints = cast(Any, record.saver).checkpoints = self

    def save(self, tensors: dict[str, Any], state: dict[str, Any]) -> Path:
        if self.is_full:
            raise HomeError("the disk is full", "Free some space.")
        self.saved.append(state["changes"])
        return self._place

    def change(self) -> None:
        self._learner.changes += 1


@pytest.fixture
def checkpoints(record: SessionRecorder, tmp_path: Path) -> FakeCheckpoints:
    return FakeCheckpoints(record, tmp_path)


def test_who_leaves_is_saved_before_the_goodbye(record: SessionRecorder, checkpoints: FakeCheckpoints) -> None:
    """Check the order: leaving takes seconds on a dead connection, and the owner may kill the process meanwhile."""
    checkpoints.change()
    record.leaving()
    assert checkpoints.saved == [1]
    record.end()
    assert checkpoints.saved == [1]  # leaving changed nothing, and a large model takes long to write


def test_what_comes_in_amid_the_goodbye_is_saved_after_it(
    record: SessionRecorder, checkpoints: FakeCheckpoints
) -> None:
    record.leaving()
    checkpoints.change()
    record.end()
    assert checkpoints.saved == [0, 1]


def test_who_rested_is_saved_already(record: SessionRecorder, checkpoints: FakeCheckpoints) -> None:
    record.held(True)
    record.leaving()
    record.end()
    assert checkpoints.saved == [0]


def test_who_leaves_amid_an_outer_step_is_saved_after_the_goodbye(
    record: SessionRecorder, checkpoints: FakeCheckpoints
) -> None:
    record.learner.is_waiting = True
    record.leaving()
    assert checkpoints.saved == []
    record.end()
    assert checkpoints.saved == [0]


def test_on_a_full_disk_the_goodbye_does_not_wait_and_the_end_does(
    record: SessionRecorder, checkpoints: FakeCheckpoints
) -> None:
    checkpoints.is_full = True
    record.saver.sleep = lambda _: setattr(checkpoints, "is_full", False)
    record.leaving()
    assert told(record) == ["[save] NOT saved, a checkpoint: the disk is full"]
    record.end()
    assert checkpoints.saved == [0]


def test_who_is_held_amid_an_outer_step_is_saved_once_it_is_over(
    record: SessionRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the save waits for the outer step: partners' contributions are in no checkpoint before its end."""
    saved: list[str] = []

    def save(self: CheckpointSaver) -> int:
        saved.append("a checkpoint")
        return 0

    monkeypatch.setattr(CheckpointSaver, "save", save)
    record.is_watched = lambda: False
    record.learner.is_waiting = True
    record.held(True)
    assert saved == []
    record.learner.is_waiting = False
    record.outer_step_done()
    assert saved == ["a checkpoint"]
    record.outer_step_done()
    assert saved == ["a checkpoint"]  # the next one is due later
    record.held(False)
    record.held(True)
    assert saved == ["a checkpoint"] * 2  # between inner steps: at once
