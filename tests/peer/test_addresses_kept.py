"""The addresses in the home are those by which others reach the peer now, so that links lead to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from swarm import STRANGER
from test_connection import connection_of

from p2ptrain.base.errors import HomeError
from p2ptrain.base.ids import PeerId
from p2ptrain.base.telemetry import EventLog
from p2ptrain.cli import run_command
from p2ptrain.host.tasks import TaskFigures
from p2ptrain.manifest import JoinLink, SignedManifest
from p2ptrain.net import address
from p2ptrain.net.identity import Identity
from p2ptrain.net.throttle import Throttles
from p2ptrain.page.listen_address import ListenAddress
from peer import network
from peer.cli import invite
from peer.duplicate_identity import IdentityWatch
from peer.home import Home
from peer.sharing import Sharing
from peer.start_options import PeerOptions
from peer.state import StatusView

RELAY = PeerId(STRANGER)
NEAR, NEAR_BOOTSTRAP = "/ip4/192.168.1.7/tcp/4001", "/ip4/192.168.1.2/tcp/31337"
CIRCUIT = address.through(RELAY, NEAR_BOOTSTRAP)


class StillConnection(network.Connection):
    """A connection without a node, whose addresses tests change."""

    async def start(self) -> None:
        self.port = 4001
        await self.move(NEAR)

    async def move(self, *places: str) -> None:
        self._reachability = cast(Any, SimpleNamespace(addresses=places, reachable=None))
        await self._moved()


def test_whoever_is_reached_through_a_relay_says_so_in_its_links(
    signed_run: Callable[..., SignedManifest],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Check the link before and after others have tried to dial the peer, which takes seconds."""
    signed, home = signed_run(), Home(tmp_path / "home")
    home.path.mkdir()
    home.save_manifest(signed)
    link = JoinLink(signed.run_id, (address.with_peer(NEAR_BOOTSTRAP, RELAY),))
    identity = Identity.load_or_create(home.identity)
    state = StatusView(identity.peer_id, "", lambda: ("starting", ""))
    showing = Sharing(state, cast(Any, SimpleNamespace(measured=None, traffic=None)), ListenAddress(), False)
    record = SimpleNamespace(task=SimpleNamespace(figures=TaskFigures(parameter_count=5)), figures=None)

    def invited() -> tuple[str, str]:
        with pytest.raises(SystemExit):
            run_command(invite, [str(home.path)], name="p2ptrain invite")
        said = capsys.readouterr()
        return said.out.strip(), said.err

    monkeypatch.setattr(network, "Connection", StillConnection)

    async def peer() -> None:
        async with contextlib.AsyncExitStack() as stack:
            log = stack.enter_context(contextlib.closing(EventLog(home.events)))
            watch = IdentityWatch(home, log)
            line = await network.connect(
                stack, PeerOptions(link), home, identity, signed, log, Throttles(), watch, lambda: False
            )
            showing.set_run(signed, home, cast(Any, record), local=False)
            state._sources = None  # as before there are figures
            at_first, warned = invited()
            assert f"@{NEAR}/" in at_first
            assert "Nobody outside your network" in warned
            assert "No peer is running" in warned  # since this test does not hold the home's lock
            assert at_first in state.document()["join"]
            await cast(Any, line).move(CIRCUIT, NEAR)
            later, warned = invited()
            assert JoinLink.parse(later).addresses == (
                address.with_peer(CIRCUIT, identity.peer_id),
                address.with_peer(NEAR, identity.peer_id),
                *link.addresses,
            )
            assert "Nobody outside your network" not in warned
            assert later in state.document()["join"]

    asyncio.run(peer())
    assert home.load_addresses().port == 4001


def test_a_connection_says_that_it_is_reached_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a full disk: the change is noted, and other observers hear of it."""
    connection, log = connection_of(tmp_path)
    connection._reachability = cast(Any, SimpleNamespace(addresses=(CIRCUIT,), reachable=None))
    asyncio.run(connection._moved())
    me = Identity.load_or_create(tmp_path / "identity.key").peer_id
    assert Home(tmp_path).load_addresses().own == (address.with_peer(CIRCUIT, me),)
    assert log.kinds() == []

    def save(*_: object) -> None:
        raise HomeError("addresses.json cannot be written: No space left on device.", "Free some space.")

    monkeypatch.setattr(Home, "save_addresses", save)
    asyncio.run(connection._moved())
    assert log.kinds() == ["not saved"]
