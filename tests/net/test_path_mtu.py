"""Paths that lose large packets in silence."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator

import pytest

from lab.hosts import Access, Host, Network
from lab.namespaces import check_support
from p2ptrain.net.path_mtu import loses_large_packets


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
def test_a_narrow_line_is_told_from_a_wide_one_and_from_silence(network: Network) -> None:
    server, wide = network.add("server"), network.add("wide", Access(router=True))
    narrow = network.add("narrow", Access(router=True, mtu=1300))

    async def scene() -> bool | None:
        async with Sink(server):
            assert await loses_large_packets(server.public, 4002) is None
            return await loses_large_packets(server.public, 4001)

    assert narrow.namespace.call(lambda: asyncio.run(scene())) is True
    assert wide.namespace.call(lambda: asyncio.run(scene())) is False
