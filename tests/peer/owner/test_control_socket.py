"""The control socket in the home, both sides in this process: bounded, private, and removed at the end."""

from __future__ import annotations

import json
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.base.errors import HomeError
from p2ptrain.manifest import SIGNED_FILE
from peer.owner import control_socket as doors
from peer.owner.control_socket import LONGEST_PATH, MAX_REQUEST, ControlServer, ask


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a home; if its path is short here, set a limit under which it is too long, and the reverse."""
    monkeypatch.setattr(doors, "LONGEST_PATH", 1000 if len(str(tmp_path)) < LONGEST_PATH - 20 else LONGEST_PATH)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@contextmanager
def serving(
    door: ControlServer, times: int, answer: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> Iterator[None]:
    door.socket.setblocking(True)

    def run() -> None:
        for _ in range(times):
            door.serve(answer)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join(20)
        assert not thread.is_alive()


def talk(door: ControlServer, words: bytes) -> bytes:
    """Return the answer to a client that sends only this."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(door.socket.getsockname())
        client.sendall(words)
        client.shutdown(socket.SHUT_WR)
        try:
            return client.recv(1000)
        except ConnectionResetError:
            return b""


def left_in(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir())


def test_a_question_and_its_answer(home: Path) -> None:
    door = ControlServer(home)
    try:
        assert stat.S_IMODE(Path(door.socket.getsockname()).stat().st_mode) == 0o600
        with serving(door, 2, lambda request: {"you said": dict(request)}):
            assert ask(home, command="status", n=5) == {"you said": {"command": "status", "n": 5}}
            assert ask(home / ".." / "home", command="x") == {"you said": {"command": "x"}}
    finally:
        door.close()
    assert left_in(home) == []


def test_a_home_whose_path_is_too_long(tmp_path: Path) -> None:
    home = tmp_path / ("x" * LONGEST_PATH)
    home.mkdir()
    door = ControlServer(home)
    place = Path(door.socket.getsockname())
    try:
        assert len(str(place)) <= LONGEST_PATH
        assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
        with serving(door, 1, lambda request: {"fine": True}):
            assert ask(home, command="status") == {"fine": True}
    finally:
        door.close()
    assert left_in(home) == []
    assert not place.parent.exists()


def test_an_order_that_is_no_longer_waited_for_is_not_obeyed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "ANSWER_DEADLINE_S", 0.01)
    door = ControlServer(home)
    obeyed: list[str] = []

    def obey(request: Mapping[str, Any]) -> Mapping[str, Any]:
        obeyed.append(request["command"])
        return {}

    try:
        with pytest.raises(HomeError, match="does not answer"):
            ask(home, command="pause")
        monkeypatch.setattr(doors, "ANSWER_DEADLINE_S", 10.0)
        with serving(door, 2, obey):
            ask(home, command="resume")
    finally:
        door.close()
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
    dead = ControlServer(home)
    dead.socket.close()  # as the kernel does when the process dies
    assert left_in(home) != []
    with pytest.raises(HomeError, match="There is no peer in"):
        ask(home, command="status")
    alive = ControlServer(home)
    with serving(alive, 1, lambda request: {"alive": True}):
        assert ask(home) == {"alive": True}
    alive.close()
    if dead._folder is not None:
        dead._folder.remove()
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
    door = ControlServer(home)
    asked: list[Mapping[str, Any]] = []

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        asked.append(request)
        return {}

    with serving(door, 2, answer):
        assert talk(door, words) == b""
        assert json.loads(talk(door, b'{"a": 1}\n')) == {}
    door.close()
    assert asked == [{"a": 1}]


def test_a_client_that_says_nothing_is_not_waited_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "REQUEST_DEADLINE_S", 0.5)
    door = ControlServer(home)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(door.socket.getsockname())
        with serving(door, 2, lambda request: {"next": True}):
            assert ask(home) == {"next": True}
    door.close()


def test_a_peer_that_is_frozen(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "ANSWER_DEADLINE_S", 0.05)
    door = ControlServer(home)
    with pytest.raises(HomeError, match="does not answer"):
        ask(home, command="status")
    door.close()


@pytest.mark.parametrize("answer", [b"", b"nonsense\n", b"[]\n", b"[" * 60_000 + b"\n"])
def test_an_answer_that_is_none(home: Path, answer: bytes) -> None:
    door = ControlServer(home)
    door.socket.setblocking(True)

    def mumble() -> None:
        connection, _ = door.socket.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(answer)

    thread = threading.Thread(target=mumble)
    thread.start()
    with pytest.raises(HomeError, match="does not answer"):
        ask(home, command="status")
    thread.join(10)
    door.close()
