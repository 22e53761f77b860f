"""A leader's listener for other computers, and ranks' commands that it refuses, without any training."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import pytest
import torch

import p2ptrain
from p2ptrain.base.errors import DeviceError, HomeError, NetworkError, RemoteError, TeamError, UserError
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.manifest import SignedManifest, create_run, load_run, sign_run
from p2ptrain.team.connection import RankConnection
from p2ptrain.team.lan_address import LanAddress
from p2ptrain.team.lan_messages import (
    BeatMessage,
    ControlLine,
    JoinMessage,
    PlanMessage,
    ReadyMessage,
    RefusalMessage,
    ReportMessage,
    WelcomeMessage,
)
from p2ptrain.team.sealed import Hello, Purpose, dial_leader, generation_key
from p2ptrain.team.store import MOST_VALUE_BYTES, RankStore
from peer.app import run_peer
from peer.assembly import PeerOptions
from peer.home import Home
from peer.team import lan_leader, lan_rank
from peer.team.lan_leader import LanListener
from peer.team.lan_options import check_no_rank, listener_for, other_ranks, team_key
from peer.team.lan_rank import RankOptions, run_rank
from peer.team.remote_rank import RemoteRank

KEY = b"k" * 32


def run_at(path: Path) -> SignedManifest:
    create_run(path, "demo")
    sign_run(path)
    return load_run(path)


@pytest.fixture
def signed(tmp_path: Path) -> SignedManifest:
    return run_at(tmp_path / "run")


@pytest.fixture
def stopping() -> threading.Event:
    return threading.Event()


@pytest.fixture
def listener(signed: SignedManifest, tmp_path: Path, stopping: threading.Event) -> Iterator[LanListener]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    log = MemoryLog()
    made = LanListener(
        LanAddress("127.0.0.1", port), KEY, tmp_path / "team.key", signed, range(1, 2), log, stopping.is_set
    )
    made.log = log
    yield made
    made.close()


def joined(listener: LanListener, version: str = p2ptrain.__version__, run: str | None = None) -> ControlLine:
    address = listener.address
    line = ControlLine(dial_leader(address.host, address.port, KEY, Hello(Purpose.CONTROL, 0)))
    line.send(JoinMessage(version=version, run=run, name="second", device="cpu"))
    return line


def until_noted(listener: LanListener, kind: str) -> dict[str, object]:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for each, fields in listener.log.notes:
            if each == kind:
                return fields
        time.sleep(0.01)
    raise AssertionError(f"no {kind}: {listener.log.notes}")


def test_a_rank_gets_the_manifest_and_is_ready_when_it_says_so(listener: LanListener, signed: SignedManifest) -> None:
    line = joined(listener, run=signed.run_id)
    message, blob = line.receive()
    assert message == WelcomeMessage(rank=1)
    assert SignedManifest.from_bytes(blob).run_id == signed.run_id
    line.send(ReadyMessage())
    assert listener.await_ready(1).name == "second"
    assert listener.missing() == 0
    line.close()
    assert until_noted(listener, "rank left")["name"] == "second"


def test_on_left_runs_before_the_place_is_free(listener: LanListener) -> None:
    missing: Queue[int] = Queue()
    listener.on_left = lambda: missing.put(listener.missing())
    line = joined(listener)
    line.receive()
    line.close()
    assert missing.get(timeout=10) == 0
    line = joined(listener)
    line.receive()
    listener.close()
    for thread in [each for each in threading.enumerate() if each.name == "lan-line"]:
        thread.join(10)
    assert missing.empty()  # the owner stops the peer: there is nothing to leave
    line.close()


@pytest.mark.parametrize(
    ("version", "run", "says"), [("0.0.0", None, "runs p2ptrain 0.0.0"), (p2ptrain.__version__, "ab" * 32, "another")]
)
def test_another_version_or_run_is_refused_for_good(
    listener: LanListener, version: str, run: str | None, says: str
) -> None:
    line = joined(listener, version, run)
    message, _ = line.receive()
    assert isinstance(message, RefusalMessage)
    assert message.is_final
    assert says in message.reason
    assert says in str(until_noted(listener, "rank refused")["why"])
    line.close()


def test_a_second_rank_may_try_again_later(listener: LanListener) -> None:
    first = joined(listener)
    assert isinstance(first.receive()[0], WelcomeMessage)
    second = joined(listener)
    refusal = second.receive()[0]
    assert isinstance(refusal, RefusalMessage)
    assert not refusal.is_final
    first.close()
    until_noted(listener, "rank left")
    third = joined(listener)
    assert isinstance(third.receive()[0], WelcomeMessage)
    for each in (second, third):
        each.close()


@pytest.mark.parametrize("message", [BeatMessage(), PlanMessage(meeting="0" * 32), WelcomeMessage(rank=1)])
def test_a_line_that_begins_with_another_message_ends(listener: LanListener, message: object) -> None:
    address = listener.address
    line = ControlLine(dial_leader(address.host, address.port, KEY, Hello(Purpose.CONTROL, 0)))
    line.send(message)
    with pytest.raises((NetworkError, RemoteError)):
        line.receive()
    line.close()
    assert listener.missing() == 1


def test_lines_of_no_generation_or_an_old_one_end(listener: LanListener) -> None:
    address = listener.address
    point = listener.open_meeting(5.0)
    old, key = bytes.fromhex(point.name), generation_key(KEY, bytes.fromhex(point.name))
    assert point.key == key
    listener.open_meeting(5.0)
    for purpose in (Purpose.STORE, Purpose.SHARD):
        with pytest.raises(NetworkError):
            dial_leader(address.host, address.port, key, Hello(purpose, 1, old))
    with pytest.raises(TeamError, match=r"ranks \[1\] did not come"):
        listener.shard_lines(2, 0.1)


def test_the_end_of_a_meeting_ends_its_store_lines(listener: LanListener) -> None:
    address, point = listener.address, listener.open_meeting(5.0)
    line = dial_leader(address.host, address.port, point.key, Hello(Purpose.STORE, 1, bytes.fromhex(point.name)))
    store = RankStore(RankConnection(line, MOST_VALUE_BYTES), 5.0)
    store.set("here", "")  # the leader serves the line
    serving = [each for each in threading.enumerate() if each.name == "lan-line"]
    listener.close_meeting()
    for each in serving:
        each.join(5)
    assert not any(each.is_alive() for each in serving)
    store.close()


def test_waiting_ends_when_the_owner_stops_the_peer(listener: LanListener, stopping: threading.Event) -> None:
    threading.Timer(0.1, stopping.set).start()
    with pytest.raises(TeamError, match="stopped"):
        RemoteRank(listener, 1).wait_ready(1.0)
    assert until_noted(listener, "waiting for ranks")["leader"] == str(listener.address)


def test_a_rank_that_reports_its_end_or_loses_its_line_has_ended(listener: LanListener) -> None:
    line = joined(listener)
    line.receive()
    line.send(ReadyMessage())
    rank = RemoteRank(listener, 1)
    rank.wait_ready(5.0)
    assert not rank.has_ended
    rank._visitor = listener.visitor(1)
    line.send(ReportMessage(kind="memory", reason="full"))
    assert rank.wait(time.monotonic() + 5)
    assert not rank.is_lost
    report = rank.last_report()
    assert report is not None
    assert report.kind == "memory"
    line.close()
    until_noted(listener, "rank left")
    assert rank.is_lost
    assert "the line to second (127.0.0.1) was cut" in rank.how_ended()
    rank.kill()


def test_strangers_that_say_nothing_do_not_keep_others_out(
    listener: LanListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lan_leader, "MOST_GREETINGS", 2)
    address = listener.address
    silent = [socket.create_connection((address.host, address.port)) for _ in range(3)]
    time.sleep(0.2)
    silent.pop().close()
    for each in silent:
        each.close()
    time.sleep(0.2)
    line = joined(listener)
    assert isinstance(line.receive()[0], WelcomeMessage)
    line.close()


def test_an_address_in_use_is_one_error(listener: LanListener, signed: SignedManifest, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.path.mkdir()
    with pytest.raises(DeviceError, match="cannot listen on"):
        listener_for(str(listener.address), range(1, 2), home, signed, MemoryLog(), lambda: False, str)


def test_the_key_is_made_once_and_private(tmp_path: Path) -> None:
    home = Home(tmp_path)
    key = team_key(home)
    assert team_key(home) == key
    assert (tmp_path / "team.key").stat().st_mode & 0o777 == 0o600
    (tmp_path / "team.key").write_text("abc")
    with pytest.raises(HomeError, match="damaged"):
        team_key(home)


def test_a_peer_refuses_the_home_of_a_rank_and_leaves_it_as_it_was(signed: SignedManifest, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    saved = home.checkpoints / "step-00000003"
    saved.mkdir(parents=True)
    home.save_manifest(signed)
    part = {"begin": 0, "end": 100, "total": 200, "starts": [0, 1]}
    (saved / "state.json").write_text(json.dumps({"part": part}))
    check_no_rank(home)  # a leader's
    (saved / "state.json").write_text(json.dumps({"part": {**part, "begin": 100, "end": 200}}))
    with pytest.raises(HomeError, match="home of p2ptrain rank"):
        run_peer(PeerOptions(None, home.path))
    assert not home.identity.exists()


def test_a_rank_whose_home_has_another_run_ends_with_one_error(listener: LanListener, tmp_path: Path) -> None:
    home = Home(tmp_path / "rank")
    home.path.mkdir()
    home.save_manifest(run_at(tmp_path / "other"))
    options = RankOptions(listener.address, KEY, home.path, "cpu")
    with pytest.raises(UserError, match="belongs to run"):
        run_rank(options, MemoryLog(), threading.Event())
    assert "belongs to run" in str(until_noted(listener, "rank refused")["why"])


def test_a_rank_waits_for_a_leader_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lan_rank, "BACKOFF_S", 0.01)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = LanAddress("127.0.0.1", int(probe.getsockname()[1]))
        log, stop = MemoryLog(), threading.Event()
        threading.Timer(0.3, stop.set).start()
        run_rank(RankOptions(address, KEY, tmp_path, "cpu"), log, stop)
    assert log.kinds() == ["waiting for the leader"]  # told once


class DeadProcess:
    """``RankProcess`` that was killed before a generation had it."""

    has_ended = True

    def __init__(self, *_: object) -> None:
        pass

    def last_report(self) -> None:
        return None

    def how_ended(self) -> str:
        return "its process 7 was ended by signal 9"

    def kill(self) -> None:
        pass


def test_a_rank_process_that_ends_at_its_start_gives_its_place_back(
    listener: LanListener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lan_rank, "RankProcess", DeadProcess)
    log, stop = MemoryLog(), threading.Event()
    options = RankOptions(listener.address, KEY, tmp_path / "rank", "cpu")
    options.home.mkdir()
    thread = threading.Thread(target=run_rank, args=(options, log, stop))
    thread.start()
    try:
        assert "ended by signal 9" in str(until_noted(listener, "rank left")["why"])
    finally:
        stop.set()
        thread.join()
    waiting = [fields for kind, fields in log.notes if kind == "waiting for the leader"]
    assert waiting[0]["why"] == "this computer's rank did not start: its process 7 was ended by signal 9"


@pytest.mark.parametrize("at", ["8.8.8.8", "0.0.0.0", "192.168.1.5:99999", "10.255.254.253"])
def test_an_address_that_is_not_private_or_not_ours_is_refused_with_the_other_options(at: str) -> None:
    with pytest.raises(UserError):
        other_ranks(2, at, [torch.device("cpu")])
    assert other_ranks(2, "127.0.0.1", [torch.device("cpu")]) == range(1, 2)
