"""Paths that lose large packets in silence: the kernel's table, the examination, and what helps p2pd's connections."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from lab.hosts import Access, Host, Network
from lab.namespaces import check_support
from p2ptrain.net.path_mtu import PathVerdict, PathWatch, TcpRow, examine, parse

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0200000B:7A69 0203000B:B2C4 01 00004A38:00000000 01:0000011A 00000004     0        0 21573 2 0 20 4 30 10 -1
   1: 00000000:7A69 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 21534 1 0 100 0 0 10 0
"""
TABLE6 = "\n".join(
    f"0: {local}:7A69 {remote} 01 0:0 00:0 00000000 0 0 {inode} 1 0"
    for local, remote, inode in (
        ("local_address", "remote_address", "inode"),
        ("0000000000000000FFFF00000200000B", "0000000000000000FFFF00000203000B:B2C4", 21600),
        ("11000026010000000000000002000000", "11000026020000000000000002000000:0FA1", 21601),
    )
)
"""A table of IPv6 as the kernel shows it, without most of its spaces."""

CHILD = """
import socket, sys
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
sock.sendall(b"hello")
sys.stdin.readline()
sock.sendall(bytes(200_000))
sys.stdin.readline()
"""


def test_the_kernels_table() -> None:
    assert list(parse(TABLE)) == [TcpRow("11.0.3.2", 0xB2C4, 4, 21573)]
    assert list(parse(TABLE6)) == [
        TcpRow("11.0.3.2", 0xB2C4, 0, 21600),
        TcpRow("2600:11:0:2::2", 0x0FA1, 0, 21601),
    ]


@pytest.fixture
def network() -> Iterator[Network]:
    check_support()
    with Network() as network:
        yield network


class Sink:
    """A server on a host that reads everything."""

    def __init__(self, host: Host, port: int = 4001) -> None:
        self.received = 0
        self.address = host.public, port
        self._socket = host.namespace.call(lambda: socket.create_server(("0.0.0.0", port)))

    async def __aenter__(self) -> Sink:
        self._server = await asyncio.start_server(self._read, sock=self._socket)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.received += len(data)
        writer.close()


@pytest.mark.lab
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces are root's")
def test_a_child_behind_a_narrow_line_gets_through(network: Network) -> None:
    """Check a connection that hangs without the watch, the verdicts, and that the watch frees it."""
    server = network.add("server")
    narrow = network.add("narrow", Access(router=True, mtu=1300))
    found: list[tuple[str, PathVerdict]] = []
    child = subprocess.Popen(
        narrow.inside(sys.executable, "-I", "-S", "-c", CHILD, server.public, "4001"), stdin=subprocess.PIPE
    )
    assert child.stdin is not None

    async def scene() -> None:
        assert child.stdin is not None
        async with Sink(server) as sink:
            await _until(lambda: sink.received == 5)
            child.stdin.write(b"go\n")
            child.stdin.flush()
            await asyncio.sleep(2.0)
            assert sink.received == 5
            watch = PathWatch(child.pid, lambda host, verdict: found.append((host, verdict)))
            watching = asyncio.create_task(watch.run())
            await _until(lambda: sink.received > 200_000 and bool(found))
            watching.cancel()
            assert await examine(server.public, 4002) is None

    try:
        narrow.namespace.call(lambda: asyncio.run(scene()))
    finally:
        child.kill()
        child.communicate()
    assert found == [(server.public, PathVerdict(is_narrow=True, fragments_pass=True))]


async def _until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < until
        await asyncio.sleep(0.05)
