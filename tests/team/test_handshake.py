"""How ranks reach their leader: only with the key, only in the owner's folder, and all in time."""

from __future__ import annotations

import socket
import threading

import pytest

from p2ptrain.base.errors import NetworkError, RemoteError, TeamError
from p2ptrain.team.connection import (
    MAGIC,
    MOST_JSON_BYTES,
    MOST_NUMBERS,
    VERSION,
    RankConnection,
    SocketLine,
    TeamFrame,
)
from p2ptrain.team.handshake import RankListener, dial, new_key
from p2ptrain.team.remote_shard import RemoteShard
from p2ptrain.team.requests import FitRecord, ShardAnswer
from p2ptrain.team.shard_server import ShardServer

KEY = new_key()


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def listener(folder):
    made = RankListener(folder / "leader", KEY)
    yield made
    made.close()
    assert not (folder / "leader").exists()


def dialing(*arguments):
    """Dial in a thread; return it and what it found."""
    found = []

    def run():
        try:
            found.append(dial(*arguments))
        except TeamError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_ranks_are_known_in_their_order(listener, folder):
    dials = [dialing(folder / "leader", KEY, rank) for rank in (2, 1)]
    connections = listener.connect(3, 5.0)
    for thread, _ in dials:
        thread.join()
    for connection, (_, (theirs,)) in zip(connections, reversed(dials), strict=True):
        theirs.sendall(b"x")
        assert connection.recv(1) == b"x"
        connection.close()
        theirs.close()


@pytest.mark.parametrize(
    ("key", "rank"), [(bytes(32), 1), (KEY, 0), (KEY, 7)], ids=["wrong key", "rank of the leader", "no such rank"]
)
def test_a_wrong_key_or_rank_does_not_get_in(listener, folder, key, rank):
    thread, found = dialing(folder / "leader", key, rank)
    with pytest.raises(TeamError, match=r"connecting the ranks: ranks \[1\] did not come"):
        listener.connect(2, 0.3)
    thread.join()
    if isinstance(found[0], TeamError):
        assert str(found[0]) == "connecting the ranks: the leader does not know the key"
    else:
        assert found[0].recv(1) == b""
        found[0].close()


def test_a_stranger_that_says_nothing_does_not_keep_ranks_out(listener, folder, monkeypatch):
    monkeypatch.setattr("p2ptrain.team.handshake.HELLO_S", 0.1)
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as noisy:
        silent.connect(str(folder / "leader"))
        noisy.connect(str(folder / "leader"))
        noisy.sendall(b"GET / HTTP/1.1\r\n" * 10)
        thread, found = dialing(folder / "leader", KEY, 1, 5.0)
        (connection,) = listener.connect(2, 5.0)
        thread.join()
        connection.close()
        found[0].close()


def test_a_folder_that_others_may_enter_is_refused(folder):
    folder.chmod(0o755)
    with pytest.raises(TeamError, match="others may enter the folder"):
        RankListener(folder / "leader", KEY)
    with pytest.raises(TeamError, match="others may enter the folder"):
        dial(folder / "leader", KEY, 1)


def test_a_path_too_long_for_a_socket_is_refused(folder):
    with pytest.raises(TeamError, match="is longer than 100 bytes"):
        RankListener(folder / ("x" * 100), KEY)


def test_a_path_that_is_taken_is_refused(folder):
    (folder / "leader").touch()
    with pytest.raises(TeamError, match=r"connecting the ranks: .*leader: .*in use"):
        RankListener(folder / "leader", KEY)


def test_a_leader_that_is_not_there_is_an_error(folder):
    with pytest.raises(TeamError, match="connecting the ranks"):
        dial(folder / "leader", KEY, 1)


# --- lines ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ends():
    pair = socket.socketpair()
    lines = [RankConnection(SocketLine(each), 64) for each in pair]
    yield lines[0], lines[1], pair[1]
    for line in lines:
        line.close()


def test_a_frame_arrives_whole(ends):
    ours, theirs, _ = ends
    ours.send(TeamFrame(b"{}", [b"", b"abc", memoryview(bytes(61))]), 1.0)
    frame = theirs.receive(1.0)
    assert (frame.body, [bytes(blob) for blob in frame.blobs]) == (b"{}", [b"", b"abc", bytes(61)])


@pytest.mark.parametrize("sent", [b"", b"\xa5", bytes([MAGIC, VERSION, 0, 1, 0, 0, 0, 1, 7])])
def test_a_silent_rank_is_an_error_in_time(ends, sent):
    ours, _, raw = ends
    raw.sendall(sent)
    with pytest.raises(NetworkError, match="does not answer"):
        ours.receive(0.1)
    with pytest.raises(NetworkError):
        ours.send(TeamFrame(b""), 0.1)  # nobody knows where the next frame begins


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (bytes([MAGIC, VERSION + 1, 0, 0, 0, 0, 0, 0]), "another version"),
        (bytes([MAGIC, VERSION, 0, 0, 1, 0, 0, 0]), "beyond the limits"),
        (bytes([MAGIC, VERSION, 255, 255, 0, 0, 0, 0]), "beyond the limits"),
        (bytes([MAGIC, VERSION, 0, 1, 0, 0, 0, 0]) + (65).to_bytes(8, "big"), "at most 64 may follow"),
    ],
)
def test_a_frame_beyond_the_limits_is_refused(ends, sent, why):
    ours, _, raw = ends
    raw.sendall(sent)
    with pytest.raises(RemoteError, match=why):
        ours.receive(1.0)


def test_a_rank_that_does_not_read_is_an_error_in_time(ends):
    ours, _, _ = ends
    with pytest.raises(NetworkError, match="does not read"):
        ours.send(TeamFrame(b"", [bytes(1 << 24)]), 0.1)


def test_a_request_may_begin_at_any_time_and_then_has_a_deadline(ends):
    ours, theirs, raw = ends
    threading.Timer(0.2, theirs.send, (TeamFrame(b"{}"), 1.0)).start()
    assert ours.receive(0.1, begins_any_time=True).body == b"{}"
    raw.sendall(bytes([MAGIC]))
    with pytest.raises(NetworkError, match="does not answer"):
        ours.receive(0.1, begins_any_time=True)


def test_the_longest_answer_fits():
    long = -1.2345678901234567e-300
    fit = FitRecord(sketched=long, unexplained=long, blocks=2**63 - 1, wrapped=long, is_known=False)
    answer = ShardAnswer(norms=[long] * MOST_NUMBERS, fits=[fit] * MOST_NUMBERS)
    assert len(answer.model_dump_json()) <= MOST_JSON_BYTES


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_shard_with_a_bug_ends_the_connection_at_once(ends):
    class Buggy:
        def proposals(self, exchange):
            raise RuntimeError("a bug")

    ours, theirs, _ = ends
    server = ShardServer(Buggy(), theirs)
    server.start()
    with pytest.raises(NetworkError, match="ended its connection"):
        RemoteShard(1, ours, 5.0).proposals(1)
    server.close()


def test_an_end_is_an_error(ends):
    ours, theirs, _ = ends
    theirs.close()
    with pytest.raises(NetworkError, match="ended its connection"):
        ours.receive(1.0)


def test_the_socket_of_a_killed_leader_is_replaced_and_that_of_a_living_one_is_not(folder):
    path = folder / "leader"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    living = RankListener(path, KEY)
    with pytest.raises(TeamError, match="in use"):
        RankListener(path, KEY)
    assert path.is_socket()
    living.close()
