"""Guarantees of the in-memory network, on which the driver's tests rely."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import virtual_time
from memory_network import MemoryLink, MemoryNetwork

from p2ptrain.base.errors import NetworkError, RemoteError, UnbegunError
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.framing import FrameKind
from p2ptrain.ports import Directory, Link, Transport
from p2ptrain.swarm.messages import PeerState, Presence

A, B = PeerId("a"), PeerId("b")


def now() -> float:
    return asyncio.get_running_loop().time()


async def linked(network: MemoryNetwork, handler: Callable[[Link], Awaitable[None]]) -> MemoryLink:
    """Return A's end of a link to B."""
    await network.transport(B).listen(handler)
    return await network.transport(A).open(B)


def test_a_frame_arrives_one_latency_later():
    async def main() -> None:
        arrivals = []

        async def echo(link: Link) -> None:
            arrivals.append(("opened by", link.peer, now()))
            kind, body = await link.receive()
            arrivals.append((kind, body, now()))
            await link.send(FrameKind.CHUNK, body)

        link = await linked(MemoryNetwork(lambda sender, receiver: 0.1 if sender == A else 0.3), echo)
        await asyncio.sleep(1.0)
        await link.send(FrameKind.MESSAGE, b"hello")
        assert await link.receive() == (FrameKind.CHUNK, b"hello")
        assert arrivals == [("opened by", A, 0.1), (FrameKind.MESSAGE, b"hello", 1.0 + 0.1)]
        assert now() == (1.0 + 0.1) + 0.3

    virtual_time.run(main())


def test_sending_never_waits_and_bandwidth_delays_arrival_in_order():
    async def main() -> None:
        arrivals = []

        async def drain(link: Link) -> None:
            for _ in range(3):
                arrivals.append(((await link.receive())[1][:1], now()))

        link = await linked(MemoryNetwork(0.5, bandwidth=1000.0), drain)
        await link.send(FrameKind.CHUNK, b"x" * 1000)
        await link.send(FrameKind.CHUNK, b"y")
        await link.send(FrameKind.CHUNK, b"z" * 2000)
        assert now() == 0.0
        await asyncio.sleep(10)
        assert arrivals == [(b"x", 1.5), (b"y", 1.5), (b"z", 2.5)]

    virtual_time.run(main())


def test_closing_travels_behind_what_was_sent():
    async def main() -> None:
        got = []

        async def read_all(link: Link) -> None:
            while True:
                got.append((await link.receive())[1])

        link = await linked(MemoryNetwork(0.1), read_all)
        await link.send(FrameKind.CHUNK, b"last words")
        await link.close()
        await link.close()
        with pytest.raises(NetworkError):
            await link.send(FrameKind.CHUNK, b"more")
        with pytest.raises(NetworkError):
            await link.receive()
        await asyncio.sleep(1)
        assert got == [b"last words"]

    virtual_time.run(main())


@pytest.mark.parametrize(("kind", "has_begun"), [(FrameKind.MESSAGE, False), (FrameKind.CHUNK, True)])
def test_an_end_says_whether_a_payload_had_begun(kind: FrameKind, has_begun: bool) -> None:
    async def main() -> None:
        async def say(link: Link) -> None:
            await link.send(kind, b"what they say")

        link = await linked(MemoryNetwork(), say)
        await link.receive()
        with pytest.raises(NetworkError) as caught:
            await link.receive()
        assert isinstance(caught.value, UnbegunError) is not has_begun

    virtual_time.run(main())


def test_a_cut_is_seen_by_both_sides_at_once_and_loses_frames():
    async def main() -> None:
        network = MemoryNetwork(1.0)
        ends = []

        async def wait(link: Link) -> None:
            try:
                await link.receive()
            except NetworkError:
                ends.append(now())
                raise

        link = await linked(network, wait)
        await asyncio.sleep(2.0)
        await link.send(FrameKind.CHUNK, b"lost")
        asyncio.get_running_loop().call_later(0.5, network.cut, A, B)
        with pytest.raises(NetworkError, match="cut"):
            await link.receive()
        await asyncio.sleep(0)
        assert ends == [2.5]
        with pytest.raises(NetworkError):
            await link.send(FrameKind.CHUNK, b"more")

    virtual_time.run(main())


def test_dials_fail_by_the_hook_and_where_nobody_listens():
    async def main() -> None:
        network = MemoryNetwork(fail=lambda dialer, dialed: dialer == A)

        async def ignore(link: Link) -> None:
            pass

        transport = network.transport(B)
        await transport.listen(ignore)
        with pytest.raises(NetworkError):
            await network.transport(A).open(B)
        await network.transport(PeerId("c")).open(B)
        await transport.close()
        with pytest.raises(NetworkError):
            await network.transport(PeerId("c")).open(B)

    virtual_time.run(main())


def test_a_closed_transport_ends_its_tasks():
    async def main() -> None:
        ended = asyncio.Event()

        async def forever(link: Link) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        network = MemoryNetwork(0.1)
        transport = network.transport(B)
        await transport.listen(forever)
        link = await network.transport(A).open(B)
        await asyncio.sleep(1)
        await transport.close()
        assert ended.is_set()
        with pytest.raises(NetworkError):
            await link.receive()

    virtual_time.run(main())


@pytest.mark.parametrize("error", [NetworkError("gone"), RemoteError("garbage")])
def test_their_faults_end_the_link_quietly(error):
    async def main() -> None:
        async def fail(link: Link) -> None:
            raise error

        link = await linked(MemoryNetwork(0.1), fail)
        with pytest.raises(NetworkError):
            await link.receive()

    virtual_time.run(main())


def test_a_bug_in_a_handler_is_loud():
    async def main() -> None:
        seen = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: seen.append(context["exception"]))

        async def fail(link: Link) -> None:
            raise ZeroDivisionError

        await linked(MemoryNetwork(), fail)
        await asyncio.sleep(1)
        assert [type(error) for error in seen] == [ZeroDivisionError]

    virtual_time.run(main())


def test_a_frame_that_does_not_exist_cannot_be_sent():
    async def main() -> None:
        async def ignore(link: Link) -> None:
            await link.receive()

        link = await linked(MemoryNetwork(), ignore)
        with pytest.raises(ValueError, match="no frame"):
            await link.send(FrameKind.MESSAGE, b"x" * 65537)

    virtual_time.run(main())


def test_the_directory_answers_after_its_latency_with_what_is_live_then():
    def presence(peer: PeerId, issued_at: float) -> Presence:
        return Presence(peer, RunId("r"), (), PeerState.TRAINING, 0, 0.0, True, "", issued_at, 60.0)

    async def main() -> None:
        network = MemoryNetwork()
        directory = network.directory(latency=0.2)
        await directory.announce(presence(B, 0.0))
        await directory.announce(presence(A, 50.0))
        assert [record.peer for record in await directory.lookup()] == [A, B]
        assert now() == 0.2
        await asyncio.sleep(60.0)
        assert [record.peer for record in await network.directory().lookup()] == [A]
        directory.down = True
        for call in (directory.lookup(), directory.announce(presence(B, 0.0))):
            with pytest.raises(NetworkError):
                await call

    virtual_time.run(main())


def test_the_fakes_are_the_ports():
    network = MemoryNetwork()
    transport: Transport = network.transport(A)
    directory: Directory = network.directory()
    assert transport is not None
    assert directory is not None
