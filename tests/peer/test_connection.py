"""The connection that outlives its p2pd: its errors at the start, and the nodes that it dials."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvloop

from p2ptrain.base.errors import DeviceError, NetworkError
from p2ptrain.base.ids import RunId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.manifest import JoinLink, SignedManifest
from p2ptrain.net import supervisor
from p2ptrain.net.identity import Identity
from p2ptrain.net.network_monitor import InterfaceAddresses, NetworkMonitor
from p2ptrain.net.node import Node
from p2ptrain.net.p2pd import daemon
from p2ptrain.net.parallel_streams import ParallelStreams
from p2ptrain.net.throttle import Throttles
from p2ptrain.swarm import PeerState, Presence
from p2ptrain.swarm.events import Announce
from peer.home import Addresses, Home
from peer.network import Connection
from peer.start_options import PeerOptions

RUN = RunId("ab" * 32)


def connection_of(folder: Path, link: JoinLink | None = None, **more: Any) -> tuple[Connection, MemoryLog]:
    """Return a connection of a home; ``more``: options of the peer, its monitor and throttles."""
    log = MemoryLog()
    identity = Identity.load_or_create(folder / "identity.key")
    kept = {name: more.pop(name) for name in ("rates", "monitor") if name in more}
    return Connection(Home(folder), identity, RUN, PeerOptions(link, **more), log, **kept), log


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60.0):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("error", [ConnectionRefusedError(111, "refused"), EOFError("gone"), NetworkError("too late")])
def test_a_p2pd_that_dies_while_it_starts_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def start(*_: object, **__: object) -> Node:
        raise error

    monkeypatch.setattr(Node, "start", start)

    async def main() -> None:
        connection, _ = connection_of(tmp_path)
        try:
            with pytest.raises(DeviceError, match="p2pd does not work"):
                await connection.start()
        finally:
            await connection.close()

    asyncio.run(main())


@pytest.mark.net
def test_a_p2pd_that_answers_nothing_is_replaced_and_its_owners_bootstrap_is_dialed_anywhere(
    tmp_path: Path, signed_run: Callable[..., SignedManifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a link that names loopback, as at the end of a tunnel, while the swarm is not limited to this machine."""
    monkeypatch.setattr(supervisor, "RESTART_S", (0.1, 60.0))
    signed = signed_run()

    async def main() -> None:
        here = Identity.load_or_create(tmp_path / "bootstrap.key")
        bootstrap = await Node.start(here, RUN, listen=["/ip4/127.0.0.1/tcp/0"], local=True)
        link = JoinLink(RUN, (f"{bootstrap.addresses[0]}/p2p/{bootstrap.peer_id}",))
        rates = Throttles()
        connection, log = connection_of(tmp_path, link, rates=rates, relay=True)
        try:
            await connection.start()
            await until(lambda: connection.node.has_company)
            await connection.serve_manifest(signed)
            assert connection.node.directory.end == signed.manifest.run.tokens
            served = [
                each._transport if isinstance(each, ParallelStreams) else each
                for each in connection._supervisor.services
            ]
            assert {each._rates for each in served} == {rates}
            killed = connection.node.daemon.p2p._child.pid
            Home(tmp_path).save_addresses(Addresses((), ()))
            monkeypatch.setattr(daemon, "PULSE_S", 0.2)
            monkeypatch.setattr(daemon, "PULSE_DEADLINE_S", 2.0)
            connection.node.daemon._kill()  # the new p2pd must be counted by the same throttles
            await until(lambda: "p2pd is back" in log.kinds())
            assert connection.node.daemon.p2p._child.pid != killed
            assert Home(tmp_path).load_addresses().port == connection.node.port
            os.kill(connection.node.daemon.p2p._child.pid, signal.SIGSTOP)
            await until(lambda: log.kinds().count("p2pd is back") == 2)
            whys = [fields["why"] for kind, fields in log.notes if kind == "p2pd died"]
            assert whys[0] == "exit code -9"
            assert "did not answer" in whys[-1]
            assert connection.node.directory.end == signed.manifest.run.tokens
            await until(lambda: connection.node.has_company)
        finally:
            await connection.close()
            await bootstrap.close()

    uvloop.run(main())


@pytest.mark.net
def test_a_change_of_the_network_makes_another_node(tmp_path: Path) -> None:
    home = InterfaceAddresses(frozenset({("wlan0", "192.168.1.2")}), frozenset({"192.168.1.2"}))
    phone = InterfaceAddresses(frozenset({("usb0", "10.0.0.7")}), frozenset({"10.0.0.7"}))

    async def main() -> None:
        here = Identity.load_or_create(tmp_path / "bootstrap.key")
        bootstrap = await Node.start(here, RUN, listen=["/ip4/127.0.0.1/tcp/0"], local=True)
        link = JoinLink(RUN, (f"{bootstrap.addresses[0]}/p2p/{bootstrap.peer_id}",))
        place = [home]
        connection, log = connection_of(
            tmp_path, link, monitor=NetworkMonitor(lambda: place[0]), listen=("/ip4/127.0.0.1/tcp/0",)
        )
        try:
            await connection.start()
            await until(lambda: connection.node.has_company)
            before = connection.node
            place[0] = phone
            await until(lambda: "network changed" in log.kinds())
            await until(lambda: connection._supervisor.current not in (None, before))
            await until(lambda: connection.node.has_company)
            assert before.daemon.p2p._child.returncode is not None
            assert log.kinds().count("network changed") == 1
            assert "p2pd died" not in log.kinds()
        finally:
            await connection.close()
            await bootstrap.close()

    uvloop.run(main())


def test_a_peer_that_others_could_dial_in_the_end_does_not_punch_holes_at_its_next_start(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.save_addresses(Addresses((), (), 4001, unreachable=True))
    connection, _ = connection_of(tmp_path)
    for reachable, is_unreachable in ((None, True), (True, False), (False, True)):
        connection._reachability = cast(Any, SimpleNamespace(addresses=(), reachable=reachable))
        asyncio.run(connection._moved())
        assert home.load_addresses().unreachable == is_unreachable


def test_the_swarm_has_no_known_size_while_p2pd_is_restarted(tmp_path: Path) -> None:
    """The driver asks for it after a lookup, when the node may just have gone."""
    connection, _ = connection_of(tmp_path)
    assert connection.size == 0


def test_a_peer_that_waits_for_text_is_announced_until_the_driver_announces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[Presence] = []

    async def announce(self: Connection, presence: Presence) -> None:
        announced.append(presence)

    monkeypatch.setattr(Connection, "announce", announce)

    async def main() -> None:
        connection, _ = connection_of(tmp_path)
        await connection.announce_early()
        await connection.announce_early()
        connection.sign(Announce(PeerState.TRAINING, 3, 40.0, settled=True))
        await connection.announce_early()

    asyncio.run(main())
    assert [(each.state, each.progress) for each in announced] == 2 * [(PeerState.JOINING, 0.0)]
