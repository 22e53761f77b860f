"""Port mapping by UPnP: asks the router to forward a TCP port to this machine, renews the lease, removes it at the end.

After SIGKILL a router without leases (error 725) keeps a mapping until it restarts, or until a peer that listens on the
same port, as the next one with the same home does, has ended.

Sources: UPnP Device Architecture 1.1 (search, description, control) and UPnP WANIPConnection:1 (actions, error codes).

Any machine of the local network may pose as a router. Therefore only the default gateway is asked, which alone can lead
the internet to us; where it is unknown, as on macOS, whichever private address answers the search. A description and
its control URL are read only from there; redirects, document types and large answers are refused; each request has a
deadline. Only the mapped port is used, and only after others dialed us there (``net.relay.reachability``); what the
router says of our public address is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import http.client
import io
import ipaddress
import logging
import re
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Any
from urllib.parse import urljoin, urlsplit
from xml.parsers import expat

from p2ptrain.base.errors import NetworkError
from p2ptrain.net import address, interfaces
from p2ptrain.net.p2pd.dialing import is_private

logger = logging.getLogger(__name__)

SEARCH_S = 3.0
"""Time to collect answers to a search: routers wait up to 2 s, as the request's MX header says."""
REQUEST_DEADLINE_S = 5.0
"""Timeout of one request to a router. Guess: the response times of real routers."""
ATTEMPT_DEADLINE_S = 15.0
"""Timeout of one attempt with all routers. Guess: the response times of real routers."""
CLOSE_DEADLINE_S = 2.0
"""Time to remove mappings at the end. Guess: the response times of real routers."""
LEASE_S = 7200
"""Lifetime of a mapping, as RFC 6886 (section 3.3) recommends for its kind of port mapping."""
RENEW_S = 600.0
"""Interval between renewals, and between searches without success. Guess: how often routers restart and lose their
mappings."""
MAX_ANSWER_BYTES = 1 << 16
"""Guess: the longest description of real routers."""
MAX_DATAGRAM_BYTES = 2048
MAX_DEPTH = 32  # of nested elements
MAX_ROUTERS = 4  # that are asked after one search
MAX_REMEMBERED = 8  # mappings that are removed at the end
PORTS_TRIED = 3

SEARCH_AT = ("239.255.255.250", 1900)
_DEVICE = "urn:schemas-upnp-org:device:InternetGatewayDevice:"
_SERVICES = re.compile(r"urn:schemas-upnp-org:service:WAN(IP|PPP)Connection:[12]")
_LOCATION = re.compile(rb"^location:[ \t]*([!-~]{1,512})[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)
_CONFLICT, _ONLY_PERMANENT = "718", "725"  # error codes of AddPortMapping


@dataclass(frozen=True, slots=True)
class Router:
    """A router's service for port mappings."""

    url: str
    service: str
    """Name and version of the service."""


class RouterRefusedError(NetworkError):
    """A router's refusal of an action, with its error code."""

    def __init__(self, code: str) -> None:
        super().__init__(f"the router refuses it: error {code}")
        self.code = code


class PortMapper:
    """Keeper of a mapping of one TCP port. ``run`` ends by cancellation; ``close`` then removes all mappings.

    Args:
        port: port on which this machine listens.
        find: searches the local network for routers.
    """

    def __init__(
        self, port: int, find: Callable[[], Awaitable[list[Router]]] | None = None, random: Random | None = None
    ) -> None:
        self._port = port
        self._find = find or find_routers
        self._random = random or Random()
        self._router: Router | None = None  # which holds the mapping
        self._outer = port  # port on the router
        self._made: dict[tuple[Router, int], None] = {}  # routers and their ports that may be mapped to us, newest last
        self.tried = asyncio.Event()
        """Set after the first attempt."""

    @property
    def mapped_port(self) -> int:
        """Port on which the router accepts connections for us; 0 without a mapping."""
        return 0 if self._router is None else self._outer

    async def run(self) -> None:
        """Map the port and keep it mapped."""
        while True:
            self._router = await self._holder()
            self.tried.set()
            await asyncio.sleep(RENEW_S)

    async def close(self) -> None:
        """Remove all mappings, also those whose renewal failed.

        A router that does not answer forgets them when the lease ends; see above for one without leases.
        """
        self._router = None
        made, self._made = self._made, {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await asyncio.gather(*(_remove(*place) for place in made))

    async def _holder(self) -> Router | None:
        """Return the router that now holds the mapping; None if none does."""
        try:
            async with asyncio.timeout(ATTEMPT_DEADLINE_S):
                if self._router is not None and await self._maps(self._router):
                    return self._router
                for router in await self._find():
                    if await self._maps(router):
                        return router
            logger.info("no port mapping: no router of this network offers it")
        except (NetworkError, TimeoutError) as error:
            logger.info("no port mapping: %s", error or "the routers are too slow")
        return None

    async def _maps(self, router: Router) -> bool:
        for _ in range(PORTS_TRIED):
            place = router, self._outer
            is_new = place not in self._made
            self._made[place] = None  # before the request: its answer may be lost
            if len(self._made) > MAX_REMEMBERED:
                del self._made[next(iter(self._made))]
            try:
                await self._add(router)
            except RouterRefusedError as refused:
                if is_new or refused.code == _CONFLICT:
                    del self._made[place]
                if refused.code != _CONFLICT:
                    logger.info("no port mapping: %s", refused)
                    return False
                self._outer = self._random.randrange(1024, 1 << 16)  # another machine has the port
            except NetworkError as error:
                logger.info("no port mapping: %s", error)
                return False
            else:
                return True
        return False

    async def _add(self, router: Router) -> None:
        mapping: dict[str, object] = {
            **_key(self._outer),
            "NewInternalPort": self._port,
            "NewInternalClient": _own_host(router),
            "NewEnabled": 1,
            "NewPortMappingDescription": "p2ptrain",
        }
        try:
            await _act(router, "AddPortMapping", {**mapping, "NewLeaseDuration": LEASE_S})
        except RouterRefusedError as refused:
            if refused.code != _ONLY_PERMANENT:
                raise
            await _act(router, "AddPortMapping", {**mapping, "NewLeaseDuration": 0})


async def find_routers(
    target: tuple[str, int] = SEARCH_AT, source: str = "", may_be_router: Callable[[str], bool] | None = None
) -> list[Router]:
    """Return routers of the local network with a service for port mappings. Raises NetworkError without a network.

    Args:
        target: where to send the search.
        source: our address towards the routers; empty: that towards the internet.
        may_be_router: whether a multiaddress may be a router's; None: the private address of a default gateway.
    """
    source = source or next(
        (address.host_of(each) for each in interfaces.way_out() if address.family_of(each) == 4), ""
    )
    if not source:
        raise NetworkError("there is no route to the internet")
    found: list[Router] = []
    for url in (await _search(target, source, may_be_router or _is_gateway))[:MAX_ROUTERS]:
        with contextlib.suppress(NetworkError):
            status, body = await _request("GET", url)
            if status == http.client.OK:
                found += routers_of(url, body)
    return found


def _is_gateway(place: str) -> bool:
    """Return whether a multiaddress is a default gateway's; where these are unknown, any private one may be."""
    gateways = interfaces.default_gateways()
    return is_private(place) and (gateways is None or address.host_of(place) in gateways)


def routers_of(url: str, description: bytes) -> list[Router]:
    """Return the services for port mappings that a description offers on its own host. Raises NetworkError."""
    groups = elements(description)
    base = next((each["URLBase"] for each in groups if each.get("URLBase")), url)  # of UPnP 1.0
    found = []
    for each in groups:
        service, control = each.get("serviceType", ""), each.get("controlURL", "")
        if _SERVICES.fullmatch(service) and control:
            with contextlib.suppress(ValueError):
                place = urljoin(base, control)
                if _host(place) == _host(url):
                    found.append(Router(place, service))
    return found


def elements(document: bytes) -> list[dict[str, str]]:
    """Return the texts of an XML document's innermost elements, one dict per parent, inner parents first.

    Names are without namespace prefix; of equal names the last counts. Raises NetworkError if the document is invalid,
    nested too deeply, or declares a document type, which could define entities.
    """
    found: list[dict[str, str]] = []
    open_elements: list[dict[str, str]] = [{}]
    text: list[str] = []

    def start(name: str, attributes: object) -> None:
        if len(open_elements) > MAX_DEPTH:
            raise NetworkError("the router's answer is nested too deeply")
        open_elements.append({})
        text.clear()

    def end(name: str) -> None:
        if inner := open_elements.pop():
            found.append(inner)
        open_elements[-1][name.rpartition(":")[2]] = "".join(text).strip()
        text.clear()

    def refuse(*declaration: object) -> None:
        raise NetworkError("the router's answer declares a document type")

    parser = expat.ParserCreate("utf-8")
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = text.append
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(document.decode("utf-8", "replace").encode(), True)
    except expat.ExpatError as error:
        raise NetworkError(f"the router's answer is not XML: {error}") from None
    return found


async def _search(target: tuple[str, int], source: str, may_be_router: Callable[[str], bool]) -> list[str]:
    """Return the URLs of descriptions on the hosts that answered, in order of arrival."""
    urls: dict[str, None] = {}

    class Collector(asyncio.DatagramProtocol):
        def datagram_received(self, data: bytes, sender: tuple[str | Any, int]) -> None:
            found = _LOCATION.search(data[:MAX_DATAGRAM_BYTES])
            with contextlib.suppress(ValueError):  # no URL
                url = "" if found is None else found[1].decode("ascii")
                host, port = _host(url)
                if host == sender[0] and may_be_router(address.multiaddress(host, port)) and len(urls) < MAX_ROUTERS:
                    urls[url] = None

    try:
        with contextlib.ExitStack() as opened:
            ours = opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            ours.setblocking(False)
            ours.bind((source, 0))
            ours.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(source))
            ours.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 2)
            transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(Collector, sock=ours)
            opened.pop_all()  # the transport closes the socket
    except OSError as error:
        raise NetworkError(f"cannot search for routers: {error}") from None
    try:
        for version in 1, 2:
            lines = ("M-SEARCH * HTTP/1.1", "HOST: {}:{}".format(*SEARCH_AT), 'MAN: "ssdp:discover"', "MX: 2")
            transport.sendto("\r\n".join((*lines, f"ST: {_DEVICE}{version}", "", "")).encode(), target)
        await asyncio.sleep(SEARCH_S)
    finally:
        transport.close()
    return list(urls)


async def _remove(router: Router, port: int) -> None:
    with contextlib.suppress(NetworkError):
        await _act(router, "DeletePortMapping", _key(port))


async def _act(router: Router, action: str, arguments: dict[str, object]) -> None:
    """Invoke an action. Raises RouterRefusedError, or NetworkError without a valid answer."""
    inner = "".join(f"<{name}>{html.escape(str(value))}</{name}>" for name, value in arguments.items())
    body = (
        '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" '
        's:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/">'
        f'<s:Body><u:{action} xmlns:u="{router.service}">{inner}</u:{action}></s:Body></s:Envelope>'
    )
    headers = ('Content-Type: text/xml; charset="utf-8"', f'SOAPAction: "{router.service}#{action}"')
    status, answer = await _request("POST", router.url, headers, body.encode())
    if status != http.client.OK:
        codes = [each["errorCode"] for each in elements(answer) if "errorCode" in each]
        raise RouterRefusedError("".join(codes[:1])[:8] or str(status))


async def _request(method: str, url: str, headers: tuple[str, ...] = (), body: bytes = b"") -> tuple[int, bytes]:
    """Return status and body of the answer. Raises NetworkError."""
    try:
        host, port = _host(url)
        parts = urlsplit(url)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        own = (f"Host: {host}:{port}", f"Content-Length: {len(body)}", "Connection: close")
        head = "\r\n".join((f"{method} {path} HTTP/1.1", *own, *headers, "", "")).encode("ascii")
        async with asyncio.timeout(REQUEST_DEADLINE_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(head + body)
                raw = b""
                while part := await reader.read(MAX_ANSWER_BYTES):
                    raw += part
                    if len(raw) > MAX_ANSWER_BYTES:
                        raise NetworkError("the router's answer is too long")
                return _parsed(raw)
            finally:
                writer.transport.abort()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NetworkError(f"the router does not answer: {error or type(error).__name__}") from None


def _parsed(raw: bytes) -> tuple[int, bytes]:
    class ReadAnswer:
        def makefile(self, mode: str) -> io.BytesIO:
            return io.BytesIO(raw)

    source: Any = ReadAnswer()
    response = http.client.HTTPResponse(source)
    response.begin()
    return response.status, response.read()


def _host(url: str) -> tuple[str, int]:
    """Return the IPv4 address and port of an http URL. Raises ValueError for any other URL."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not re.fullmatch(r"[!-~]+", url):
        raise ValueError(f"expected an http URL, got {url!r}")
    return str(ipaddress.IPv4Address(parts.hostname or "")), parts.port or 80


def _own_host(router: Router) -> str:
    """Return our address towards the router, and send nothing. Raises NetworkError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_host(router.url))
        except OSError as error:
            raise NetworkError(f"the router cannot be reached: {error}") from None
        return str(probe.getsockname()[0])


def _key(port: int) -> dict[str, object]:
    return {"NewRemoteHost": "", "NewExternalPort": port, "NewProtocol": "TCP"}
