"""Nodes, links and the directory over real p2pd processes on loopback."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import uvloop

from p2ptrain.base.errors import NetworkError, RemoteError, UserError
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.framing import FrameKind
from p2ptrain.net.directory import MAX_FINISHED, DhtDirectory, PresenceValidator, presence_key
from p2ptrain.net.identity import Identity, verify
from p2ptrain.net.links import Limits
from p2ptrain.net.manifest_service import fetch_manifest, serve_manifest
from p2ptrain.net.node import Node
from p2ptrain.net.p2pd import daemon as daemon_module
from p2ptrain.net.p2pd.daemon import Daemon
from p2ptrain.net.p2pd.socket_folder import sweep
from p2ptrain.net.payload import receive_payload, send_payload
from p2ptrain.net.rate_limiter import RateLimit, RateLimiter
from p2ptrain.net.transport import MAX_HANGING, P2PTransport
from p2ptrain.ports import Link
from p2ptrain.swarm.messages import PeerState, Presence
from p2ptrain.swarm.presence_buckets import PresenceBucket
from p2ptrain.wire import encode_presence

pytestmark = pytest.mark.net

RUN = RunId("ab" * 32)
LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
PLENTY = RateLimit(burst=10_000.0, per_s=1.0)
REMOTE = Path(__file__).with_name("remote_node.py")


@dataclass
class Swarm:
    """Two nodes on one loop; the second knows a dead bootstrap and the first."""

    runner: asyncio.Runner
    identities: list[Identity]
    nodes: list[Node]

    @property
    def bootstrap(self) -> str:
        return f"{self.nodes[0].addresses[0]}/p2p/{self.nodes[0].peer_id}"


async def until(condition: Callable[[], bool], patience_s: float = 60.0) -> None:
    async with asyncio.timeout(patience_s):
        while not condition():
            await asyncio.sleep(0.02)


async def drain(link: Link) -> None:
    while True:
        await link.receive()


async def flood(link: Link) -> None:
    while True:
        await link.send(FrameKind.CHUNK, b"x" * 262144)


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    home = tmp_path_factory.mktemp("swarm")
    identities = [Identity.load_or_create(home / f"{name}.key") for name in ("first", "second", "dead")]

    async def start() -> list[Node]:
        first = await Node.start(identities[0], RUN, listen=LOOPBACK, local=True)
        bootstraps = [f"/ip4/127.0.0.1/tcp/1/p2p/{identities[2].peer_id}", f"{first.addresses[0]}/p2p/{first.peer_id}"]
        second = await Node.start(identities[1], RUN, listen=LOOPBACK, bootstraps=bootstraps, local=True)
        await until(lambda: first.has_company and second.has_company)
        return [first, second]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the loop of real peers
        swarm = Swarm(runner, identities, runner.run(start()))
        yield swarm
        for node in swarm.nodes:
            runner.run(node.close())
            runner.run(node.close())


@dataclass
class Remote:
    process: subprocess.Popen[str]
    peer: PeerId
    addresses: list[str]
    p2pd: int


@pytest.fixture
def remote(swarm: Swarm, tmp_path: Path) -> Iterator[Remote]:
    command = [sys.executable, str(REMOTE), str(tmp_path / "remote.key"), RUN, swarm.bootstrap]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        where = json.loads(process.stdout.readline())
        yield Remote(process, where["peer"], where["addresses"], where["p2pd"])
        process.send_signal(signal.SIGCONT)
        process.kill()
    sweep(Path(tempfile.gettempdir()))


def presence_of(identity: Identity, node: Node, step: int = 1) -> Presence:
    record = Presence(
        identity.peer_id, RUN, node.addresses, PeerState.TRAINING, step, 2.0, True, "fox", time.time(), 60.0
    )
    return identity.sign(record)


def test_p2pd_has_the_peer_id_we_computed(swarm: Swarm):
    for identity, node in zip(swarm.identities, swarm.nodes, strict=False):
        assert node.daemon.p2p.peer_id.to_base58() == identity.peer_id


def test_dials_do_not_come_from_the_listening_port(swarm: Swarm):
    """Check the source port: else two peers that dial each other at the same time may fail."""
    port = int(swarm.nodes[1].addresses[0].rpartition("/")[2])
    sockets = psutil.Process(swarm.nodes[1].daemon.p2p._child.pid).net_connections("tcp")
    assert [each.status for each in sockets if each.laddr.port == port and each.status != "LISTEN"] == []
    assert "ESTABLISHED" in [each.status for each in sockets]


def test_a_payload_crosses_both_ways_at_once(swarm: Swarm):
    part, answer = os.urandom(3_000_000), os.urandom(2_000_000)

    async def swap(link: Link) -> None:
        async with asyncio.TaskGroup() as both:
            both.create_task(send_payload(link, [answer, b""]))
            got.append(await receive_payload(link, [len(part)]))

    async def main() -> list[bytearray]:
        transport = P2PTransport(swarm.nodes[0], "/test/swap")
        await transport.listen(swap)
        link = await P2PTransport(swarm.nodes[1], "/test/swap").open(swarm.nodes[0].peer_id, swarm.nodes[0].addresses)
        assert link.peer == swarm.nodes[0].peer_id
        assert swarm.nodes[1].streams[link.peer] == 1
        async with asyncio.TaskGroup() as both:
            both.create_task(send_payload(link, [part]))
            received = both.create_task(receive_payload(link, [len(answer), 0]))
        with pytest.raises(NetworkError, match="ended"):
            await link.receive()
        await link.close()
        with pytest.raises(NetworkError):
            await P2PTransport(swarm.nodes[1], "/test/unknown").open(swarm.nodes[0].peer_id)
        await transport.close()
        assert [node.streams for node in swarm.nodes] == [Counter(), Counter()]
        return received.result()

    got: list[list[bytearray]] = []
    assert swarm.runner.run(main()) == [answer, b""]
    assert got == [[part]]


def test_presences_are_seen_by_all_and_forgeries_by_nobody(swarm: Swarm):
    async def main() -> None:
        directories = [DhtDirectory(node.dht, RUN) for node in swarm.nodes]
        records = [presence_of(identity, node) for identity, node in zip(swarm.identities, swarm.nodes, strict=False)]
        for directory, record in zip(directories, records, strict=True):
            await directory.announce(record)
        for directory in directories:
            assert {record.peer for record in await directory.lookup()} == {record.peer for record in records}
            assert all(map(verify, await directory.lookup()))

        forged = replace(records[0], step=99, issued_at=records[0].issued_at + 5.0)
        dht = swarm.nodes[1].dht
        honest, dht.protocol.record_validator = dht.protocol.record_validator, None
        try:
            key, until_then = presence_key(RUN, PresenceBucket(0, 0)), forged.issued_at + forged.lifetime_s
            await dht.store(key, encode_presence(forged), until_then, subkey=forged.peer, exclude_self=True)
            await dht.store("spam", b"x" * 1000, until_then, exclude_self=True)
        finally:
            dht.protocol.record_validator = honest
        assert isinstance(honest, PresenceValidator)
        assert {record.step for record in await directories[0].lookup()} == {1}
        assert await swarm.nodes[0].dht.get("spam", latest=True) is None

    swarm.runner.run(main())


def test_as_many_finished_peers_as_have_places_are_found_and_no_more(swarm: Swarm, tmp_path: Path):
    identities = [Identity.load_or_create(tmp_path / f"{number}.key") for number in range(MAX_FINISHED + 1)]

    async def main() -> None:
        first, second = (node.directory for node in swarm.nodes)
        for node in swarm.nodes:
            node.end_at(2.0)
        farewells = [replace(presence_of(each, swarm.nodes[0]), state=PeerState.LEAVING) for each in identities]
        farewells = [each.sign(farewell) for each, farewell in zip(identities, farewells, strict=True)]
        await first.keep_finished(farewells[0])
        sealed = await first.sealed_finished()
        until_s = sealed[farewells[0].peer][1]
        records = {each.peer: (encode_presence(each), until_s) for each in farewells}
        await second.keep_sealed(dict(list(records.items())[:MAX_FINISHED]))
        await second.keep_sealed(dict(list(records.items())[MAX_FINISHED:]))
        for directory in (first, second):
            assert {each.peer for each in await directory.finished()} == {
                each.peer for each in farewells[:MAX_FINISHED]
            }

    swarm.runner.run(main())


def test_a_manifest_is_served_to_those_who_ask_for_its_run(swarm: Swarm):
    async def main() -> None:
        server, client = swarm.nodes
        transport = await serve_manifest(server, b"manifest" * 1000)
        assert await fetch_manifest(client, server.peer_id, server.addresses, RUN) == b"manifest" * 1000
        with pytest.raises(NetworkError, match="another run"):
            await fetch_manifest(client, server.peer_id, server.addresses, RunId("cd" * 32))
        await transport.close()
        with pytest.raises(NetworkError):
            await fetch_manifest(client, server.peer_id, server.addresses, RUN)

    swarm.runner.run(main())


def test_garbage_is_a_remote_error_and_costs_the_link_only(swarm: Swarm):
    seen: list[Exception] = []

    async def note(link: Link) -> None:
        try:
            await link.receive()
        except (NetworkError, RemoteError) as error:
            seen.append(error)
            raise

    async def main() -> None:
        transport = P2PTransport(swarm.nodes[0], "/test/garbage")
        await transport.listen(note)
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xa1\x01\xff\xff\xff\xff", b"\xa1\x63\x00\x00\x00\x00"):
            _, stream = await swarm.nodes[1].daemon.open_stream(swarm.nodes[0].peer_id, "/test/garbage")
            await stream.write(garbage)
            async with asyncio.timeout(60):
                with pytest.raises((EOFError, OSError)):
                    await stream.read_exactly(1)
            stream.close()
        await transport.close()

    swarm.runner.run(main())
    assert [type(error) for error in seen] == [RemoteError] * 3


def test_too_many_links_are_turned_down(swarm: Swarm):
    async def hold(link: Link) -> None:
        await link.send(FrameKind.CHUNK, b"welcome")
        await asyncio.Event().wait()

    async def main() -> None:
        inbound = P2PTransport(swarm.nodes[0], "/test/flood", Limits(inbound_per_peer=2))
        await inbound.listen(hold)
        outbound = P2PTransport(swarm.nodes[1], "/test/flood")
        links = [await outbound.open(swarm.nodes[0].peer_id) for _ in range(2)]
        for link in links:
            assert await link.receive() == (FrameKind.CHUNK, b"welcome")
        third = await outbound.open(swarm.nodes[0].peer_id)
        with pytest.raises(NetworkError):
            await third.receive()
        await links[0].close()
        await inbound.close()
        with pytest.raises(NetworkError):
            await links[1].receive()

    swarm.runner.run(main())


def test_no_last_word_is_lost(swarm: Swarm):
    """Check that last messages arrive: without the wait at the end, one in some thousand is lost."""

    async def answer(link: Link) -> None:
        await link.send(*await link.receive())
        await link.close()

    async def ask(there: P2PTransport, number: int) -> None:
        link = await there.open(swarm.nodes[0].peer_id)
        body = number.to_bytes(4, "big")
        await link.send(FrameKind.MESSAGE, body)
        assert await link.receive() == (FrameKind.MESSAGE, body)
        await link.close()

    async def main() -> None:
        plenty = Limits(inbound=100, inbound_per_peer=100)
        here, there = (P2PTransport(node, "/test/last", plenty) for node in swarm.nodes)
        here._floods = RateLimiter(PLENTY, PLENTY)
        here._crowds = RateLimiter(PLENTY, PLENTY)
        await here.listen(answer)
        try:
            for first in range(0, 4000, 8):
                await asyncio.gather(*(ask(there, first + number) for number in range(8)))
            await until(lambda: not here._inbound)
        finally:
            await here.close()

    swarm.runner.run(main())


def test_who_asks_for_much_and_reads_nothing_holds_nothing(swarm: Swarm):
    """Check a client that requests much and reads nothing: p2pd would hold an open file per stream and connection."""
    node = swarm.nodes[0]

    async def give(link: Link) -> None:
        await link.receive()
        for _ in range(9):
            await link.send(FrameKind.CHUNK, bytes(100_000))

    def files() -> int:
        return int(psutil.Process(node.daemon.p2p._child.pid).num_fds())

    async def main() -> None:
        brisk = Limits(idle_s=0.5, slowest_rate=1e9)
        here, there = P2PTransport(node, "/test/deaf", brisk), P2PTransport(swarm.nodes[1], "/test/deaf")
        await here.listen(give)
        before, links = files(), []
        try:
            for _ in range(3 * MAX_HANGING):
                links.append(await there.open(node.peer_id, node.addresses))
                with contextlib.suppress(NetworkError):  # the connection was closed just before
                    await links[-1].send(FrameKind.MESSAGE, b"all of it")
                await until(lambda: not here._inbound)
            await until(lambda: files() < before + MAX_HANGING)
        finally:
            for link in links:
                link._stream.abort()
            await here.close()

    swarm.runner.run(main())


def test_a_dial_that_fails_is_a_network_error(swarm: Swarm):
    async def main() -> None:
        transport = P2PTransport(swarm.nodes[0])
        dead = swarm.identities[2].peer_id
        for peer, places in ((dead, ["/ip4/127.0.0.1/tcp/1"]), (dead, ["nonsense"]), (PeerId("nobody"), [])):
            with pytest.raises(NetworkError):
                await transport.open(peer, places)

    swarm.runner.run(main())


def test_a_remote_killed_during_download_is_a_network_error(swarm: Swarm, remote: Remote):
    async def main() -> None:
        link = await P2PTransport(swarm.nodes[0]).open(remote.peer, remote.addresses)
        await link.send(FrameKind.CHUNK, b"go")
        await link.receive()
        remote.process.kill()
        async with asyncio.timeout(60):
            with pytest.raises(NetworkError):
                await drain(link)

    swarm.runner.run(main())


def test_a_frozen_remote_is_a_network_error_within_the_deadline(swarm: Swarm, remote: Remote):
    async def main() -> None:
        link = await P2PTransport(swarm.nodes[0], limits=Limits(idle_s=4.0)).open(remote.peer, remote.addresses)
        await link.send(FrameKind.CHUNK, b"go")
        await link.receive()
        remote.process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(60):
            with pytest.raises(NetworkError, match="too long"):
                await drain(link)

    swarm.runner.run(main())


def test_a_remote_that_takes_nothing_is_a_network_error(swarm: Swarm, remote: Remote):
    async def main() -> None:
        limits = Limits(idle_s=0.5, slowest_rate=1e6)
        link = await P2PTransport(swarm.nodes[0], limits=limits).open(remote.peer, remote.addresses)
        async with asyncio.timeout(60):
            with pytest.raises(NetworkError):  # the remote node reads one frame and then only writes
                await flood(link)

    swarm.runner.run(main())


def test_a_swarm_without_its_bootstrap_is_rejoined_through_known_peers(swarm: Swarm, tmp_path: Path):
    async def main() -> None:
        identity = Identity.load_or_create(tmp_path / "late.key")
        known = [presence_of(swarm.identities[1], swarm.nodes[1])]
        dead = f"/ip4/127.0.0.1/tcp/1/p2p/{swarm.identities[2].peer_id}"
        late = await Node.start(identity, RUN, listen=LOOPBACK, bootstraps=[dead], known=known, local=True)
        try:
            await until(lambda: late.has_company)
        finally:
            await late.close()

    swarm.runner.run(main())


def test_a_lone_node_starts_and_says_that_nobody_answers(tmp_path: Path):
    async def main() -> None:
        identity = Identity.load_or_create(tmp_path / "lone.key")
        node = await Node.start(identity, RUN, listen=LOOPBACK, local=True)
        try:
            assert node.alive
            directory = DhtDirectory(node.dht, RUN)
            await directory.announce(presence_of(identity, node))
            with pytest.raises(NetworkError, match="no other node"):
                await directory.lookup()
        finally:
            await node.close()

    asyncio.run(main())


def test_addresses_that_cannot_be_used_are_the_owners_business(tmp_path: Path):
    identity = Identity.load_or_create(tmp_path / "id.key")

    async def refused(**addresses: list[str]) -> str:
        with pytest.raises(UserError) as caught:
            await Node.start(identity, RUN, **({"listen": LOOPBACK} | addresses))
        return str(caught.value)

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            assert f"127.0.0.1:{port} is in use" in await refused(listen=[f"/ip4/127.0.0.1/tcp/{port}"])
        assert "203.0.113.1:0 is not an address" in await refused(listen=["/ip4/203.0.113.1/tcp/0"])
        assert "'127.0.0.1:1'" in await refused(listen=["127.0.0.1:1"])
        assert "cannot be announced" in await refused(announce=["/ip4/203.0.113.1/tcp/0"])
        assert "bootstrap" in await refused(bootstraps=["/ip4/203.0.113.1/tcp/1"])

    asyncio.run(main())


def test_a_killed_p2pd_is_noticed_and_nothing_hangs(tmp_path: Path):
    async def main() -> None:
        identity = Identity.load_or_create(tmp_path / "id.key")
        node = await Node.start(identity, RUN, listen=LOOPBACK, local=True)
        os.kill(node.daemon.p2p._child.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            assert await node.died() == -signal.SIGKILL
            assert not node.alive
            with pytest.raises(NetworkError, match="p2pd ended"):
                await P2PTransport(node).open(PeerId(identity.peer_id), [])
            await node.close()

    asyncio.run(main())


def test_a_p2pd_that_nobody_hears_any_more_is_ended(tmp_path: Path):
    """Check a dead control connection: hivemind's reader stops at its own error while p2pd lives."""

    async def stumbles() -> None:
        raise RuntimeError("an answer that nobody waits for")

    async def main() -> None:
        daemon = await Daemon.start(Identity.load_or_create(tmp_path / "id.key").path, LOOPBACK)
        try:
            asyncio.create_task(stumbles()).add_done_callback(daemon._connection_ended)
            async with asyncio.timeout(60):
                assert await daemon.died() == -signal.SIGKILL
        finally:
            await daemon.close()

    asyncio.run(main())


def test_a_p2pd_that_lives_and_answers_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(daemon_module, "PULSE_S", 0.2)
    monkeypatch.setattr(daemon_module, "PULSE_DEADLINE_S", 1.0)

    async def main() -> None:
        daemon = await Daemon.start(Identity.load_or_create(tmp_path / "id.key").path, LOOPBACK)
        try:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2.0):
                    await daemon.died()  # it lives and answers
            assert daemon.alive
            os.kill(daemon.p2p._child.pid, signal.SIGSTOP)
            async with asyncio.timeout(60):
                assert await daemon.died() == -signal.SIGKILL
            assert "did not answer" in daemon.ending
        finally:
            await daemon.close()

    asyncio.run(main())


def test_a_p2pd_whose_socket_was_removed_is_ended_and_its_end_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check a socket for inbound streams: without it p2pd still answers."""
    monkeypatch.setattr(daemon_module, "PULSE_S", 0.1)

    async def main() -> None:
        daemon = await Daemon.start(Identity.load_or_create(tmp_path / "id.key").path, LOOPBACK)
        try:
            for each in await asyncio.gather(*(daemon.serve_streams(f"/{i}", lambda stream: None) for i in range(2))):
                place = Path(each.sockets[0].getsockname())
                os.utime(place, (1.0, 1.0))
            died = asyncio.create_task(daemon.died())
            async with asyncio.timeout(60):
                while place.stat().st_mtime == 1.0:  # a cleaner goes by age
                    await asyncio.sleep(0.01)
                place.unlink()
                assert await died == -signal.SIGKILL
            assert daemon.ending == f"its sockets in {daemon._folder.path} were removed"
        finally:
            await daemon.close()

    asyncio.run(main())


def test_strangers_lead_a_node_neither_to_its_own_machine_nor_elsewhere(tmp_path: Path, swarm: Swarm):
    """Check a public node: loopback addresses in records are not dialed, those that its owner names are."""

    async def main() -> None:
        first = swarm.nodes[0]
        cautious = await Daemon.start(Identity.load_or_create(tmp_path / "id.key").path, ["/ip4/0.0.0.0/tcp/0"])
        try:
            await cautious.own_addresses()
            async with asyncio.timeout(60):
                with pytest.raises(NetworkError):
                    await cautious.connect(first.peer_id, first.addresses)
                cautious.caution.trust([swarm.bootstrap])
                await cautious.connect(first.peer_id, first.addresses)
        finally:
            await cautious.close()

    swarm.runner.run(main())


def test_nothing_stays_after_close(tmp_path: Path):
    async def main() -> tuple[int, Path]:
        identity = Identity.load_or_create(tmp_path / "id.key")
        daemon = await Daemon.start(identity.path, LOOPBACK)
        folder = daemon._folder.path
        assert folder.exists()
        assert os.getsid(daemon.p2p._child.pid) == daemon.p2p._child.pid  # Ctrl+C in a terminal does not reach it
        pid = daemon.p2p._child.pid
        await daemon.close()
        return pid, folder

    pid, folder = asyncio.run(main())
    assert not psutil.pid_exists(pid)
    assert not folder.exists()


def test_nothing_stays_after_sigkill_and_a_sweep(swarm: Swarm, tmp_path: Path):
    with tempfile.TemporaryDirectory(dir="/tmp") as short_folder:
        command = [sys.executable, str(REMOTE), str(tmp_path / "id.key"), RUN, swarm.bootstrap]
        environment = os.environ | {"TMPDIR": short_folder}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            p2pd = psutil.Process(json.loads(process.stdout.readline())["p2pd"])
            assert sweep(Path(short_folder)) == []  # its owner lives
            process.kill()
        p2pd.wait(60)
        [left] = Path(short_folder).iterdir()
        assert sweep(Path(short_folder)) == [left]
        assert not left.exists()
