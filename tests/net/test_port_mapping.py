"""Port mapping with a fake router (UPnP internet gateway device) on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import uvloop

from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import RunId
from p2ptrain.net import port_mapping
from p2ptrain.net.identity import Identity
from p2ptrain.net.node import Node
from p2ptrain.net.port_mapping import MAX_ANSWER_BYTES, MAX_DEPTH, PortMapper, elements, find_routers, routers_of

WAN = "urn:schemas-upnp-org:service:WANIPConnection:1"
HOME = "http://192.168.1.1:49152/desc.xml"
DESCRIPTION = f"""<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0">{{base}}<device><friendlyName>Router</friendlyName><serviceList>
<service><serviceType>urn:schemas-upnp-org:service:Layer3Forwarding:1</serviceType><controlURL>/other</controlURL>
</service></serviceList><deviceList><device><serviceList><service><serviceType>{WAN}</serviceType>
<controlURL>{{control}}</controlURL></service></serviceList></device></deviceList></device></root>"""


class FakeRouter:
    """A router on loopback that keeps mappings in a dict: external port to client, internal port and lease."""

    def __init__(self) -> None:
        self.mappings: dict[int, tuple[str, int, int]] = {}
        self.actions: list[str] = []
        self.searches = self.requests = 0
        self.only_permanent = False
        self.loses_answers = False
        self.location = ""
        self.answer: bytes | None = None  # instead of every answer over HTTP

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[partial[Coroutine[Any, Any, list[port_mapping.Router]]]]:
        """Serve search and control on free ports; yield the search of these ports."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.location = self.location or f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/desc.xml"
        router = self

        class Search(asyncio.DatagramProtocol):
            def connection_made(self, transport: Any) -> None:
                self.transport = transport

            def datagram_received(self, data: bytes, sender: tuple[str, int]) -> None:
                assert data.startswith(b"M-SEARCH * HTTP/1.1\r\n")
                router.searches += 1
                answer = f"HTTP/1.1 200 OK\r\nST: x\r\nLocation: {router.location}\r\n\r\n"
                self.transport.sendto(answer.encode(), sender)

        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(Search, local_addr=("127.0.0.1", 0))
        target = transport.get_extra_info("sockname")
        try:
            yield partial(find_routers, target, "127.0.0.1", lambda place: place.startswith("/ip4/127.0.0.1/"))
        finally:
            transport.close()
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"Content-Length: (\d+)", head)
            body = (await reader.readexactly(int(length[1]) if length else 0)).decode()
            self.requests += 1
            status, answer = self._answer(head, body)
            raw = f"HTTP/1.1 {status} x\r\nContent-Length: {len(answer)}\r\n\r\n{answer}".encode()
            is_lost = self.loses_answers and b"<r/>" in raw
            writer.write(b"" if is_lost else raw if self.answer is None else self.answer)
            await writer.drain()
        writer.close()

    def _answer(self, head: str, body: str) -> tuple[int, str]:
        if head.startswith("GET /desc.xml "):
            return 200, DESCRIPTION.format(base="", control="/control")
        assert head.startswith("POST /control ")
        action = re.search(rf'SOAPAction: "{WAN}#(\w+)"', head)
        assert action is not None
        given = dict(re.findall(r"<(New\w+)>([^<]*)</", body))
        self.actions.append(action[1])
        port = int(given["NewExternalPort"])
        if action[1] == "DeletePortMapping":
            del self.mappings[port]
            return 200, "<r/>"
        client, lease = given["NewInternalClient"], int(given["NewLeaseDuration"])
        if lease and self.only_permanent:
            return 500, "<e><UPnPError><errorCode>725</errorCode></UPnPError></e>"
        if port in self.mappings and self.mappings[port][0] != client:
            return 500, "<e><UPnPError><errorCode>718</errorCode></UPnPError></e>"
        self.mappings[port] = client, int(given["NewInternalPort"]), lease
        return 200, "<r/>"


@pytest.fixture(autouse=True)
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_mapping, "SEARCH_S", 0.3)


async def attempted(mapper: PortMapper) -> asyncio.Task[None]:
    task = asyncio.create_task(mapper.run())
    async with asyncio.timeout(30):
        await mapper.tried.wait()
    return task


async def ended(mapper: PortMapper, task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
    await mapper.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_port_is_mapped_renewed_and_removed(
    run: Callable[[Coroutine[Any, Any, None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_mapping, "RENEW_S", 0.1)

    async def main() -> None:
        router = FakeRouter()
        async with router.running() as find:
            mapper = PortMapper(31337, find)
            assert mapper.mapped_port == 0
            task = await attempted(mapper)
            assert mapper.mapped_port == 31337
            assert router.mappings == {31337: ("127.0.0.1", 31337, port_mapping.LEASE_S)}
            router.mappings.clear()  # it restarted
            async with asyncio.timeout(30):
                while not router.mappings:
                    await asyncio.sleep(0.02)
            await ended(mapper, task)
            assert router.mappings == {}
            assert mapper.mapped_port == 0
            assert router.actions[-1] == "DeletePortMapping"

    run(main())


def test_another_machines_port_stays_its_own() -> None:
    async def main() -> None:
        router = FakeRouter()
        router.mappings[31337] = others = ("192.168.1.9", 31337, 0)
        async with router.running() as find:
            mapper = PortMapper(31337, find, Random(1))
            task = await attempted(mapper)
            assert mapper.mapped_port not in (0, 31337)
            assert router.mappings[mapper.mapped_port] == ("127.0.0.1", 31337, port_mapping.LEASE_S)
            await ended(mapper, task)
        assert router.mappings == {31337: others}

    asyncio.run(main())


def test_a_router_without_leases_maps_until_the_mapping_is_removed() -> None:
    async def main() -> None:
        router = FakeRouter()
        router.only_permanent = True
        async with router.running() as find:
            mapper = PortMapper(31337, find)
            task = await attempted(mapper)
            assert router.mappings == {31337: ("127.0.0.1", 31337, 0)}
            await ended(mapper, task)
        assert router.mappings == {}

    asyncio.run(main())


def test_a_mapping_is_removed_whose_answer_or_renewal_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_mapping, "RENEW_S", 0.1)

    async def main() -> None:
        lost, silent = FakeRouter(), FakeRouter()
        lost.only_permanent = silent.only_permanent = True
        lost.loses_answers = True
        async with lost.running() as find:
            mapper = PortMapper(31337, find)
            task = await attempted(mapper)
            assert mapper.mapped_port == 0
            assert 31337 in lost.mappings
            await ended(mapper, task)
        assert lost.mappings == {}
        async with silent.running() as find:
            mapper = PortMapper(31337, find)
            task = await attempted(mapper)
            silent.answer = b""
            async with asyncio.timeout(30):
                while mapper.mapped_port:
                    await asyncio.sleep(0.02)
            assert 31337 in silent.mappings
            await ended(mapper, task)
        assert silent.mappings == {}

    asyncio.run(main())


def test_few_mappings_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check with routers that are another one at each search and do not answer."""
    monkeypatch.setattr(port_mapping, "RENEW_S", 0.0)
    searches = 0
    removed: list[str] = []

    async def find() -> list[port_mapping.Router]:
        nonlocal searches
        searches += 1
        return [port_mapping.Router(f"http://127.0.0.1:{searches}/", WAN)]

    async def act(router: port_mapping.Router, action: str, arguments: dict[str, object]) -> None:
        if action == "DeletePortMapping":
            removed.append(router.url)
        raise NetworkError("no answer")

    monkeypatch.setattr(port_mapping, "_act", act)

    async def main() -> None:
        mapper = PortMapper(31337, find)
        task = await attempted(mapper)
        while searches < 20:
            await asyncio.sleep(0)
        await ended(mapper, task)

    asyncio.run(main())
    last = range(searches - port_mapping.MAX_REMEMBERED + 1, searches + 1)
    assert removed == [f"http://127.0.0.1:{each}/" for each in last]


@pytest.mark.net
def test_a_node_that_others_may_dial_maps_its_port_until_it_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        router = FakeRouter()
        async with router.running() as find:
            monkeypatch.setattr(port_mapping, "find_routers", find)
            identity = Identity.load_or_create(tmp_path / "identity.key")
            node = await Node.start(identity, RunId("ab" * 32), listen=["/ip4/0.0.0.0/tcp/0"])
            try:
                async with asyncio.timeout(60):
                    await node.port_mapping_tried()
                assert node.mapped_port == node.port
                assert [mapping[1] for mapping in router.mappings.values()] == [node.port]
            finally:
                await node.close()
            assert router.mappings == {}
            own = ["/ip4/203.0.113.7/tcp/31337"]  # a port that the owner forwards
            for listen, announce in (["/ip4/127.0.0.1/tcp/0"], ()), ([], ()), (["/ip4/0.0.0.0/tcp/0"], own):
                node = await Node.start(identity, RunId("ab" * 32), listen=listen, announce=announce)
                await node.port_mapping_tried()
                await node.close()
        assert router.actions == ["AddPortMapping", "DeletePortMapping"]

    asyncio.run(main())


ANSWER = b"HTTP/1.1 200 OK\r\n\r\n"
BAD_ANSWERS = {
    "nothing": b"",
    "no HTTP": b"\xff" * 99,
    "redirect": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    "no XML": ANSWER + b"<",
    "entities": ANSWER + b'<!DOCTYPE r [<!ENTITY a "b">]><r>&a;</r>',
    "too long": ANSWER + b"<r>" + b"x" * 2 * MAX_ANSWER_BYTES,
    "cut": b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n<r/>",
    "bad chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 1000,
    "odd length": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n<r/>",
}


@pytest.mark.parametrize("answer", BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_bad_answers_leave_the_port_unmapped(answer: bytes) -> None:
    async def main() -> None:
        router = FakeRouter()
        router.answer = answer
        async with router.running() as find:
            mapper = PortMapper(31337, find)
            task = await attempted(mapper)
            assert mapper.mapped_port == 0
            assert router.requests
            assert not task.done()  # it tries again later
            await ended(mapper, task)

    asyncio.run(main())


def test_a_router_that_never_ends_its_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_mapping, "REQUEST_DEADLINE_S", 0.2)

    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while True:
                    writer.write(b"H")
                    await writer.drain()
                    await asyncio.sleep(0.02)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        router = FakeRouter()
        router.location = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        async with router.running() as find, server:
            assert await find() == []

    asyncio.run(main())


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.2:80/",
        "http://8.8.8.8/",
        "https://127.0.0.1/",
        "http://localhost/",
        "http://[::1]/",
        "file:///x",
    ],
)
def test_a_description_elsewhere_is_not_fetched(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def request(*_: object) -> None:
        raise AssertionError("fetched")

    monkeypatch.setattr(port_mapping, "_request", request)

    async def main() -> None:
        router = FakeRouter()
        router.location = location
        async with router.running() as find:
            assert await find() == []
        assert router.searches

    asyncio.run(main())


@pytest.mark.parametrize(
    ("gateways", "asked"), [({"192.168.1.1"}, True), ({"192.168.1.2"}, False), (set(), False), (None, True)]
)
def test_only_the_default_gateway_is_a_router(
    gateways: set[str] | None, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that no other machine of the network is asked, unless the gateway is unknown."""
    monkeypatch.setattr(port_mapping.interfaces, "default_gateways", lambda: gateways)
    assert port_mapping._is_gateway("/ip4/192.168.1.1/tcp/5000") is asked
    assert not port_mapping._is_gateway("/ip4/46.10.1.2/tcp/5000")


def test_a_loopback_address_is_no_router() -> None:
    async def main() -> None:
        router = FakeRouter()
        async with router.running() as find:
            assert len(await find()) > 0
            assert await find_routers(find.args[0], "127.0.0.1") == []
        assert router.searches == 4

    asyncio.run(main())


@pytest.mark.parametrize(
    ("control", "url"),
    [
        ("/control", "http://192.168.1.1:49152/control"),
        ("control?a=1&amp;b=2", "http://192.168.1.1:49152/control?a=1&b=2"),
        ("http://192.168.1.1:49152/c", "http://192.168.1.1:49152/c"),
        ("http://192.168.1.1:22/", None),
        ("http://192.168.1.2:49152/", None),
        ("//evil.example/", None),
        ("ftp://192.168.1.1:49152/", None),
        ("/a&#10;X: y", None),
        ("http://192.168.1.1:99999/", None),
    ],
)
def test_the_control_url_is_on_the_descriptions_host(control: str, url: str | None) -> None:
    found = routers_of(HOME, DESCRIPTION.format(base="", control=control).encode())
    assert [each.url for each in found] == ([url] if url else [])


def test_a_base_url_counts_if_it_is_the_routers() -> None:
    for host, expected in ("192.168.1.1:49152", ["http://192.168.1.1:49152/b/c"]), ("192.168.1.9", []):
        described = DESCRIPTION.format(base=f"<URLBase>http://{host}/b/</URLBase>", control="c")
        assert [each.url for each in routers_of(HOME, described.encode())] == expected


def test_documents_are_bounded() -> None:
    assert elements(b"<a:r xmlns:a='x'><a:b> 1 </a:b><c><d>2</d></c></a:r>")[0] == {"d": "2"}
    for document in b"<a>" * (MAX_DEPTH + 1), b"<!DOCTYPE a><a/>", b"<a>\xff", b"":
        with pytest.raises(NetworkError):
            elements(document)
