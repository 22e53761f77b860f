"""No stranger makes p2pd speak QUIC: a fake node names a QUIC address, and p2pd is asked to dial that node."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest
from quic_namer import name_address, quic_address

from p2ptrain.base import udp_filter
from p2ptrain.base.errors import NetworkError
from p2ptrain.net import address
from p2ptrain.net.identity import Identity
from p2ptrain.net.p2pd import daemon as daemon_module
from p2ptrain.net.p2pd.daemon import Daemon

pytestmark = [
    pytest.mark.net,
    pytest.mark.skipif(bool(udp_filter.unavailable()), reason=udp_filter.unavailable()),
]

LISTEN, STRANGER = "/ip4/127.0.0.1/tcp/0", "127.0.0.9"


async def datagram_after_dial(key: Path) -> bytes | None:
    """Return the first datagram that p2pd sends to the address that the fake node named; None if it sends none."""
    daemon = await Daemon.start(Identity.load_or_create(key).path, [LISTEN])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as named, contextlib.ExitStack() as ending:
        named.bind((STRANGER, 0))
        named.setblocking(False)
        try:
            port = address.port_of(await daemon.own_addresses())
            async with asyncio.timeout(60):
                place = quic_address(*named.getsockname())
                peer = await name_address("127.0.0.1", port, STRANGER, place)
                while any(each.peer == peer for each in await daemon.connections()):
                    await asyncio.sleep(0.02)
            dial = asyncio.create_task(daemon.connect(peer, [f"/ip4/{STRANGER}/tcp/1"]))
            ending.callback(dial.cancel)
            receive = asyncio.create_task(asyncio.get_running_loop().sock_recv(named, 2000))
            ending.callback(receive.cancel)
            # The dial fails at once if QUIC is refused, or waits for an answer to its datagram.
            await asyncio.wait([dial, receive], timeout=60, return_when=asyncio.FIRST_COMPLETED)
            if not receive.done():
                with pytest.raises(NetworkError, match=r"quic-v1.*operation not permitted"):
                    await dial
                return None
            return receive.result()
        finally:
            await daemon.close()


def test_p2pd_dials_no_quic_address_that_a_stranger_names(tmp_path: Path) -> None:
    assert asyncio.run(datagram_after_dial(tmp_path / "identity.key")) is None


def test_without_the_filter_p2pd_would_dial_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake node is believed; otherwise the other test would prove nothing."""
    launched = daemon_module.launched
    monkeypatch.setattr(daemon_module, "launched", lambda *command, **rest: launched(*command, **{**rest, "udp": True}))
    datagram = asyncio.run(datagram_after_dial(tmp_path / "identity.key"))
    assert datagram is not None
    assert datagram[0] & 0xC0 == 0xC0  # long header, and QUIC version 1 (RFC 9000)
    assert datagram[1:5] == b"\0\0\0\1"
