"""Encrypted lines between the computers of a team: handshake, keys, altered records, and private addresses."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from p2ptrain.base.errors import DeviceError, NetworkError, RemoteError
from p2ptrain.team import sealed
from p2ptrain.team.connection import RankConnection, TeamFrame
from p2ptrain.team.lan_address import LanAddress, interface_of, is_private
from p2ptrain.team.sealed import Hello, Purpose, SealedLine, WrongKeyError, accept_rank, dial_leader, generation_key

KEY, OTHER = b"k" * 32, b"o" * 32
HELLO = Hello(Purpose.SHARD, 3, b"g" * 16)


class Meeting:
    """A listening socket on loopback, and one handshake."""

    def __init__(self, leaders_key: Callable[[Hello], bytes | None] = lambda hello: KEY) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        self.worker = ThreadPoolExecutor(1)
        self.accepted: Future[tuple[Hello, SealedLine]] = self.worker.submit(
            lambda: accept_rank(self.listener.accept()[0], leaders_key)
        )

    def dial(self, key: bytes = KEY) -> SealedLine:
        return dial_leader("127.0.0.1", self.port, key, HELLO)

    def close(self) -> None:
        self.worker.shutdown()
        self.listener.close()


@pytest.fixture
def meeting():
    made = Meeting()
    yield made
    made.close()


def test_both_sides_know_each_other_and_exchange_frames(meeting: Meeting) -> None:
    rank = meeting.dial()
    hello, leader = meeting.accepted.result(5)
    assert hello == HELLO
    assert rank.own_host == leader.other_host == "127.0.0.1"
    blob = bytes(range(256)) * 4096  # longer than a record
    ours, theirs = RankConnection(rank, 2 * len(blob)), RankConnection(leader, 2 * len(blob))
    for one, other in ((ours, theirs), (theirs, ours)):
        sending = threading.Thread(target=one.send, args=(TeamFrame(b"{}", [blob, b"", b"x"]), 5.0))
        sending.start()
        frame = other.receive(5.0, begins_any_time=True)
        sending.join()
        assert [bytes(each) for each in frame.blobs] == [blob, b"", b"x"]
    ours.close()
    with pytest.raises(NetworkError):
        theirs.receive(5.0, begins_any_time=True)
    theirs.close()


def test_another_key_is_an_error_on_both_sides(meeting: Meeting) -> None:
    with pytest.raises(WrongKeyError):
        meeting.dial(OTHER)
    with pytest.raises(WrongKeyError):
        meeting.accepted.result(5)


def test_a_line_that_nobody_expects_ends() -> None:
    made = Meeting(lambda hello: None)
    with pytest.raises(NetworkError):
        made.dial()
    with pytest.raises(NetworkError, match="nobody"):
        made.accepted.result(5)
    made.close()


def test_a_leader_that_only_repeats_an_earlier_handshake_does_not_pass(meeting: Meeting) -> None:
    """A proof covers both sides' fresh public keys, so a recorded one is of no use."""
    recorded: list[bytes] = []

    def relay() -> None:
        client, _ = proxy.accept()
        server = socket.create_connection(("127.0.0.1", meeting.port))
        server.sendall(client.recv(4096))
        recorded.append(server.recv(4096))
        client.sendall(recorded[0])
        server.sendall(client.recv(4096))
        again, _ = proxy.accept()
        again.recv(4096)
        again.sendall(recorded[0])
        for each in (client, server, again):
            each.close()

    with socket.create_server(("127.0.0.1", 0)) as proxy:
        port = int(proxy.getsockname()[1])
        thread = threading.Thread(target=relay)
        thread.start()
        dial_leader("127.0.0.1", port, KEY, HELLO).close()
        with pytest.raises(WrongKeyError):
            dial_leader("127.0.0.1", port, KEY, HELLO)
        thread.join()
    meeting.accepted.result(5)[1].close()


def test_a_silent_stranger_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed, "GREETING_S", 0.1)
    made = Meeting()
    with socket.create_connection(("127.0.0.1", made.port)), pytest.raises(NetworkError):
        made.accepted.result(5)
    made.close()


def pipe(change: Callable[[bytes], bytes]) -> RemoteError | NetworkError | bytearray:
    """Return what arrives of two records whose bytes were changed on the way."""
    (a, b), (c, d) = socket.socketpair(), socket.socketpair()
    sender, receiver = SealedLine(a, KEY, OTHER), SealedLine(d, OTHER, KEY)
    until = time.monotonic() + 5
    for data in (b"first", b"other"):
        sender.send(data, until)
    c.sendall(change(b.recv(4096)))
    c.close()
    try:
        return receiver.receive(10, until)
    except (RemoteError, NetworkError) as error:
        return error
    finally:
        for line in (sender, receiver):
            line.close()
        b.close()


RECORD = 4 + 5 + 16


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (lambda data: data, bytearray),
        (lambda data: data[:6] + bytes([data[6] ^ 1]) + data[7:], RemoteError),
        (lambda data: data[RECORD:] + data[:RECORD], RemoteError),
        (lambda data: data[:RECORD] * 2, RemoteError),
        (lambda data: data[RECORD:], RemoteError),
        (lambda data: data[:-1], NetworkError),
        (lambda data: data[:RECORD], NetworkError),
        (lambda data: b"\xff" * 4 + data[4:], RemoteError),
        (lambda data: b"\0" * 4 + data[4:], RemoteError),
    ],
)
def test_records_arrive_unchanged_and_in_order_or_not_at_all(
    change: Callable[[bytes], bytes], outcome: type[object]
) -> None:
    assert type(pipe(change)) is outcome


def test_nothing_readable_crosses_the_line() -> None:
    a, b = socket.socketpair()
    line = SealedLine(a, KEY, OTHER)
    line.send(b"secret" * 100, time.monotonic() + 5)
    assert b"secret" not in b.recv(4096)
    line.close()
    b.close()


def test_each_generation_has_a_key_of_its_own() -> None:
    assert len({generation_key(KEY, b"a" * 16), generation_key(KEY, b"b" * 16), generation_key(OTHER, b"a" * 16)}) == 3


@pytest.mark.parametrize("text", ["", "0.0.0.0", "8.8.8.8", "224.0.0.1", "host", "::1", "10.0.0.256", "10.0.0.1:0"])
def test_only_private_addresses_are_taken(text: str) -> None:
    with pytest.raises(DeviceError):
        LanAddress.parse(text)


@pytest.mark.parametrize("host", ["10.0.0.1", "172.16.3.4", "192.168.1.5", "100.64.0.9", "127.0.0.1", "169.254.1.1"])
def test_addresses_of_homes_tunnels_and_loopback_are_private(host: str) -> None:
    assert is_private(ipaddress.IPv4Address(host))
    assert LanAddress.parse(f"{host}:8000") == LanAddress(host, 8000)


def test_an_address_of_another_computer_is_an_error() -> None:
    assert interface_of("127.0.0.1").startswith("lo")
    with pytest.raises(DeviceError, match=r"no address 10\.255\.254\.253"):
        interface_of("10.255.254.253")
