"""Mirrors of a real p2pd on this machine, which begins to punch holes once four of them name its public address."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from p2ptrain.net import address
from p2ptrain.net.identity import Identity
from p2ptrain.net.p2pd.daemon import Daemon
from p2ptrain.net.relay import mirror
from p2ptrain.net.relay.mirror import Mirrors, can_mirror

pytestmark = [pytest.mark.net, pytest.mark.skipif(not can_mirror(), reason="127.0.0.2 cannot be used here")]

PLACE = "/ip4/46.10.1.2/tcp/4001"
PATIENCE_S = 60.0
SHORT_S = 3.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def mirrored(folder: Path, punches: bool = True) -> AsyncIterator[tuple[Daemon, Mirrors]]:
    port = free_port()
    identity = Identity.load_or_create(folder / "identity.key")
    daemon = await Daemon.start(identity.path, [address.multiaddress("0.0.0.0", port)], punches=punches)
    mirrors = Mirrors(port)
    try:
        yield daemon, mirrors
    finally:
        await mirrors.close()
        await daemon.close()


async def seen(mirrors: Mirrors, patience_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            return await mirrors.is_punching.wait()
    return False


def test_four_mirrors_make_p2pd_punch_holes_and_leave_no_connection(tmp_path: Path) -> None:
    async def main() -> None:
        async with mirrored(tmp_path) as (daemon, mirrors):
            mirrors.show([PLACE])
            assert await seen(mirrors, PATIENCE_S)
            hosts = {address.host_of(each.place) for each in await daemon.connections()}
            assert hosts == set(mirror.SOURCES)
            mirrors.show(["/ip4/46.10.1.3/tcp/4001"])
            assert mirrors.places == ("/ip4/46.10.1.3/tcp/4001",)
            await mirrors.close()
            async with asyncio.timeout(PATIENCE_S):
                while await daemon.connections():
                    await asyncio.sleep(0.05)

    asyncio.run(main())


def test_three_mirrors_are_too_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "SOURCES", mirror.SOURCES[:3])

    async def main() -> None:
        async with mirrored(tmp_path) as (_, mirrors):
            mirrors.show([PLACE])
            assert not await seen(mirrors, SHORT_S)

    asyncio.run(main())


def test_a_node_that_is_not_to_punch_never_does(tmp_path: Path) -> None:
    async def main() -> None:
        async with mirrored(tmp_path, punches=False) as (daemon, mirrors):
            mirrors.show([PLACE])
            assert not await seen(mirrors, SHORT_S)
            assert daemon.dials_circuits

    asyncio.run(main())


def test_a_node_that_punches_names_no_public_address_and_dials_no_circuit_at_first(tmp_path: Path) -> None:
    async def main() -> None:
        async with mirrored(tmp_path) as (daemon, _):
            _, told = await daemon.p2p._client.identify()
            assert told
            assert not any(address.is_public(str(each)) for each in told)
            assert any(map(address.is_loopback, await daemon.own_addresses()))  # read from the interfaces
            assert not daemon.dials_circuits

    asyncio.run(main())


def test_a_mirror_outlives_a_p2pd_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a program that accepts connections and is silent costs a deadline, and a dead port a backoff."""
    monkeypatch.setattr(mirror, "HANDSHAKE_S", 0.2)
    monkeypatch.setattr(mirror, "RETRY_S", (0.05, 0.1))

    async def main() -> None:
        taken: list[str] = []

        def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            taken.append(writer.get_extra_info("peername")[0])

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        mirrors = Mirrors(server.sockets[0].getsockname()[1])
        mirrors.show([PLACE])
        async with asyncio.timeout(PATIENCE_S):
            while len(taken) < 12:
                await asyncio.sleep(0.05)
        assert set(taken) == set(mirror.SOURCES)
        await mirrors.close()
        server.close()

    asyncio.run(main())
