"""Owner control without its loop: a manual clock, a look per second, commands, and the calls to the rest of the
peer."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import math
import os
import threading
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, cast

import click
import pytest

from p2ptrain.base import daemon_thread
from p2ptrain.base.clock import WallClock
from p2ptrain.base.errors import MISFIT, HomeError
from p2ptrain.base.ids import PeerId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.host.loop import Signals
from p2ptrain.net.throttle import MBIT, Throttles
from peer.home import Home
from peer.messages import line
from peer.owner import commands, control_socket, status
from peer.owner import control as control_module
from peer.owner.control import OwnerControl, TrainingHandle, local_time
from peer.owner.control_socket import POINTER, SOCKET, NotRunningError, ask
from peer.owner.pause import span_s
from peer.owner.policy import GIVEN_SHARE
from peer.owner.resting import CALM_S, OLD_S, Readings
from peer.owner.settings import Settings, SettingsFile
from peer.owner.traffic import Month, TrafficCount
from peer.participation import Mode, Participation, TrainerControl
from peer.session_recorder import SessionRecorder
from peer.state import StatusView


@dataclass
class FakeLearner:
    ended: bool = False
    is_waiting: bool = False


@dataclass
class FakeLosses:
    is_reading: bool = False


@dataclass
class FakeRecord:
    """The part of a session recorder that a status reads."""

    is_held: bool = False
    losses: FakeLosses = field(default_factory=FakeLosses)
    has_stepped: bool = True
    keeps: frozenset[int] | None = None
    learner: FakeLearner = field(default_factory=FakeLearner)

    def figures(self) -> dict[str, Any]:
        return {
            "step": 7,
            "progress": 70.0,
            "fraction": 0.5,
            "run_tokens": 10_000,
            "swarm_tokens_per_s": 300.0,
            "remaining_s": 7_200.0,
            "shortened_s": 200_000.0,
            "loss": 2.5,
            "val_loss": None,
            "tokens": 1234,
            "tokens_per_s": 99.0,
            "skipped_steps": 4,
            "compiler": "compiled",
            "exchanges_ok": 3,
            "exchanges_failed": 1,
        }


class FakeParticipation:
    state = "training"
    live_peers = 2
    exchanges_under_way = 1

    def __init__(self) -> None:
        self.modes: list[Mode] = []
        self.gives: list[bool] = []

    def give(self, gives: bool) -> None:
        if not self.gives or self.gives[-1] is not gives:
            self.gives.append(gives)

    def set_mode(self, mode: Mode) -> None:
        if not self.modes or self.modes[-1] is not mode:
            self.modes.append(mode)


class Desk:
    """Owner control and everything around it."""

    def __init__(self, path: Path) -> None:
        self.home = Home(path)
        self.file = SettingsFile(path)
        self.settings = self.file.load()
        self.rates, self.signals, self.notebook = Throttles(), Signals(), MemoryLog()
        self.date = datetime(2026, 11, 30, 12, 0)
        self.seconds = 1000.0
        self.woken = 0
        self.stamp = 0
        self.admission = ""
        self.participation, self.record = FakeParticipation(), FakeRecord()
        self.owner = self.new_owner()

    def new_owner(self) -> OwnerControl:
        return OwnerControl(
            self.home,
            self.file,
            self.settings,
            self.rates,
            self.signals,
            self.notebook,
            now=lambda: self.date,
            clock=lambda: self.seconds,
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the owner's control in a loop of its own thread while the block runs."""
        begun, ended = threading.Event(), asyncio.Event()
        loops = list[asyncio.AbstractEventLoop]()

        async def peer() -> None:
            loops.append(asyncio.get_running_loop())
            async with self.owner.running(asyncio.create_task):
                await asyncio.sleep(0)  # the tasks begin
                begun.set()
                await ended.wait()

        thread = threading.Thread(target=lambda: asyncio.run(peer()))
        thread.start()
        assert begun.wait(60)
        try:
            yield
        finally:
            loops[0].call_soon_threadsafe(ended.set)
            thread.join(60)
        assert not thread.is_alive()

    def wake(self) -> None:
        self.woken += 1

    def take(self, alone: bool = False) -> None:
        participation = None if alone else cast(Participation, self.participation)
        control = TrainerControl(self.signals, self.wake)
        self.owner.take(
            TrainingHandle(cast(SessionRecorder, self.record), participation, control, lambda: self.admission)
        )
        self.owner.look()
        self.owner.save_if_due()

    def edit(self, text: str) -> None:
        self.file.path.write_text(text)
        self.stamp += 1  # on some kernels, two edits within one tick have equal timestamps
        os.utime(self.file.path, ns=(self.stamp, self.stamp))
        self.look(2)

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.seconds += 1
            self.owner.look()
            self.owner.save_if_due()

    def sense(self, **readings: Any) -> None:
        self.owner.readings = Readings(**readings)
        self.look()

    def order(self, command: str, **details: Any) -> str:
        return str(self.owner.answer({"command": command, **details})["told"])

    def status(self) -> dict[str, Any]:
        answer = self.owner.answer({"command": "status"})
        return dict(json.loads(json.dumps(answer, allow_nan=False))["status"])

    def kinds(self) -> list[str]:
        return self.notebook.kinds()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_an_edit_caps_the_lines_and_a_faulty_one_leaves_them(desk: Desk) -> None:
    desk.edit("upload_mbit = 8")
    assert (desk.rates.up.rate, desk.rates.down.rate) == (8 * MBIT, math.inf)
    assert desk.notebook.notes[-1] == ("settings", {"what": "upload_mbit 8.0, before 0.0"})
    desk.edit("upload_mbit = 'much'")
    desk.look(5)
    assert desk.rates.up.rate == 8 * MBIT
    assert desk.kinds() == ["settings", "settings refused"]
    assert "upload_mbit: input should be" in str(desk.notebook.notes[-1])
    assert "upload_mbit: input should be" in desk.status()["settings_fault"]
    desk.edit("download_mbit = 4")
    assert (desk.rates.up.rate, desk.rates.down.rate) == (math.inf, 4 * MBIT)
    assert desk.status()["settings_fault"] == ""


def test_a_read_of_the_system_that_hangs_is_ignored_and_keeps_no_peer(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, release = threading.Event(), threading.Event()

    def hang(_: Settings) -> Readings:
        asked.set()
        release.wait(600)  # longer than ``running`` waits for the end
        return Readings()

    monkeypatch.setattr(control_module, "read", hang)
    monkeypatch.setattr(daemon_thread, "INTERRUPT_S", 0.1)
    desk.edit('pause_while = ["game"]')
    desk.sense(programs=frozenset({"game"}))
    assert desk.status()["state"] == "paused"
    try:
        with desk.running():
            assert asked.wait(60)
            desk.look(round(OLD_S))
            assert desk.kinds().count("not in effect") == 0
            desk.look(round(CALM_S) + 1)
            assert desk.kinds().count("not in effect") == 1
            assert desk.status()["state"] != "paused"
        assert not release.is_set()
    finally:
        release.set()


def test_what_counts_from_the_next_start_is_told_so(desk: Desk) -> None:
    waiting = 'threads = 2\nmemory_gb = 2\ncompile = "off"'
    desk.edit(f"upload_mbit = 8\n{waiting}")
    ((_, fields),) = desk.notebook.notes
    waits = {change.split()[0] for change in fields["what"].split("; ") if change.endswith("(from the next start)")}
    assert waits == {"threads", "memory_gb", "compile"}
    assert "upload_mbit 8.0, before 0.0;" in fields["what"]


@pytest.mark.parametrize("text", [f"monthly_gb = {10**400}", f"hours = {'[' * 5000}"], ids=["digits", "lists"])
def test_settings_that_break_their_reader_are_refused_and_the_rest_goes_on(desk: Desk, text: str) -> None:
    desk.take()
    desk.edit("monthly_gb = 0.001")
    desk.edit(text)
    assert desk.kinds() == ["settings", "settings refused"]
    desk.rates.up.book(10**6)
    desk.look()
    assert desk.participation.modes == [Mode.SWARM, Mode.PAUSED]


def test_settings_that_cannot_be_read_for_a_while_are_told_once_and_count_afterwards(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path, *arguments: object) -> object:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", fails)
        desk.look(5)
        assert desk.status()["settings_fault"] == os.strerror(errno.EIO)
    desk.look(5)
    assert desk.kinds() == ["settings refused", "settings"]
    assert desk.status()["settings_fault"] == ""


def test_pause_and_resume_are_idempotent(desk: Desk) -> None:
    desk.take()
    assert [desk.order("pause"), desk.order("pause")] == ["pausing", "already paused"]
    assert desk.participation.modes == [Mode.SWARM, Mode.PAUSED]
    assert [desk.order("resume"), desk.order("resume")] == ["resuming", "not paused"]
    assert desk.participation.modes == [Mode.SWARM, Mode.PAUSED, Mode.SWARM]
    assert desk.kinds() == ["paused", "called back"]


def test_a_pause_outlives_the_process_until_resume(desk: Desk) -> None:
    with desk.running():
        desk.order("pause")
    desk.notebook.notes.clear()
    desk.owner = desk.new_owner()
    with desk.running():
        desk.take()
        assert desk.participation.modes == [Mode.PAUSED]
        assert desk.kinds() == ["still paused"]
        assert line(*desk.notebook.notes[0]) == (
            f"[owner] still paused by its owner, since before this start; to continue: p2ptrain resume {desk.home.path}"
        )
        assert not desk.rates.gives
        assert desk.order("resume") == "resuming"
    desk.notebook.notes.clear()
    desk.owner = desk.new_owner()
    with desk.running():
        assert desk.status()["state"] == "starting"
    assert desk.kinds() == []
    assert not (desk.home.path / "paused.json").exists()


def test_a_pause_with_an_end_is_over_by_itself(desk: Desk) -> None:
    desk.take()
    assert desk.order("pause", in_s=7200.0) == "pausing until 14:00"
    assert desk.status()["why"] == "requested by its owner until 14:00"
    assert desk.order("pause", in_s=7200.0) == "already paused until 14:00"
    assert desk.order("pause", in_s=7200.0 + 86_400) == "now paused until 2026-12-01 14:00"
    assert desk.order("pause", in_s=7200.0) == "now paused until 14:00"
    desk.date += timedelta(hours=2, seconds=-1)
    desk.look()
    assert desk.participation.modes == [Mode.SWARM, Mode.PAUSED]
    desk.date += timedelta(seconds=1)
    desk.look()
    assert desk.participation.modes == [Mode.SWARM, Mode.PAUSED, Mode.SWARM]
    assert desk.kinds() == ["paused", "called back"]
    assert not (desk.home.path / "paused.json").exists()
    assert desk.order("resume") == "not paused"


def test_a_pause_with_an_end_outlives_the_process_until_then(desk: Desk) -> None:
    with desk.running():
        desk.order("pause", in_s=7200.0)
    desk.notebook.notes.clear()
    desk.owner = desk.new_owner()
    with desk.running():
        assert desk.status()["state"] == "paused"
    assert "still paused by its owner until 14:00, since" in str(line(*desk.notebook.notes[0]))
    desk.date += timedelta(hours=3)
    desk.owner = desk.new_owner()
    with desk.running():
        assert desk.status()["state"] == "starting"
    assert not (desk.home.path / "paused.json").exists()


def test_hours_and_months_do_not_follow_a_false_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "wall", WallClock(iter([1e9, 1e9 + 86_400]).__next__, lambda: 0.0))
    assert local_time() == datetime.fromtimestamp(1e9)


@pytest.mark.parametrize("in_s", ["18:00", True, -1, math.nan, math.inf, 10**400, [1]])
def test_a_pause_until_no_time_is_refused(desk: Desk, in_s: object) -> None:
    assert desk.owner.answer({"command": "pause", "in_s": in_s}) == {"error": "no such time"}
    assert desk.status()["state"] == "starting"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--for", "2"), "'2' is not a duration of a pause."),
        (("--for", "0h"), "'0h' is not a duration of a pause."),
        (("--for", "-1h"), "'-1h' is not a duration of a pause."),
        (("--for", "1.5h"), "'1.5h' is not a duration of a pause."),
        (("--for", "366d"), "'366d' is not a duration of a pause."),
        (("--for", "9" * 5000 + "h"), "is not a duration of a pause."),
        (("--for", ""), "'' is not a duration of a pause."),
    ],
)
def test_a_pause_that_cannot_be_read_says_how_to_write_it(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    with pytest.raises(HomeError) as caught:
        commands.pause.main([str(tmp_path), *options], standalone_mode=False)
    assert said in caught.value.problem
    assert len(caught.value.problem) < 100


def test_the_span_of_a_pause() -> None:
    assert span_s("90m") == 5400
    assert span_s(None) is None


@pytest.mark.parametrize("content", [b"", b'{"paused": tr', b"[" * 10_000, b"[]", b'{"paused": true, "until": "x"}'])
def test_a_damaged_pause_is_none_and_told(desk: Desk, content: bytes) -> None:
    (desk.home.path / "paused.json").write_bytes(content)
    with desk.running():
        assert desk.status()["state"] == "starting"
        assert desk.order("resume") == "not paused"
    path = desk.home.path / "paused.json"
    assert list(desk.notebook.notes) == [("pause not kept", {"why": f"{path} is damaged; the peer is not paused"})]
    assert not path.exists()


def test_a_pause_that_cannot_be_kept_holds_for_now_and_is_told(desk: Desk) -> None:
    (desk.home.path / "paused.json").mkdir()
    with desk.running():
        assert desk.order("pause") == "pausing"
        assert desk.status()["state"] == "paused"
        assert desk.order("resume") == "resuming"
        assert desk.status()["state"] == "starting"
    assert desk.kinds() == ["pause not kept", "pause not kept", "paused", "pause not kept", "called back"]


def test_a_pause_before_there_is_a_trainer_counts_once_there_is_one(desk: Desk) -> None:
    assert desk.order("pause") == "pausing"
    assert desk.status()["state"] == "paused"
    desk.take()
    assert desk.participation.modes == [Mode.PAUSED]


def test_a_recipe_without_a_network_rests_too(desk: Desk) -> None:
    desk.signals.begin.set()
    desk.take(alone=True)
    desk.order("pause")
    assert not desk.signals.begin.is_set()
    desk.order("resume")
    assert desk.signals.begin.is_set()
    woken = desk.woken
    desk.look(3)
    assert desk.woken == woken  # nothing new


def test_the_month_runs_out_and_a_new_one_begins(desk: Desk) -> None:
    desk.take()
    desk.edit("monthly_gb = 0.001")
    desk.rates.up.book(400_000)
    desk.rates.down.book(599_999)
    desk.look()
    assert desk.participation.modes == [Mode.SWARM]
    desk.rates.down.book(1)
    desk.look(3)
    assert desk.participation.modes == [Mode.SWARM, Mode.PAUSED]
    assert desk.kinds().count("paused") == 1
    month = {"sent_bytes": 400_000, "received_bytes": 600_000, "given_bytes": 0, "allowed_bytes": 1e6}
    assert desk.status()["month"] == month
    desk.date += timedelta(hours=12)  # December
    desk.look()
    assert desk.participation.modes[-1] is Mode.SWARM
    assert desk.status()["month"]["sent_bytes"] == 0


def test_who_rests_or_has_used_up_its_month_gives_strangers_nothing(desk: Desk) -> None:
    """Check the services to strangers, from before there is a trainer: weights for newcomers, circuits, dial-backs."""
    gives = [desk.rates.gives]
    for order in ("pause", "resume"):
        desk.order(order)
        gives.append(desk.rates.gives)
    desk.take()
    desk.rates.up.book(10**7)
    desk.edit("monthly_gb = 0.01")
    gives.append(desk.rates.gives)
    desk.edit('hours = "22:00-06:00"')
    gives.append(desk.rates.gives)
    desk.edit("")
    gives.append(desk.rates.gives)
    assert gives == [True, False, True, False, False, True]


def test_once_others_had_their_share_of_a_budget_exchanges_go_on_and_gifts_do_not(desk: Desk) -> None:
    desk.date = datetime(2026, 12, 1, 12, 0)
    desk.take()
    desk.edit("monthly_gb = 0.31")
    day = int(GIVEN_SHARE * 1e7)
    for size in (day - 1, 1):
        desk.rates.up.book(size)
        desk.rates.give(size)
        desk.look()
    assert desk.rates.gives is False
    desk.look(3)
    desk.date += timedelta(days=1)
    desk.look(3)
    assert desk.rates.gives is True
    assert desk.participation.gives == [True, False, True]
    assert desk.participation.modes == [Mode.SWARM]
    assert desk.kinds() == ["settings", "share given"]
    assert line(*desk.notebook.notes[-1]) == (
        "[owner] other peers have used today's share of monthly_gb (25 % of it in a month); sending weights "
        "to newcomers and relaying resume tomorrow; exchanges continue"
    )
    assert desk.status()["month"]["given_bytes"] == day
    assert "of these 2.5 MB to serve others" in status.screen(desk.status())


def test_a_raised_budget_ends_the_pause_at_once(desk: Desk) -> None:
    desk.take()
    desk.rates.up.book(10**7)
    desk.edit("monthly_gb = 0.01")
    assert desk.participation.modes == [Mode.SWARM, Mode.PAUSED]
    desk.edit("monthly_gb = 0.02")
    assert desk.participation.modes[-1] is Mode.SWARM


def test_the_count_is_on_disk_and_the_next_process_goes_on_with_it(desk: Desk) -> None:
    with desk.running():
        desk.rates.up.book(5)
    assert json.loads((desk.home.path / "traffic.json").read_text()) == {
        "2026-11": {"sent_bytes": 5, "received_bytes": 0, "given_bytes": 0}
    }
    desk.rates = Throttles()
    desk.owner = desk.new_owner()
    with desk.running():
        desk.rates.down.book(6)
    traffic = TrafficCount(desk.home.path)
    traffic.load()
    assert traffic.month(desk.date) == Month(5, 6)


def test_what_cannot_be_counted_is_told(desk: Desk) -> None:
    (desk.home.path / "traffic.json").mkdir()
    with desk.running():
        desk.rates.up.book(5)
    assert desk.kinds() == ["not counted"] * 2  # neither read nor written


def test_a_full_disk_is_told_once(desk: Desk) -> None:
    (desk.home.path / "traffic.json").mkdir()
    desk.rates.up.book(5)
    desk.look(100)
    assert desk.kinds() == ["not counted"]
    (desk.home.path / "traffic.json").rmdir()
    desk.look(100)
    assert json.loads((desk.home.path / "traffic.json").read_text())["2026-11"]["sent_bytes"] == 5


def test_it_rests_for_other_uses_of_its_machine_and_says_why(desk: Desk) -> None:
    desk.take()
    desk.edit('pause_while = ["steam"]\npause_on_battery = true')
    desk.record.is_held = True
    desk.sense(programs=frozenset({"steam"}), on_battery=False)
    assert desk.participation.modes == [Mode.SWARM, Mode.PAUSED]
    assert desk.status()["why"] == "steam is running (pause_while in settings.toml)"
    assert "paused: steam is running (pause_while in settings.toml)" in status.screen(desk.status())
    assert desk.order("resume") == "still paused: steam is running (pause_while in settings.toml)"
    assert desk.order("pause") == "pausing"
    assert desk.status()["why"] == "requested by its owner"
    desk.order("resume")
    desk.sense(programs=frozenset())
    assert desk.participation.modes[-1] is Mode.PAUSED
    desk.seconds += CALM_S
    desk.sense()
    assert desk.participation.modes[-1] is Mode.SWARM
    assert desk.kinds() == ["settings", "paused", "called back"]


def test_an_option_without_effect_is_told_once_after_each_edit(desk: Desk) -> None:
    desk.sense(faults={"pause_while": "of another time"})
    desk.edit("pause_on_battery = true")
    for why in ("this system shows no battery", "this system shows no battery still"):
        desk.sense(faults={"pause_on_battery": why})
    assert desk.kinds() == ["settings", "not in effect"]
    told = "pause_on_battery in settings.toml has no effect: this system shows no battery"
    assert line(*desk.notebook.notes[-1]) == f"[owner] {told}"
    assert "pause_on_battery has no effect: this system shows no battery still" in status.screen(desk.status())
    desk.edit("pause_on_battery = true\nupload_mbit = 8")
    assert desk.kinds() == ["settings", "not in effect"] * 2


def test_programs_and_battery_are_read_while_the_peer_runs(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def read(settings: Settings) -> Readings:
        asked.set()
        return Readings(on_battery=True)

    monkeypatch.setattr(control_module, "read", read)
    with desk.running():
        assert asked.wait(10)


def test_outside_of_its_hours_it_rests_whatever_resume_says(desk: Desk) -> None:
    desk.take()
    desk.edit('hours = "22:00-07:00"')
    assert desk.participation.modes[-1] is Mode.PAUSED
    assert desk.order("resume") == "still paused: outside the hours 22:00-07:00 in settings.toml"
    desk.date += timedelta(hours=10)
    desk.look()
    assert desk.participation.modes[-1] is Mode.SWARM


def test_finish_ends_the_outer_step_once(desk: Desk) -> None:
    desk.take()
    assert [desk.order("finish"), desk.order("finish")] == ["finishing", "already finishing"]
    assert desk.signals.last.is_set()
    assert not desk.signals.stop.is_set()
    assert desk.woken == 1
    assert desk.kinds() == ["finishing"]
    assert desk.status()["state"] == "finishing"


def test_no_such_command(desk: Desk) -> None:
    assert desk.owner.answer({"command": "fly"}) == {"error": "no such command"}
    assert desk.owner.answer({}) == {"error": "no such command"}


def test_measured_rates_are_of_the_last_minute(desk: Desk) -> None:
    for _ in range(200):
        desk.rates.up.book(1000)
        desk.look()
    assert desk.status()["rates"] == {"sent_bytes_per_s": 1000, "received_bytes_per_s": 0}
    desk.look(100)
    assert desk.status()["rates"] == {"sent_bytes_per_s": 0, "received_bytes_per_s": 0}


@pytest.mark.parametrize(
    ("changes", "mode", "state"),
    [
        ({}, "SWARM", "training"),
        ({"is_held": True}, "PAUSED", "paused"),
        ({}, "PAUSED", "pausing"),
        ({"has_stepped": False}, "PAUSED", "paused"),
        ({"learner": FakeLearner(ended=True)}, "SWARM", "final gossip"),
        ({"learner": FakeLearner(is_waiting=True)}, "SWARM", "training"),
    ],
)
def test_states(changes: dict[str, Any], mode: str, state: str) -> None:
    record, participation = cast(SessionRecorder, FakeRecord(**changes)), cast(Participation, FakeParticipation())
    assert status.state_of(record, participation, mode, leaving=False)[0] == state
    assert status.state_of(record, participation, mode, leaving=True)[0] == "finishing"


def test_a_peer_after_its_final_gossip_says_what_it_does() -> None:
    participation = FakeParticipation()

    def said(leaving: bool = False, **changes: Any) -> tuple[str, str]:
        record = cast(SessionRecorder, FakeRecord(learner=FakeLearner(ended=True), **changes))
        return status.state_of(record, cast(Participation, participation), "SWARM", leaving)

    reading = "finishing", "reading the held-out text for the final loss"
    assert said(losses=FakeLosses(True)) == said(losses=FakeLosses(True), leaving=True) == reading
    assert said() == ("final gossip", "exchanging weights until the swarm agrees")
    participation.live_peers = 0
    assert said() == ("final gossip", "no other peer is here")
    participation.state = "leaving"
    assert said() == ("finishing", "leaving once newcomers have their weights")


def test_the_screen_tells_it_all_and_steers_no_terminal(desk: Desk) -> None:
    desk.take()
    desk.edit('upload_mbit = 8\nmonthly_gb = 2\nhours = "00:00-23:59"')
    desk.owner.on_note("lost", {"peer": "12D3abcdef", "why": "\x1b[2Jgone"})
    for _ in range(2):
        desk.owner.on_note("skipped", {"peer": "12D3abcdef", "why": "busy"})
        desk.owner.on_note("failed", {"peer": "12D3abcdef", "why": MISFIT})
        desk.owner.on_note("exchanged", {"peer": "12D3abcdef"})
    text = status.screen(desk.status())
    for part in (
        "training",
        "50.0 % of the run, outer step 7, loss 2.500",
        "70 of 10,000 by all peers, 1,234 of them here, 4 steps skipped",
        "300 tokens/s, 99 of them here",
        "time left 2.0 h; this computer shortens it by 2.3 d",
        "compiler  compiled",
        "2 other peers, 3 exchanges, 1 under way, 1 failed",
        "at most 8",
        "of 2.0 GB",
        "00:00-23:59",
        "lost abcdef",
    ):
        assert part in text
    assert [text.count(noise) for noise in ("busy", MISFIT, "exchanged with")] == [0, 0, 1]
    assert "\x1b" not in text


def test_whether_a_private_run_lets_us_in_is_shown(desk: Desk) -> None:
    desk.take()
    assert "admission" not in status.screen(desk.status())
    desk.admission = "admitted (invite)"
    assert "admission admitted (invite)" in status.screen(desk.status())


def test_another_process_with_the_same_identity_is_shown(desk: Desk) -> None:
    desk.take()
    assert "identity" not in status.screen(desk.status())
    fields = {"name": "Kx41ab", "where": "11.0.2.2:4001", "step": 3, "yields": False, "command": "p2ptrain identity"}
    desk.owner.on_note("same identity", fields)
    assert "identity  NOT UNIQUE: also used at 11.0.2.2:4001" in status.screen(desk.status())


def test_before_there_is_a_trainer_the_status_says_so(desk: Desk) -> None:
    desk.owner.on_note(
        "waiting", {"why": "no address in the link returned the run's manifest", "seconds": 2.0, "remedy": "Wait."}
    )
    assert desk.status()["state"] == "starting"
    assert "no address in the link" in status.screen(desk.status())


def test_over_the_socket_and_gone_afterwards(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    home = desk.home.path
    with desk.running():
        desk.take()
        commands.pause.main([str(home)], standalone_mode=False)
        commands.status.main([str(home), "--json"], standalone_mode=False)
    told, shown = capsys.readouterr().out.split("\n", 1)
    assert told == "pausing"
    assert json.loads(shown)["state"] == "pausing"
    assert sorted(path.name for path in home.iterdir()) == ["paused.json", "settings.toml"]


@pytest.mark.parametrize("removed", [SOCKET, POINTER])
def test_a_removed_control_socket_is_made_again(desk: Desk, monkeypatch: pytest.MonkeyPatch, removed: str) -> None:
    home = desk.home.path
    monkeypatch.setattr(control_socket, "LONGEST_PATH", 1000 if removed == SOCKET else 1)
    monkeypatch.setattr(control_module, "POLL_S", 0.01)
    with desk.running():
        (home / removed).unlink()
        end = time.monotonic() + 60
        answer = None
        while answer is None:
            assert time.monotonic() < end
            with contextlib.suppress(NotRunningError):
                answer = ask(home, command="status")
    assert answer["told"] == ""
    assert [path.name for path in home.iterdir()] == ["settings.toml"]
    assert "no control socket" not in desk.kinds()


@pytest.mark.parametrize("order", [commands.status, commands.pause])
def test_a_home_that_is_closed_to_us_is_an_error_of_ours(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, order: click.Command
) -> None:
    def closed(path: Path, **how: bool) -> os.stat_result:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", closed)
        with pytest.raises(HomeError, match=r"The home .* cannot be used: Permission denied") as raised:
            order.main([str(desk.home.path)], standalone_mode=False)
    assert "as the user who started" in raised.value.remedy


def test_settings_are_shown_as_they_count(desk: Desk) -> None:
    desk.edit("threads = 2")
    assert Settings(**desk.status()["settings"]) == Settings(threads=2)


def test_the_page_says_of_a_peer_what_status_says(desk: Desk) -> None:
    """Check that the page and ``status`` agree, also before training, while paused, and when the peer leaves."""
    page = StatusView(PeerId("12D3KooWme"), "fox", desk.owner.state)

    def both() -> tuple[str, str]:
        own, shown = desk.status(), page.document()
        assert (shown["state"], shown["why"]) == (own["state"], own["why"])
        return own["state"], own["why"]

    assert both() == ("starting", status.EARLY)
    desk.owner.answer({"command": "pause"})
    assert both()[0] == "paused"
    desk.owner.answer({"command": "resume"})
    desk.take()
    assert both() == ("training", "")
    desk.signals.stop.set()
    assert both()[0] == "finishing"


def test_an_internal_error_ends_the_peer(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a fault of ours is never silent: budget, hours and commands need the watch."""

    async def peer() -> None:
        tasks = list[asyncio.Task[None]]()

        def start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            tasks.append(asyncio.create_task(work))
            return tasks[-1]

        async with desk.owner.running(start):
            monkeypatch.setattr(desk.file, "changed", lambda: 1 / 0)
            await tasks[1]

    monkeypatch.setattr(control_module, "POLL_S", 0.01)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(peer())
