"""Relays, dials and throttles over real p2pd processes on loopback.

A peer without a listener stands for one behind NAT.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import uvloop

from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.framing import FrameKind
from p2ptrain.net import address
from p2ptrain.net.identity import Identity
from p2ptrain.net.links import StreamLink
from p2ptrain.net.node import Node
from p2ptrain.net.p2pd.streams import Stream
from p2ptrain.net.relay.dial_back import DialOutcome, look, serve_reach
from p2ptrain.net.relay.noise import probe
from p2ptrain.net.relay.reachability import ReachabilityManager
from p2ptrain.net.relay.relay import Relay, RelayLimits, circuit_v2, reserve
from p2ptrain.net.throttle import Throttles
from p2ptrain.net.transport import P2PTransport
from p2ptrain.ports import Link

pytestmark = pytest.mark.net

RUN = RunId("ab" * 32)
LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]


@dataclass
class Place:
    """A public node, and two without a listener; all know the public one."""

    runner: asyncio.Runner
    public: Node
    hidden: tuple[Node, Node]

    @property
    def circuit(self) -> str:
        return address.through(self.public.peer_id, self.public.addresses[0])

    async def reserve(self, node: Node) -> None:
        await reserve(node.daemon, self.public.peer_id, self.public.addresses)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    home = tmp_path_factory.mktemp("relay")
    identities = [Identity.load_or_create(home / f"{name}.key") for name in ("public", "one", "other")]

    async def start() -> tuple[Node, ...]:
        public = await Node.start(identities[0], RUN, listen=LOOPBACK, local=True)
        link = [address.with_peer(public.addresses[0], public.peer_id)]
        hidden = [await Node.start(each, RUN, listen=[], bootstraps=link, local=True) for each in identities[1:]]
        return public, *hidden

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        public, one, other = runner.run(start())
        yield Place(runner, public, (one, other))
        for node in (public, one, other):
            runner.run(node.close())


async def echo(link: Link) -> None:
    while True:
        await link.send(*await link.receive())


@contextlib.asynccontextmanager
async def relaying(place: Place, rates: Throttles | None = None, **limits: float):
    relay = await Relay.start(place.public, RelayLimits(**limits), rates)
    try:
        yield relay
    finally:
        await relay.close()
        for node in place.hidden:  # circuits must not outlast their test
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(10.0):
                    while any(each.relay for each in await node.daemon.connections()):
                        await asyncio.sleep(0.02)


async def talk(link: Link) -> None:
    async with asyncio.timeout(30.0):
        while True:
            await link.send(FrameKind.CHUNK, bytes(50_000))
            await link.receive()


async def read_to_the_end(stream: Stream) -> None:
    async with asyncio.timeout(15.0):
        while True:
            await stream.read_exactly(1)


async def circuit_link(place: Place, protocol: str) -> tuple[P2PTransport, StreamLink]:
    """Return the other hidden node's echo transport, and a link to it through the relay."""
    one, other = place.hidden
    inbound = P2PTransport(other, protocol)
    await inbound.listen(echo)
    try:
        async with asyncio.timeout(30.0):
            while True:
                try:
                    return inbound, await P2PTransport(one, protocol).open(other.peer_id, [place.circuit])
                except NetworkError as error:
                    # The backoff of p2pd lasts 5 s after the dial that failed in the test before.
                    if "dial backoff" not in str(error):
                        raise
                    await asyncio.sleep(0.2)
    except BaseException:
        await inbound.close()
        raise


def test_two_hidden_nodes_talk_through_a_relay_and_know_it(place: Place) -> None:
    async def main() -> None:
        async with relaying(place):
            await place.reserve(place.hidden[1])
            inbound, link = await circuit_link(place, "/test/through")
            assert link.far_end.relay == place.public.peer_id
            for _ in range(20):  # libp2p's default relay would end it after 128 KiB
                body = os.urandom(100_000)
                await link.send(FrameKind.CHUNK, body)
                assert await link.receive() == (FrameKind.CHUNK, body)
            await link.close()
            await inbound.close()

    place.runner.run(main())


def test_what_a_relay_carries_waits_its_turn_under_the_owners_cap(place: Place) -> None:
    """Check waits with a clock that they advance: no real time passes, and all bytes are counted."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    async def main() -> None:
        rates = Throttles(clock=lambda: 0.0, sleep=sleep)
        rates.up.rate = 100_000.0
        async with relaying(place, rates):
            await place.reserve(place.hidden[1])
            inbound, link = await circuit_link(place, "/test/capped")
            await link.send(FrameKind.CHUNK, bytes(200_000))
            await link.receive()
            await link.close()
            await inbound.close()
        assert rates.up.total_bytes == rates.down.total_bytes > 400_000
        assert max(waited) > 3.0  # 400 kB at 100 kB/s, less the burst and the last wait

    place.runner.run(main())


def test_a_relay_reaches_its_guests_directly(place: Place) -> None:
    async def main() -> None:
        async with relaying(place):
            guest = place.hidden[1]
            await place.reserve(guest)
            inbound = P2PTransport(guest, "/test/guest")
            await inbound.listen(echo)
            link = await P2PTransport(place.public, "/test/guest").open(guest.peer_id, [place.circuit])
            assert link.far_end.relay is None
            await link.close()
            await inbound.close()

    place.runner.run(main())


def test_p2pd_takes_a_protected_connection_and_its_limit(place: Place, tmp_path: Path) -> None:
    async def main() -> None:
        daemon = place.public.daemon
        await daemon.protect(place.hidden[0].peer_id, "place")
        await daemon.protect(place.hidden[0].peer_id, "place", 0)
        with pytest.raises(NetworkError):
            await daemon.protect(PeerId("nobody"), "place")
        identity = Identity.load_or_create(tmp_path / "server.key")
        server = await Node.start(identity, RUN, listen=LOOPBACK, local=True, connections=2000)
        [process] = [
            each for each in psutil.Process().children(recursive=True) if str(identity.path) in str(each.cmdline())
        ]
        assert {"-connHi=2000", "-connLo=1500"} <= {*process.cmdline()}
        await server.close()

    place.runner.run(main())


def test_nobody_is_a_relay_unasked(place: Place) -> None:
    async def main() -> None:
        with pytest.raises(NetworkError):
            await place.reserve(place.hidden[0])

    place.runner.run(main())


def test_without_a_place_nobody_is_led_to(place: Place) -> None:
    async def main() -> None:
        async with relaying(place):
            await place.hidden[1].daemon.connect(place.public.peer_id, place.public.addresses)
            with pytest.raises(NetworkError):
                await circuit_link(place, "/test/uninvited")

    place.runner.run(main())


def test_places_run_out_and_a_renewal_takes_none(place: Place) -> None:
    async def main() -> None:
        async with relaying(place, places=1):
            for _ in range(10):
                await place.reserve(place.hidden[0])
            with pytest.raises(NetworkError, match="all its reservations are taken"):
                await place.reserve(place.hidden[1])
        async with relaying(place, places_per_origin=1):
            await place.reserve(place.hidden[1])
            with pytest.raises(NetworkError, match="all its reservations are taken"):
                await place.reserve(place.hidden[0])

    place.runner.run(main())


@pytest.mark.parametrize("limits", [{"size_bytes": 300_000}, {"seconds": 4.0}], ids=["bytes", "time"])
def test_a_circuit_is_cut_at_its_limit_and_dialed_again(place: Place, limits: dict[str, float]) -> None:
    async def main() -> None:
        async with relaying(place, **limits):
            await place.reserve(place.hidden[1])
            for protocol in (f"/test/limit/{limits}/1", f"/test/limit/{limits}/2"):
                inbound, link = await circuit_link(place, protocol)
                with pytest.raises(NetworkError):
                    await talk(link)
                await link.close()
                await inbound.close()

    place.runner.run(main())


def test_no_more_circuits_than_the_limit(place: Place) -> None:
    async def main() -> None:
        async with relaying(place, circuits=0):
            await place.reserve(place.hidden[1])
            with pytest.raises(NetworkError):
                await circuit_link(place, "/test/full")

    place.runner.run(main())


def test_garbage_does_not_disturb_a_relay(place: Place) -> None:
    async def main() -> None:
        async with relaying(place) as relay:
            await place.hidden[0].daemon.connect(place.public.peer_id, place.public.addresses)
            for garbage in (
                b"GET / HTTP/1.1\r\n" + b"x" * 80,
                b"\xff" * 20,
                circuit_v2.framed(b"\x08\x07"),
                circuit_v2.framed(b""),
            ):
                _, stream = await place.hidden[0].daemon.open_stream(place.public.peer_id, circuit_v2.HOP_PROTOCOL)
                await stream.write(garbage)
                with pytest.raises((EOFError, OSError)):
                    await read_to_the_end(stream)
                stream.close()
            await place.reserve(place.hidden[0])
            assert len(relay._tasks) <= 1

    place.runner.run(main())


def test_a_hidden_node_finds_shelter_and_another_when_its_relay_stops(place: Place, tmp_path: Path) -> None:
    async def main() -> None:
        hidden = place.hidden[0]
        log = MemoryLog()
        second = await Node.start(Identity.load_or_create(tmp_path / "second.key"), RUN, listen=LOOPBACK, local=True)
        manager = ReachabilityManager(hidden, log)
        try:
            async with relaying(place):
                task = asyncio.create_task(manager.run())
                async with asyncio.timeout(60.0):
                    while not manager._held:
                        await asyncio.sleep(0.02)
                assert manager.reachable is False
                assert manager.addresses == (place.circuit,)
            relay = await Relay.start(second, RelayLimits())
            hidden._bootstraps[second.peer_id] = second.addresses
            async with asyncio.timeout(120.0):
                while [*manager._held] != [second.peer_id]:
                    await asyncio.sleep(0.02)
            assert manager.addresses == (address.through(second.peer_id, second.addresses[0]),)
            assert "relay lost" in [kind for kind, _ in log.notes]
            task.cancel()
            await relay.close()
        finally:
            hidden._bootstraps.pop(second.peer_id, None)
            await second.close()

    place.runner.run(main())


def test_a_place_is_held_directly_also_at_a_relay_that_was_led_to_us_before(place: Place, tmp_path: Path) -> None:
    async def main() -> None:
        hidden = place.hidden[1]
        second = await Node.start(Identity.load_or_create(tmp_path / "second.key"), RUN, listen=LOOPBACK, local=True)
        relay = await Relay.start(second, RelayLimits())
        inbound = P2PTransport(hidden, "/test/led")
        try:
            async with relaying(place):
                await place.reserve(hidden)
                await inbound.listen(echo)
                link = await P2PTransport(second, "/test/led").open(hidden.peer_id, [place.circuit])
                assert link.far_end.relay == place.public.peer_id
                with pytest.raises(NetworkError, match="itself behind a relay"):
                    await reserve(hidden.daemon, second.peer_id, second.addresses, redial=False)
                await link.send(FrameKind.CHUNK, b"it is still there")
                assert await link.receive() == (FrameKind.CHUNK, b"it is still there")
                await reserve(hidden.daemon, second.peer_id, second.addresses)
                paths = [each.relay for each in await hidden.daemon.connections() if each.peer == second.peer_id]
                assert paths == [None]
                await link.close()
        finally:
            await inbound.close()
            await relay.close()
            await second.close()

    place.runner.run(main())


def test_a_node_is_dialed_back_at_its_port_and_at_no_other(place: Place, tmp_path: Path) -> None:
    async def main() -> None:
        reach = await serve_reach(place.public)
        asker = await Node.start(Identity.load_or_create(tmp_path / "asker.key"), RUN, listen=LOOPBACK, local=True)
        try:
            where = (place.public.peer_id, place.public.addresses)
            sight = await look(asker, *where, asker.port)
            assert (sight.dialed, address.host_of(sight.place)) == (DialOutcome.YES, "127.0.0.1")
            ports = {each.laddr.port for each in psutil.Process(asker.daemon.p2p._child.pid).net_connections("tcp")}
            assert address.port_of([sight.place]) in ports
            other = await look(asker, *where, place.public.port)
            assert (other.dialed, other.why[:12]) == (DialOutcome.NO, "another peer")
            closed = await look(asker, *where, 1)
            assert (closed.dialed, closed.why) == (DialOutcome.NO, "the connection is refused")
        finally:
            await asker.close()
            await reach.close()

    place.runner.run(main())


def test_a_probe_tells_a_node_from_other_programs(place: Place) -> None:
    async def main() -> None:
        assert await probe("127.0.0.1", place.public.port) == place.public.peer_id
        for words in (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4, b""):

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, words: bytes = words) -> None:
                writer.write(words)
                writer.close()

            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            with pytest.raises(NetworkError):
                await probe("127.0.0.1", server.sockets[0].getsockname()[1])
            server.close()

    place.runner.run(main())


def test_a_peer_id_that_is_none_is_led_nowhere(place: Place) -> None:
    async def main() -> None:
        async with relaying(place):
            with pytest.raises(NetworkError):
                await place.hidden[0].daemon.connect(PeerId("nobody"), [place.circuit])

    place.runner.run(main())
