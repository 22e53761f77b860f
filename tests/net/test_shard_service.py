"""Shards over the network in memory: what a node has, pieces of it, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import virtual_time
from memory_network import MemoryNetwork

from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import PeerId
from p2ptrain.net import shard_service
from p2ptrain.net.file_service import BusyError
from p2ptrain.net.payload import receive_payload
from p2ptrain.net.rate_limiter import RateLimit
from p2ptrain.net.rpc import receive_message, send_message
from p2ptrain.net.shard_service import MOST_HELD, ShardServer, among, ask_held, bitmap, fetch_shard
from p2ptrain.net.throttle import Throttles
from p2ptrain.ports import Link
from p2ptrain.tokens.fetch_plan import GRACE_S
from p2ptrain.tokens.index import SHARD_BYTES, ShardIndex
from p2ptrain.tokens.store import ShardStore
from p2ptrain.tokens.writing import ShardWriter

HOST, ME = PeerId("host"), PeerId("me")


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    return ShardStore(tmp_path / "shards")


@pytest.fixture
def index(store: ShardStore) -> ShardIndex:
    """Two training shards, the second one short, and a held-out one."""
    writer = ShardWriter(store, 2)
    writer.add(np.arange(SHARD_BYTES // 2 + 1000) % 251, is_training=True)
    writer.add(np.arange(1000) % 251, is_training=False)
    return writer.finish(32)


async def held(link: Link, index: ShardIndex) -> tuple[frozenset[int], ...]:
    return tuple(among(bits, range(len(index.digests))) for bits in await ask_held(link, index.root))


def talk(server: ShardServer, *asks: Callable[[Link], Awaitable[Any]]) -> list[Any]:
    """Return what each asks of a server, on a link of its own, at once; an error in place of an answer."""

    async def main() -> list[Any]:
        network = MemoryNetwork(latency=0.001)
        await network.transport(HOST).listen(server.answer)

        async def one(ask: Callable[[Link], Awaitable[Any]]) -> Any:
            link = await network.transport(ME).open(HOST, ())
            try:
                return await ask(link)
            finally:
                await link.close()

        return await asyncio.gather(*map(one, asks), return_exceptions=True)

    return virtual_time.run(main())


def test_a_node_tells_which_shards_it_has_and_which_are_coming(store: ShardStore, index: ShardIndex) -> None:
    store.path(index.digests[1]).unlink()
    server = ShardServer(index, store, coming=lambda: {1})
    [found] = talk(server, lambda link: held(link, index))
    assert found == (frozenset({0, 2}), frozenset({1}))


def test_of_another_run_it_tells_nothing(store: ShardStore, index: ShardIndex) -> None:
    other = ShardIndex(2, 0, 1000, 1000, ("ab" * 32, "cd" * 32))
    writer = ShardWriter(store, 2)
    writer.add(np.arange(1000) % 17, is_training=True)
    writer.add(np.arange(1000) % 19, is_training=False)
    private = writer.finish(32).digests[0]  # of another run, in the same store
    server = ShardServer(index, store, coming=lambda: {1})
    found = talk(server, lambda link: held(link, other), lambda link: fetch_shard(link, private, print))
    assert found == [(frozenset(), frozenset()), None]


def test_a_shard_comes_whole(store: ShardStore, index: ShardIndex) -> None:
    sizes: list[int] = []
    [whole, absent] = talk(
        ShardServer(index, store),
        lambda link: fetch_shard(link, index.digests[0], sizes.append),
        lambda link: fetch_shard(link, "ab" * 32, sizes.append),
    )
    assert whole == store.path(index.digests[0]).read_bytes()
    assert sizes[0] == shard_service.PIECE_BYTES
    assert sizes[-1] == SHARD_BYTES
    assert absent is None


def test_a_node_that_serves_others_says_so(
    store: ShardStore, index: ShardIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_service, "MOST_SERVED_TO_ONE", 1)
    found = talk(ShardServer(index, store), *2 * [lambda link: fetch_shard(link, index.digests[0], len_of)])
    assert sorted(type(each) for each in found if not isinstance(each, bytes)) == [BusyError]


def test_a_bootstrap_that_serves_others_first_serves_then_whoever_has_got_least(
    store: ShardStore, index: ShardIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_service, "MOST_SERVED", 1)
    server, order = ShardServer(index, store, queue_s=10.0), list[str]()

    async def main() -> None:
        network = MemoryNetwork(latency=0.001)
        await network.transport(HOST).listen(server.answer)

        async def one(name: str, at: float) -> None:
            await asyncio.sleep(at)
            link = await network.transport(PeerId(name)).open(HOST, ())
            await fetch_shard(link, index.digests[0], len_of)
            order.append(name)
            await link.close()

        await one("amber", 0.0)
        await asyncio.gather(one("birch", 0.0), one("amber", 0.001), one("cedar", 0.002))

    virtual_time.run(main())
    assert order == ["amber", "birch", "cedar", "amber"]
    assert not server._waiting
    assert not server._transfers


def test_whoever_waits_too_long_at_a_bootstrap_hears_that_it_is_busy(
    store: ShardStore, index: ShardIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_service, "MOST_SERVED", 1)
    server = ShardServer(index, store, queue_s=10.0)

    async def hold(link: Link) -> bytes:
        await send_message(link, ["piece", bytes.fromhex(index.digests[0]), 0])
        await asyncio.sleep(15.0)
        return b""

    async def ask(link: Link) -> bytes | None:
        await asyncio.sleep(0.1)
        return await fetch_shard(link, index.digests[0], len_of)

    [_, found] = talk(server, hold, ask)
    assert isinstance(found, BusyError)
    assert not server._waiting


def test_slow_transfers_end_while_others_want_their_places(store: ShardStore, index: ShardIndex) -> None:
    """Check that two peers which read almost nothing do not keep all places."""
    server, others = ShardServer(index, store, clock=lambda: asyncio.get_running_loop().time()), []

    async def main() -> None:
        network = MemoryNetwork(latency=0.001)
        await network.transport(HOST).listen(server.answer)

        async def hold(name: str) -> float:
            link = await network.transport(PeerId(name)).open(HOST, ())
            began = asyncio.get_running_loop().time()
            with contextlib.suppress(NetworkError):  # the server ends it
                for offset in range(0, SHARD_BYTES, shard_service.PIECE_BYTES):
                    await send_message(link, ["piece", bytes.fromhex(index.digests[0]), offset])
                    await receive_message(link, "shards", 1000)
                    await receive_payload(link, [shard_service.PIECE_BYTES])
                    await asyncio.sleep(19.0)
            return asyncio.get_running_loop().time() - began

        holding = asyncio.gather(hold("amber"), hold("amber"), hold("birch"))
        await asyncio.sleep(1.0)
        while not others:
            assert asyncio.get_running_loop().time() < 2 * GRACE_S
            link = await network.transport(ME).open(HOST, ())
            with contextlib.suppress(BusyError):
                others.append(await fetch_shard(link, index.digests[0], len_of))
            await link.close()
            await asyncio.sleep(2.0)
        assert max(await holding) < 4 * GRACE_S
        link = await network.transport(PeerId("birch")).open(HOST, ())
        with pytest.raises(BusyError):
            await fetch_shard(link, index.digests[0], len_of)

    virtual_time.run(main())
    assert others == [store.path(index.digests[0]).read_bytes()]


def test_a_slow_transfer_goes_on_while_nobody_waits(store: ShardStore, index: ShardIndex) -> None:
    async def read_slowly(link: Link) -> int:
        got = bytearray()
        for offset in range(0, SHARD_BYTES // 2, shard_service.PIECE_BYTES):
            await send_message(link, ["piece", bytes.fromhex(index.digests[0]), offset])
            await receive_message(link, "shards", 1000)
            got += (await receive_payload(link, [shard_service.PIECE_BYTES]))[0]
            await asyncio.sleep(15.0)
        return len(got)

    assert talk(ShardServer(index, store), read_slowly) == [SHARD_BYTES // 2]


def test_a_shard_that_is_left_out_is_not_here(store: ShardStore, index: ShardIndex) -> None:
    server = ShardServer(index, store)
    server.leave_out(index.digests[0])
    found = talk(server, lambda link: held(link, index), lambda link: fetch_shard(link, index.digests[0], len_of))
    assert found == [(frozenset({1, 2}), frozenset()), None]


def len_of(size_bytes: int) -> None:
    pass


def test_one_peer_gets_so_much_and_no_shard_is_cut(
    store: ShardStore, index: ShardIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_service, "EACH", RateLimit(1.5 * SHARD_BYTES, 1.0))
    server = ShardServer(index, store, clock=lambda: 0.0)
    [first] = talk(server, lambda link: fetch_shard(link, index.digests[0], len_of))
    [second] = talk(server, lambda link: fetch_shard(link, index.digests[0], len_of))
    assert len(first) == SHARD_BYTES
    assert isinstance(second, BusyError)


def test_a_resting_peer_serves_nothing(store: ShardStore, index: ShardIndex) -> None:
    rates = Throttles()
    server = ShardServer(index, store, rates)
    rates.gives = False
    found = talk(server, lambda link: held(link, index), lambda link: fetch_shard(link, index.digests[0], len_of))
    assert all(isinstance(each, NetworkError) for each in found)


@pytest.mark.parametrize("request_", [["held"], ["held", b"short", 1], ["piece", b"x", 0], ["what"], []])
def test_other_requests_end_the_link(store: ShardStore, index: ShardIndex, request_: list[Any]) -> None:
    async def ask(link: Link) -> None:
        await send_message(link, request_)
        await receive_message(link, "shards", 1000)

    [found] = talk(ShardServer(index, store), ask)
    assert isinstance(found, NetworkError)


@pytest.mark.parametrize("answer", [["held"], ["held", 1, 2], ["held", b"", "x"], ["busy"]])
def test_answers_of_another_form_are_refused(index: ShardIndex, answer: list[Any]) -> None:
    async def serve(link: Link) -> None:
        await receive_message(link, "shards", 1000)
        await send_message(link, answer)

    async def main() -> None:
        network = MemoryNetwork(latency=0.001)
        await network.transport(HOST).listen(serve)
        await ask_held(await network.transport(ME).open(HOST, ()), index.root)

    with pytest.raises(Exception, match="expected the shards"):
        virtual_time.run(main())


def test_bits_are_numbers() -> None:
    numbers = frozenset({0, 7, 8, 1000, MOST_HELD - 1})
    assert among(bitmap(numbers), range(MOST_HELD)) == numbers
    assert among(bitmap(numbers), [7, 9, MOST_HELD]) == {7}
    assert bitmap({MOST_HELD}) == b""
    assert len(bitmap(numbers)) * 2 < shard_service.MAX_HELD_BYTES
