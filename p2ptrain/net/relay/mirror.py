"""Mirrors: local libp2p nodes that tell our own p2pd by which public address others see it.

p2pd punches holes only with addresses that observers at four different IP addresses have named (go-libp2p 0.32,
identify/obsaddr.go), while a small swarm has one bootstrap. Observers count by IP address, so four mirrors connect to
p2pd over loopback, from 127.0.0.2 to 127.0.0.5, and name the address that other nodes reported
(``net.relay.dial_back``). Where these cannot be bound, as on macOS, p2pd waits for four real observers.

A mirror is the least that libp2p calls a node: it opens a yamux session (``net.relay.noise``), answers p2pd's identify
question with ``observedAddr`` alone, and refuses all other protocols. It asks p2pd the same question, to learn when
p2pd has begun to punch.

Resources: ``Mirrors.close`` ends all tasks, which close their connections. A mirror whose connection ends makes a new
one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Iterable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2ptrain.base.backoff import backoff
from p2ptrain.base.logging_setup import reporting
from p2ptrain.net import address
from p2ptrain.net.address import split_varint, varint
from p2ptrain.net.relay import circuit_v2, noise
from p2ptrain.net.relay.noise import NoiseChannel

logger = logging.getLogger(__name__)

SOURCES = ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5")
"""Loopback addresses of the mirrors: as many as p2pd needs observers (obsaddr.go: ActivationThresh)."""
PUNCHING_PROTOCOL = "/libp2p/dcutr"
"""Protocol that p2pd serves from when it punches holes."""
HANDSHAKE_S = 10.0
"""Timeout to connect and negotiate over loopback, which takes 20 ms (measured)."""
SILENCE_S = 90.0
"""Longest silence of p2pd, which pings each yamux session every 30 s."""
ASK_AGAIN_S = 0.25
"""Interval of the question whether p2pd punches; p2pd itself looks for a public address after .25, .75, 1.75 s, …"""
RETRY_S = (1.0, 60.0)
"""First and longest backoff of a mirror whose connection ended, as of a restart of p2pd (``net.supervisor``)."""
MAX_FRAME_BYTES = 256 << 10
"""Largest yamux frame: the initial window of a stream, which a mirror never enlarges."""

_MULTISTREAM, _IDENTIFY, _NOT_AVAILABLE = "/multistream/1.0.0", "/ipfs/id/1.0.0", "na"
_DATA, _WINDOW, _PING, _GO_AWAY = range(4)  # frame types of yamux
_SYN, _ACK, _FIN, _RST = 1, 2, 4, 8  # its flags
_HEADER = struct.Struct("!BBHII")  # version, type, flags, stream, length
_PROTOCOLS, _OBSERVED = 3, 4  # fields of libp2p's Identify message


def can_mirror() -> bool:
    """Return whether this system lets processes use the mirrors' loopback addresses."""
    try:
        for each in SOURCES:
            with socket.socket() as probe:
                probe.bind((each, 0))
    except OSError:
        return False
    return True


class Mirrors:
    """The mirrors of one p2pd.

    Args:
        host: own IPv4 address at which p2pd listens. With the address that its connections to the internet come from,
            p2pd counts mirrors and real observers together; with another one (loopback) it may know its public address
            twice, dial a partner's twice at once, and fail.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._port = port
        self._host = host
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}  # by the address that they name
        self.is_punching = asyncio.Event()
        """Set once p2pd punches holes."""

    @property
    def places(self) -> tuple[str, ...]:
        """Public addresses that the mirrors name."""
        return tuple(self._tasks)

    def show(self, places: Iterable[str]) -> None:
        """Name these public addresses from now on, and no others."""
        wanted = dict.fromkeys(places)
        for place in [each for each in self._tasks if each not in wanted]:
            for task in self._tasks.pop(place):
                task.cancel()
        for place in wanted:
            if place not in self._tasks:
                self._tasks[place] = [self._start(place, source) for source in SOURCES]

    async def close(self) -> None:
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _start(self, place: str, source: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._mirror(place, source))
        task.add_done_callback(reporting("a mirror"))
        return task

    async def _mirror(self, place: str, source: str) -> None:
        pauses_s = backoff(*RETRY_S)
        while True:
            began = asyncio.get_running_loop().time()
            try:
                session = await _connect(self._host, self._port, source)
                try:
                    await self._answer(session, place)
                finally:
                    session.abort()
            except (OSError, EOFError, ValueError) as error:  # TimeoutError is an OSError
                logger.debug("a mirror's connection ended: %s", error or type(error).__name__)
            if asyncio.get_running_loop().time() - began > SILENCE_S:
                pauses_s = backoff(*RETRY_S)
            await asyncio.sleep(next(pauses_s))

    async def _answer(self, session: _YamuxSession, place: str) -> None:
        """Answer p2pd's questions until the connection ends, and ask whether it punches until it does."""
        identity = circuit_v2.field(_OBSERVED, address.packed(place))
        asking = asyncio.get_running_loop().create_task(self._ask(session))
        try:
            await session.serve(varint(len(identity)) + identity)
        finally:
            asking.cancel()
            await asyncio.wait([asking])

    async def _ask(self, session: _YamuxSession) -> None:
        while not self.is_punching.is_set() and session.source == SOURCES[0]:
            if PUNCHING_PROTOCOL in await session.protocols():
                self.is_punching.set()
            await asyncio.sleep(ASK_AGAIN_S)


class _YamuxSession:
    """A yamux session with p2pd, of which we are the client: our streams have odd numbers."""

    def __init__(self, channel: NoiseChannel, source: str) -> None:
        self.source = source
        self._channel = channel
        self._heard: dict[int, bytes] = {}  # what p2pd sent on each open stream
        self._asked: dict[int, asyncio.Future[bytes]] = {}  # our questions
        self._next = 1

    def abort(self) -> None:
        self._channel.abort()

    async def protocols(self) -> set[str]:
        """Ask p2pd which protocols it serves; empty if it does not answer in time."""
        stream, self._next = self._next, self._next + 2
        answer = self._asked[stream] = asyncio.get_running_loop().create_future()
        try:
            self._send(_WINDOW, _SYN, stream, length=0)
            self._send(_DATA, 0, stream, _line(_MULTISTREAM) + _line(_IDENTIFY))
            async with asyncio.timeout(HANDSHAKE_S):
                return _protocols(await answer)
        except (TimeoutError, ValueError):
            return set()
        finally:
            del self._asked[stream]

    async def serve(self, identity: bytes) -> None:
        """Answer p2pd until the connection ends. Raises OSError, EOFError and ValueError.

        Args:
            identity: answer to an identify question, with its length.
        """
        while True:
            async with asyncio.timeout(SILENCE_S):
                _, kind, flags, stream, length = _HEADER.unpack(await self._channel.readexactly(_HEADER.size))
                if kind == _DATA and length > MAX_FRAME_BYTES:
                    raise ValueError(f"a frame of {length} bytes")
                body = await self._channel.readexactly(length) if kind == _DATA else b""
            if kind == _GO_AWAY:
                return
            if kind == _PING and flags & _SYN:
                self._send(_PING, _ACK, 0, length=length)
            if kind in (_DATA, _WINDOW) and flags & _SYN:
                self._send(_WINDOW, _ACK, stream, length=0)
            if body:
                self._hear(stream, body, identity)
            if flags & (_FIN | _RST):
                self._end(stream)

    def _hear(self, stream: int, body: bytes, identity: bytes) -> None:
        heard = self._heard[stream] = self._heard.get(stream, b"") + body
        if len(heard) > MAX_FRAME_BYTES:
            raise ValueError(f"more than {MAX_FRAME_BYTES} bytes on one stream")
        if stream in self._asked or stream % 2:
            return  # an answer to us, read when it is complete
        if heard == _line(_MULTISTREAM) + _line(_IDENTIFY):
            self._heard[stream] = b""
            self._send(_DATA, _FIN, stream, heard + identity)
        elif heard.endswith(b"\n") and heard != _line(_MULTISTREAM):
            self._heard[stream] = _line(_MULTISTREAM)  # p2pd may propose another protocol
            self._send(_DATA, 0, stream, _line(_MULTISTREAM) + _line(_NOT_AVAILABLE))

    def _end(self, stream: int) -> None:
        answer, heard = self._asked.get(stream), self._heard.pop(stream, b"")
        if answer is not None and not answer.done():
            answer.set_result(heard)
            self._send(_DATA, _FIN, stream)

    def _send(self, kind: int, flags: int, stream: int, body: bytes = b"", length: int | None = None) -> None:
        """Send a frame; ``length`` is the number that it carries, by default the body's length."""
        self._channel.write(_HEADER.pack(0, kind, flags, stream, len(body) if length is None else length) + body)


async def _connect(host: str, port: int, source: str) -> _YamuxSession:
    """Connect to p2pd as a fresh peer, from a loopback address, as only this machine can.

    Raises OSError, EOFError and ValueError.
    """
    async with asyncio.timeout(HANDSHAKE_S):
        reader, writer = await asyncio.open_connection(host, port, local_addr=(source, 0))
        try:
            channel = await noise.open_channel(reader, writer, Ed25519PrivateKey.generate())
        except BaseException:
            writer.transport.abort()
            raise
    return _YamuxSession(channel, source)


def _line(text: str) -> bytes:
    """Encode a message of multistream-select: its length, the text and a newline."""
    return varint(len(text) + 1) + text.encode() + b"\n"


def _protocols(answer: bytes) -> set[str]:
    """Decode the protocols in p2pd's answer to an identify question. Raises ValueError if it is invalid."""
    greeting = _line(_MULTISTREAM) + _line(_IDENTIFY)
    if not answer.startswith(greeting):
        raise ValueError("not an answer to an identify question")
    length, rest = split_varint(answer[len(greeting) :])
    if length > len(rest):
        raise ValueError("an identify answer is truncated")
    return {
        value.decode(errors="replace")
        for number, value in circuit_v2.pairs(rest[:length])
        if number == _PROTOCOLS and isinstance(value, bytes)
    }
