"""The whole life of a peer in this process, by recipe ``local``: end, resumption, summary, interruption."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from trained_model import load_model

from p2ptrain import checkpoint
from p2ptrain.base.errors import DeviceError, HomeError
from p2ptrain.base.telemetry import EventLog
from p2ptrain.checkpoint import store
from p2ptrain.host import loop
from p2ptrain.host.loop import Signals
from p2ptrain.manifest import SignedManifest
from p2ptrain.net.identity import Identity
from p2ptrain.ports import HeldOutLoss
from p2ptrain.swarm import Counters
from p2ptrain.train import evaluate, inner
from peer import app, exporting, held_out_reader, loading, model, saving, session_recorder
from peer.app import run
from peer.assembly import build
from peer.home import Home
from peer.start_options import PeerOptions

PATIENCE_S = 60.0

SignedRun = Callable[..., SignedManifest]


@pytest.fixture
def home(tmp_path: Path, signed_run: SignedRun) -> Home:
    (tmp_path / "home").mkdir()
    home = Home(tmp_path / "home")
    home.save_manifest(signed_run())
    return home


def notes(home: Home, kind: str) -> list[dict[str, Any]]:
    return [note for line in home.events.read_text().splitlines() if (note := json.loads(line))["kind"] == kind]


def at_inner_step(monkeypatch: pytest.MonkeyPatch, number: int, happens: Callable[[], None]) -> None:
    """Call a function in place of the inner step with this number, or before it."""
    from p2ptrain.train.inner import LanguageModelTask

    taken = 0
    step = LanguageModelTask.inner_step

    def watched(self: LanguageModelTask, progress: float) -> Any:
        nonlocal taken
        taken += 1
        if taken == number:
            happens()
        return step(self, progress)

    monkeypatch.setattr(LanguageModelTask, "inner_step", watched)


def stop_at_inner_step(monkeypatch: pytest.MonkeyPatch, number: int, times: int = 1) -> None:
    """Press Ctrl+C so many times before the inner step with this number, which continues once the signal is noted."""
    made: list[Signals] = []

    def make() -> Signals:
        made.append(Signals())
        return made[-1]

    def press() -> None:
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        assert made[-1].stop.wait(PATIENCE_S)  # the loop sets it

    monkeypatch.setattr(app, "Signals", make)

    at_inner_step(monkeypatch, number, press)


def fail_with(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.fixture
def saves_always(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SAVE_PERIOD_S", "SAVE_SHARE"):
        monkeypatch.setattr(saving, name, 0)
    monkeypatch.setattr(saving, "SAVE_RATE", math.inf)


def test_a_run_to_its_end(home: Home) -> None:
    run(PeerOptions(None, home.path))
    summary = json.loads(home.summary.read_text())
    assert summary["finished"]
    assert summary["outer_steps"] == 5
    assert summary["tokens"] == 6_400
    assert summary["val_loss_last"] < summary["val_loss_first"]
    assert len(notes(home, "first inner step")) == 1


def test_an_ended_run_is_not_trained_further(home: Home) -> None:
    run(PeerOptions(None, home.path))
    before, summary = checkpoint.load_latest(home.checkpoints).checkpoint, json.loads(home.summary.read_text())
    run(PeerOptions(None, home.path, compile="on"))
    assert json.loads(home.summary.read_text()) == summary  # nothing contradicts the session that trained
    assert summary["tokens_per_s"] > 0
    assert summary["ended_at"] == pytest.approx(time.time(), abs=300)
    kinds = [json.loads(each)["kind"] for each in home.events.read_text().splitlines()]
    second = kinds[kinds.index("resumed") :]
    assert not {"compiling", "not compiled", "saved"} & {*second}
    assert [(each["tokens"], each["progress"]) for each in notes(home, "share")] == [(6_400, 6_400.0)] * 2
    after = checkpoint.load_latest(home.checkpoints).checkpoint
    assert before is not None
    assert after is not None
    assert torch.equal(before.tensors["slow"], after.tensors["slow"])
    assert [note.get("ended", False) for note in notes(home, "started")] == [False, True]
    command = f"p2ptrain export {home.path} model-of-home"
    assert [note["command"] for note in notes(home, "to export")] == [command] * 2
    assert not notes(home, "no checkpoint")


def test_a_peer_that_was_killed_before_its_first_checkpoint_says_that_it_begins_anew(home: Home) -> None:
    run(PeerOptions(None, home.path))
    assert not notes(home, "no checkpoint")
    shutil.rmtree(home.checkpoints)
    run(PeerOptions(None, home.path))
    assert [note["seconds"] for note in notes(home, "no checkpoint")] == [saving.SAVE_PERIOD_S]


def test_a_finished_peer_keeps_its_loss_and_export_prints_the_same(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a machine so slow that an evaluation with a time limit reads one batch only."""
    monkeypatch.setattr(evaluate, "batches_to_skip", lambda left, batch_s, spare_s: 0 if spare_s == math.inf else left)
    monkeypatch.setattr(exporting, "_load", loading.answer)
    run(PeerOptions(None, home.path))
    first = json.loads(home.summary.read_text())
    (final,) = notes(home, "final loss")
    assert final["read"] == final["of"] == first["val_loss_last_tokens"] == first["val_loss_of_tokens"]
    exported = exporting.export(home, tmp_path / "out").held_out_loss
    assert exported is not None
    assert exported == HeldOutLoss(first["val_loss_last"], exported.of, exported.of)
    run(PeerOptions(None, home.path))
    again = json.loads(home.summary.read_text())
    assert again["val_loss_last"] == notes(home, "started")[1]["loss"] == first["val_loss_last"]
    assert notes(home, "started")[0]["read"] == again["val_loss_first_tokens"] < exported.of
    summary = json.dumps(again | {"val_loss_last": 0.5, "checkpoint": "of other weights"})
    home.summary.write_text(summary)
    run(PeerOptions(None, home.path))
    assert notes(home, "started")[2]["loss"] != 0.5


def test_stopped_in_the_middle_and_resumed_equals_never_stopped(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine, a limit would cut the first evaluation short, and the loss would differ.
    monkeypatch.setattr(held_out_reader, "BEGINNING_S", math.inf)
    with monkeypatch.context() as patch:
        stop_at_inner_step(patch, 13)
        run(PeerOptions(None, home.path))
    assert [note["signal"] for note in notes(home, "stopping")] == ["SIGINT"]
    assert [note["command"] for note in notes(home, "to resume")] == [f"p2ptrain peer --home {home.path}"]
    summary = json.loads(home.summary.read_text())
    assert (summary["tokens"], summary["finished"]) == (13 * 256, False)
    assert_it_ends_as_if_never_stopped(home, tmp_path)


def test_a_peer_stopped_within_an_inner_phase_tells_the_loss_of_what_export_writes(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_out_reader, "HASTE_S", math.inf)
    monkeypatch.setattr(exporting, "_load", loading.answer)
    with monkeypatch.context() as patch:
        stop_at_inner_step(patch, 14)
        run(PeerOptions(None, home.path))
    saved = checkpoint.load_latest(home.checkpoints).checkpoint
    assert saved is not None
    assert not torch.equal(saved.tensors["slow"], saved.tensors["theta"])  # the fast weights are kept to go on from
    (final,) = notes(home, "final loss")
    exported = exporting.export(home, tmp_path / "out").held_out_loss
    assert exported is not None
    assert (final["loss"], final["read"]) == (exported.value, exported.tokens)


def test_counters_are_of_the_whole_run(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = session_recorder.SessionRecorder.begin

    def counting(self: session_recorder.SessionRecorder) -> None:
        self.counters = lambda: Counters(exchanges_ok=2, solo_steps=1, outer_steps=3)
        begin(self)

    monkeypatch.setattr(session_recorder.SessionRecorder, "begin", counting)
    for session in (1, 2):
        run(PeerOptions(None, home.path))
        summary = json.loads(home.summary.read_text())
        found = [summary[name] for name in ("exchanges_ok", "solo_steps", "outer_steps_in_swarm", "sent_bytes")]
        assert found == [2 * session, session, 3 * session, 0]


def test_untrained_weights_are_not_offered_for_export(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at_inner_step(monkeypatch, 2)
    run(PeerOptions(None, home.path))
    assert len(notes(home, "to resume")) == 1
    assert not notes(home, "to export")


def test_killed_in_an_inner_phase_it_loses_what_it_did_since_the_last_save(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves_always: None
) -> None:
    """Check a loss smaller than an inner phase: a phase may take hours."""
    with monkeypatch.context() as patch:
        at_inner_step(patch, 14, fail_with(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            run(PeerOptions(None, home.path))
    left = checkpoint.load_latest(home.checkpoints).checkpoint
    assert left is not None
    assert (left.state["step"], left.state["inner_step"], left.state["tokens"]) == (2, 3, 13 * 256)
    assert_it_ends_as_if_never_stopped(home, tmp_path)


def assert_it_ends_as_if_never_stopped(home: Home, tmp_path: Path) -> None:
    twin = Home(tmp_path / "twin")
    twin.path.mkdir()
    for name in ("identity.key", "manifest.signed"):
        (twin.path / name).write_bytes((home.path / name).read_bytes())
    run(PeerOptions(None, home.path))
    run(PeerOptions(None, twin.path))
    assert notes(home, "resumed")[0]["step"] == 2
    resumed, straight = (checkpoint.load_latest(each.checkpoints).checkpoint for each in (home, twin))
    assert resumed is not None
    assert straight is not None
    assert torch.equal(resumed.tensors["slow"], straight.tensors["slow"])
    assert resumed.state["val_loss_first"] == straight.state["val_loss_first"]


def test_training_that_fails_is_saved(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    at_inner_step(monkeypatch, 8, fail_with(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        run(PeerOptions(None, home.path))
    left = checkpoint.load_latest(home.checkpoints).checkpoint
    assert left is not None
    assert left.state["tokens"] == 7 * 256


def test_what_failed_it_is_told_even_where_nothing_can_be_saved_any_more(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check an error of CUDA, after which nothing can be read from the device."""
    at_inner_step(monkeypatch, 8, fail_with(ZeroDivisionError()))
    monkeypatch.setattr("p2ptrain.host.state.HostState.state_dict", fail_with(RuntimeError("CUDA error: unspecified")))
    with pytest.raises(ZeroDivisionError):
        run(PeerOptions(None, home.path))
    assert [note["why"] for note in notes(home, "not saved")] == ["RuntimeError: CUDA error: unspecified"]


def test_a_look_that_fails_costs_no_training(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out_reader, "LOOK_PERIOD_S", 0.0)
    monkeypatch.setattr(
        held_out_reader, "LOOK_SHARE", 0
    )  # or one look is all there is, and the text's turn is the second
    monkeypatch.setattr("peer.training.sampler.sample_text", fail_with(IndexError("id 300 of 256")))
    watched = session_recorder.SessionRecorder.begin

    def begin(self: session_recorder.SessionRecorder) -> None:
        self.is_watched = lambda: True
        watched(self)

    monkeypatch.setattr(session_recorder.SessionRecorder, "begin", begin)
    run(PeerOptions(None, home.path))
    assert json.loads(home.summary.read_text())["finished"]
    assert "IndexError: id 300 of 256" in {note["why"] for note in notes(home, "not looked")}


def test_a_held_out_loss_that_is_none_is_not_kept_as_the_first(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(inner, "validation_loss", lambda *_, **__: HeldOutLoss(math.nan, 16, 16))
        run(PeerOptions(None, home.path))
    left = checkpoint.load_latest(home.checkpoints).checkpoint
    assert left is not None
    assert left.state["val_loss_first"] is None
    run(PeerOptions(None, home.path))
    assert math.isfinite(json.loads(home.summary.read_text())["val_loss_first"])


@pytest.mark.timeout(60)
def test_a_peer_that_finishes_before_the_runs_end_reads_only_a_sample_and_ends_at_once(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals = Signals()
    monkeypatch.setattr(loop, "NAP_S", 3600.0)
    monkeypatch.setattr(evaluate, "batches_to_skip", lambda left, batch_s, spare_s: 0 if spare_s == math.inf else left)
    monkeypatch.setattr(app, "Signals", lambda: signals)
    at_inner_step(monkeypatch, 3, signals.last.set)
    run(PeerOptions(None, home.path))
    summary = json.loads(home.summary.read_text())
    assert not summary["finished"]
    assert 0 < summary["val_loss_last_tokens"] < summary["val_loss_of_tokens"]


def test_held_out_losses_are_bounded_in_time_and_most_at_the_owners_stop(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    patiences: list[float] = []

    def measured(*arguments: Any, **_: Any) -> HeldOutLoss:
        patiences.append(arguments[-1])
        return HeldOutLoss(5.0, 16, 64)

    monkeypatch.setattr(inner, "validation_loss", measured)
    stop_at_inner_step(monkeypatch, 3)
    run(PeerOptions(None, home.path))
    assert patiences == [held_out_reader.BEGINNING_S, held_out_reader.HASTE_S]
    run(PeerOptions(None, home.path))
    assert patiences[2:] == [held_out_reader.BEGINNING_S, math.inf], "the text is read once at the end"
    assert json.loads(home.summary.read_text())["val_loss_last"] == 5.0


def test_no_checkpoint_is_made_of_an_outer_step_under_way(
    home: Home, monkeypatch: pytest.MonkeyPatch, saves_always: None
) -> None:
    """Check a trainer that waits for partners: a checkpoint has no room for that state, so it is saved afterwards."""
    signed = home.load_manifest(None)
    assert signed is not None

    async def peer() -> None:
        with contextlib.closing(EventLog(home.events)) as log:
            async with contextlib.AsyncExitStack() as stack:
                options, cpu = PeerOptions(None, home.path), torch.device("cpu")
                identity = Identity.load_or_create(home.identity)
                session = build(options, [cpu], home, identity, signed, log, stack, lambda: False)
                session.record.begin()
                with monkeypatch.context() as patch:
                    patch.setattr(type(session.record.learner), "is_waiting", True)
                    session.record.inner_step_done()
                assert not home.checkpoints.exists()
                session.record.inner_step_done()

    asyncio.run(peer())
    assert len(list(home.checkpoints.iterdir())) == 1


def test_what_a_save_writes_is_told(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    save = saving.CheckpointSaver.save
    monkeypatch.setattr(saving.CheckpointSaver, "save", lambda self: written.append(save(self)) or written[-1])
    run(PeerOptions(None, home.path))
    newest = max(home.checkpoints.iterdir())
    assert written == [pytest.approx((newest / store.TENSORS).stat().st_size, rel=0.01)]


def test_a_second_ctrl_c_ends_at_once(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at_inner_step(monkeypatch, 3, times=2)
    with pytest.raises(KeyboardInterrupt):
        run(PeerOptions(None, home.path))
    assert not home.summary.exists()
    with home.locked():  # so the home is free
        pass


def test_the_model_of_a_home(home: Home) -> None:
    run(PeerOptions(None, home.path))
    found = checkpoint.load_latest(home.checkpoints).checkpoint
    assert found is not None
    loaded, tokenizer = load_model(home)
    assert torch.equal(loaded.theta, found.tensors["slow"])
    assert tokenizer.vocabulary_size == 256


def test_weights_of_another_model(signed_run: SignedRun) -> None:
    with pytest.raises(HomeError, match="has 5 weights, but the run's model"):
        model.model_of(signed_run(), torch.zeros(5))


def test_mean_of_weights() -> None:
    assert model.mean([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]).tolist() == [2.0, 4.0]


def test_a_model_that_needs_more_memory_than_its_owner_lends_is_refused(home: Home) -> None:
    (home.path / "settings.toml").write_text("memory_gb = 0.25")
    with pytest.raises(DeviceError, match=r"memory_gb in settings\.toml allows 0\.25 GB"):
        run(PeerOptions(None, home.path, "cpu"))
    assert not list(home.checkpoints.glob("step-*"))
    (home.path / "settings.toml").write_text("memory_gb = 2.0")
    run(PeerOptions(None, home.path, "cpu"))
    assert json.loads(home.summary.read_text())["finished"]


def test_an_option_without_effect_is_told_and_the_peer_trains(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None, raising=False)
    (home.path / "settings.toml").write_text("pause_on_battery = true")
    run(PeerOptions(None, home.path, "cpu"))
    (told,) = notes(home, "not in effect")
    assert (told["option"], told["why"]) == ("pause_on_battery", "this system shows no battery")
    assert json.loads(home.summary.read_text())["finished"]
