"""The control socket in the home, both sides in this process: bounded, private, and removed at the end."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.base.errors import HomeError
from p2ptrain.manifest import SIGNED_FILE
from peer.owner import control_socket as doors
from peer.owner.control_socket import LONGEST_PATH, MAX_REQUEST, SOCKET, Answer, ControlServer, ask


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a home; if its path is short here, set a limit under which it is too long, and the reverse."""
    monkeypatch.setattr(doors, "LONGEST_PATH", 1000 if len(str(tmp_path)) < LONGEST_PATH - 20 else LONGEST_PATH)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@contextmanager
def serving(home: Path, answer: Answer = dict, blocked_s: float = 0.0) -> Iterator[ControlServer]:
    """Serve the socket in a loop of its own thread while the block runs, at first blocked for so many seconds."""
    door = ControlServer(home, answer)
    begun, ended = threading.Event(), asyncio.Event()
    loops = list[asyncio.AbstractEventLoop]()

    async def peer() -> None:
        loops.append(asyncio.get_running_loop())
        await door.start()
        begun.set()
        time.sleep(blocked_s)
        await ended.wait()
        door.close()

    thread = threading.Thread(target=lambda: asyncio.run(peer()))
    thread.start()
    assert begun.wait(20)
    try:
        yield door
    finally:
        loops[0].call_soon_threadsafe(ended.set)
        thread.join(20)
        assert not thread.is_alive()


def talk(door: ControlServer, words: bytes) -> bytes:
    """Return the answer to a client that sends only this."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(door.path))
        client.sendall(words)
        client.shutdown(socket.SHUT_WR)
        try:
            return client.recv(1000)
        except ConnectionResetError:
            return b""


def left_in(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir())


def test_a_question_and_its_answer(home: Path) -> None:
    with serving(home, lambda request: {"you said": dict(request)}) as door:
        assert stat.S_IMODE(door.path.stat().st_mode) == 0o600
        assert ask(home, command="status", n=5) == {"you said": {"command": "status", "n": 5}}
        assert ask(home / ".." / "home", command="x") == {"you said": {"command": "x"}}
    assert left_in(home) == []


def test_a_home_whose_path_is_too_long(tmp_path: Path) -> None:
    home = tmp_path / ("x" * LONGEST_PATH)
    home.mkdir()
    with serving(home, lambda request: {"fine": True}) as door:
        assert len(str(door.path)) <= LONGEST_PATH
        assert stat.S_IMODE(door.path.parent.stat().st_mode) == 0o700
        assert ask(home, command="status") == {"fine": True}
    assert left_in(home) == []
    assert not door.path.parent.exists()


def test_a_command_that_is_no_longer_waited_for_is_not_carried_out(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    obeyed: list[str] = []

    def obey(request: Mapping[str, Any]) -> Mapping[str, Any]:
        obeyed.append(request["command"])
        return {}

    with serving(home, obey, blocked_s=0.5):
        with monkeypatch.context() as patch:
            patch.setattr(doors, "ANSWER_DEADLINE_S", 0.05)
            with pytest.raises(HomeError, match="does not answer"):
                ask(home, command="pause")
        ask(home, command="resume")
    assert obeyed == ["resume"]


def test_nobody_is_there(home: Path) -> None:
    """Check that a start is advised only where it can succeed."""
    with pytest.raises(HomeError, match=r"There is no peer in .* yet") as none:
        ask(home, command="status")
    assert "Start it" not in none.value.remedy
    (home / SIGNED_FILE).touch()
    with pytest.raises(HomeError, match=r"No peer runs in .*\n.*Start it"):
        ask(home, command="status")


def test_nobody_is_there_in_a_home_whose_path_is_too_long_for_a_socket(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "LONGEST_PATH", LONGEST_PATH)
    deep = home / ("x" * LONGEST_PATH)
    deep.mkdir()
    with pytest.raises(HomeError, match="There is no peer in"):
        ask(deep, command="status")


def test_what_a_killed_peer_left_is_nobody_and_is_swept(home: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:  # closed without an end, as the kernel does
        dead.bind(str(home / SOCKET))
        dead.listen()
    with pytest.raises(HomeError, match="There is no peer in"):
        ask(home, command="status")
    with serving(home, lambda request: {"alive": True}):
        assert ask(home) == {"alive": True}
    assert left_in(home) == []


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"\n",
        b"{}",
        b"nonsense\n",
        b"[1]\n",
        b"\xff\n",
        b'{"a":' + b"1" * MAX_REQUEST + b"}\n",
        b"[" * 4000 + b"\n",
    ],
)
def test_nonsense_gets_no_answer_and_the_next_one_does(home: Path, words: bytes) -> None:
    asked: list[Mapping[str, Any]] = []

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        asked.append(request)
        return {}

    with serving(home, answer) as door:
        assert talk(door, words) == b""
        assert json.loads(talk(door, b'{"a": 1}\n')) == {}
    assert asked == [{"a": 1}]


def test_a_client_that_says_nothing_keeps_nobody_waiting(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "REQUEST_DEADLINE_S", 0.5)
    with serving(home, lambda request: {"next": True}) as door, socket.socket(socket.AF_UNIX) as silent:
        silent.settimeout(20)
        silent.connect(str(door.path))
        assert ask(home) == {"next": True}
        assert silent.recv(10) == b""


def test_a_peer_that_is_frozen(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "ANSWER_DEADLINE_S", 0.05)
    with serving(home, blocked_s=0.5), pytest.raises(HomeError, match="does not answer"):
        ask(home, command="status")


@pytest.mark.parametrize("answer", [b"", b"nonsense\n", b"[]\n", b"[" * 60_000 + b"\n"])
def test_an_answer_that_is_none(home: Path, answer: bytes) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(home / SOCKET))
    listener.listen()

    def mumble() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(answer)

    thread = threading.Thread(target=mumble)
    thread.start()
    with pytest.raises(HomeError, match="does not answer"):
        ask(home, command="status")
    thread.join(10)
    listener.close()
