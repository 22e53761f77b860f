"""Files that a run names by digest, over the network in memory: pieces, what breaks off, what is false or too much."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import virtual_time
from memory_network import MemoryNetwork

from p2ptrain.base.errors import CorpusError, NetworkError, RemoteError
from p2ptrain.base.ids import PeerId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.data.file_store import INDEX, MOST_STORED_BYTES, FileStore, NamedFile
from p2ptrain.net import file_service
from p2ptrain.net.file_service import EACH, MIN_COST, PIECE_BYTES, FileServer, download
from p2ptrain.net.payload import send_payload
from p2ptrain.net.rate_limiter import RateLimit
from p2ptrain.net.rpc import receive_message, send_message
from p2ptrain.net.throttle import Throttles
from p2ptrain.ports import Link
from peer.file_fetch import SOURCE_DEADLINE_S, Source, ask_for_file

CONTENT = bytes(range(256)) * (PIECE_BYTES // 100)  # three pieces, the last one short
SHA256 = hashlib.sha256(CONTENT).hexdigest()
FILE = NamedFile("weights", "--weights", SHA256)
HOST, OTHER, LIAR, ME = PeerId("host"), PeerId("other"), PeerId("liar"), PeerId("me")
Handler = Callable[[Link], Awaitable[None]]


@pytest.fixture
def server(tmp_path: Path) -> FileServer:
    path = tmp_path / SHA256
    path.write_bytes(CONTENT)
    return FileServer({SHA256: path}, clock=lambda: 0.0)


def false(content: bytes) -> Handler:
    """A peer that sends other bytes, as many as it says."""

    async def answer(link: Link) -> None:
        while True:
            match await receive_message(link, "files", 64):
                case ["piece", _, int(offset)]:
                    await send_message(link, ["piece", len(content)])
                    await send_payload(link, [content[offset : offset + PIECE_BYTES]])
                case _:
                    return

    return answer


def breaking(server: FileServer, after: int) -> Handler:
    """A peer that sends so many pieces and is gone."""

    async def answer(link: Link) -> None:
        for _ in range(after):
            _, digest, offset = await receive_message(link, "files", 64)
            await server._send(link, digest.hex(), offset)
        await receive_message(link, "files", 64)
        raise NetworkError("gone")

    return answer


def fetch(
    hosts: dict[PeerId, Handler], log: MemoryLog | None = None, within_s: float = 3600.0, file: NamedFile = FILE
) -> bytes | None:
    async def main() -> bytes | None:
        network = MemoryNetwork(latency=0.001)
        for name, handler in hosts.items():
            await network.transport(name).listen(handler)
        mine = network.transport(ME)

        async def sources() -> Sequence[Source]:
            return [(name, ()) for name in hosts]

        async with asyncio.timeout(within_s):
            return await ask_for_file(file, sources, mine.open, log or MemoryLog())

    return virtual_time.run(main())


def test_a_file_comes_in_pieces(server: FileServer) -> None:
    log = MemoryLog()
    assert fetch({HOST: server.answer}, log) == CONTENT
    assert log.kinds() == ["got file"]


def test_nobody_has_it() -> None:
    assert fetch({HOST: FileServer({}).answer, OTHER: FileServer({}).answer}) is None


def test_training_does_not_wait_for_a_file_that_exports_need(server: FileServer) -> None:
    optional = FILE._replace(what="settings", option="")
    log = MemoryLog()
    assert fetch({HOST: breaking(server, 0)}, log, within_s=5, file=optional) is None
    assert log.kinds() == ["no file"]
    assert fetch({HOST: breaking(server, 0), OTHER: server.answer}, file=optional) == CONTENT


def test_a_download_that_breaks_off_begins_again_at_another_peer(server: FileServer) -> None:
    sent: list[int] = []
    send = server._send

    async def counted(link: Link, sha256: str, offset: int) -> None:
        sent.append(offset)
        await send(link, sha256, offset)

    server._send = counted  # type: ignore[method-assign]
    assert fetch({HOST: breaking(server, 1), OTHER: server.answer}) == CONTENT
    assert sent == [0, 0, PIECE_BYTES, 2 * PIECE_BYTES]


def test_a_false_file_is_not_taken_and_its_sender_not_asked_again(server: FileServer) -> None:
    log = MemoryLog()
    assert fetch({HOST: false(bytes(len(CONTENT))), OTHER: server.answer}, log) == CONTENT
    assert log.kinds() == ["no file", "got file"]
    assert fetch({HOST: false(b"short")}) is None


@pytest.mark.parametrize("total", [len(CONTENT), len(CONTENT) - 1, PIECE_BYTES + 1, MOST_STORED_BYTES])
@pytest.mark.parametrize("pieces", [1, 2, 64])
def test_false_pieces_do_not_keep_the_file_away(server: FileServer, total: int, pieces: int) -> None:
    """Check that false pieces of a peer that breaks off, however long its file is said to be, cost no round."""

    async def liar(link: Link) -> None:
        for _ in range(min(pieces, -(-total // PIECE_BYTES) - 1)):
            await receive_message(link, "files", 64)
            await send_message(link, ["piece", total])
            await send_payload(link, [bytes(PIECE_BYTES)])
        raise NetworkError("gone")

    for hosts in {HOST: liar, OTHER: server.answer}, {HOST: breaking(server, 1), LIAR: liar, OTHER: server.answer}:
        log = MemoryLog()
        assert fetch(hosts, log) == CONTENT
        assert "waiting" not in log.kinds()


def test_a_peer_that_sends_slowly_gives_way_to_the_next(server: FileServer) -> None:
    async def slow(link: Link) -> None:
        while True:
            await receive_message(link, "files", 64)
            await asyncio.sleep(60)
            await send_message(link, ["piece", MOST_STORED_BYTES])
            await send_payload(link, [bytes(PIECE_BYTES)])

    assert fetch({HOST: slow, OTHER: server.answer}, within_s=SOURCE_DEADLINE_S + 5) == CONTENT


def test_a_mirror_that_never_ends_gives_way_to_the_next() -> None:
    class Mirror:
        where = "https://mirror"

        def __init__(self, pause_s: float) -> None:
            self.pause_s = pause_s

        async def fetch(self, digest: str) -> bytes:
            await asyncio.sleep(self.pause_s)
            return CONTENT

    async def nobody() -> Sequence[Source]:
        return []

    async def dial(peer: PeerId, addresses: Sequence[str]) -> Link:
        raise NetworkError("nobody is there")

    async def main() -> bytes | None:
        mirrors: list[Any] = [Mirror(1e6), Mirror(1.0)]
        async with asyncio.timeout(SOURCE_DEADLINE_S + 5):
            return await ask_for_file(FILE._replace(what=INDEX), nobody, dial, MemoryLog(), mirrors)

    assert virtual_time.run(main()) == CONTENT


@pytest.mark.parametrize(
    "reply",
    [["piece", -1], ["piece", MOST_STORED_BYTES + 1], ["piece", "1"], ["piece"], ["enough"], [], ["piece", 1, 2]],
)
def test_a_size_that_cannot_be_is_refused_before_any_byte(reply: list[Any]) -> None:
    async def host(link: Link) -> None:
        await receive_message(link, "files", 64)
        await send_message(link, reply)

    async def main() -> None:
        network = MemoryNetwork(latency=0.001)
        await network.transport(HOST).listen(host)
        with pytest.raises(RemoteError, match="expected the size of a file"):
            await download(await network.transport(ME).open(HOST, ()), SHA256, bytearray())

    virtual_time.run(main())


@pytest.mark.parametrize(
    "request_", [["piece", b"short", 0], ["piece", bytes(32), -1], ["piece", bytes(32), 2**40], ["file"], [], [[[[]]]]]
)
def test_a_request_that_cannot_be_ends_the_link(server: FileServer, request_: list[Any]) -> None:
    async def main() -> None:
        network = MemoryNetwork(latency=0.001)
        await network.transport(HOST).listen(server.answer)
        link = await network.transport(ME).open(HOST, ())
        await send_message(link, request_)
        with pytest.raises(NetworkError):
            await link.receive()

    virtual_time.run(main())


def test_one_peer_cannot_take_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EACH.burst >= 2 * MOST_STORED_BYTES
    monkeypatch.setattr(file_service, "EACH", RateLimit(burst=10.0 * MIN_COST, per_s=0.0))

    async def main() -> None:
        network = MemoryNetwork(latency=0.001)
        await network.transport(HOST).listen(FileServer({}).answer)
        link = await network.transport(ME).open(HOST, ())
        for _ in range(10):
            assert not await download(link, SHA256, bytearray())
        with pytest.raises(NetworkError):
            await download(link, SHA256, bytearray())
        assert not await download(await network.transport(OTHER).open(HOST, ()), SHA256, bytearray())

    virtual_time.run(main())


def test_a_peer_that_rests_or_has_given_its_share_sends_nothing(tmp_path: Path) -> None:
    for name, value in (("rests", True), ("gives", False)):
        rates = Throttles()
        setattr(rates, name, value)

        async def main(server: FileServer) -> None:
            network = MemoryNetwork(latency=0.001)
            await network.transport(HOST).listen(server.answer)
            with pytest.raises(NetworkError):
                await download(await network.transport(ME).open(HOST, ()), SHA256, bytearray())

        virtual_time.run(main(FileServer({}, rates)))


# --- the store --------------------------------------------------------------------------------------------------------


def test_a_stored_file_is_found_by_its_digest_and_not_if_it_is_damaged(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "files")
    assert store.find(SHA256) is None
    path = store.add(SHA256, CONTENT)
    assert store.find(SHA256) == path
    path.write_bytes(CONTENT[:-1])
    assert store.find(SHA256) is None
    with pytest.raises(ValueError, match="expected data with sha256"):
        store.add(SHA256, b"other")


def test_the_owners_file_is_stored_unless_it_is_too_large_or_another(tmp_path: Path) -> None:
    store, own = FileStore(tmp_path / "files"), tmp_path / "own.json"
    own.write_bytes(CONTENT)
    assert store.adopt(FILE, own) == tmp_path / "files" / SHA256
    other = tmp_path / "other.json"
    other.write_bytes(b"other")
    with pytest.raises(CorpusError, match="is not this run's weights"):
        store.adopt(FILE, other)
    with pytest.raises(CorpusError, match="cannot be read"):
        store.adopt(FILE, tmp_path / "none.json")
    with other.open("wb") as file:
        file.truncate(MOST_STORED_BYTES + 1)
    assert store.adopt(FILE, other) is None
