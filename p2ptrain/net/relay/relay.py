"""Relaying: reservations for a peer that cannot be dialed, and the relay itself (libp2p circuit relay v2).

A circuit is encrypted and authenticated end to end. A relay learns only which peers communicate and how much, and can
only refuse or end a circuit.

p2pd (hivemind 1.1.12) makes reservations only at relays named at its start, and cannot be told its limits as a relay.
It is therefore started with forced private reachability (``net.p2pd.daemon``), so that it serves none itself. This
module sends the messages (``net.relay.circuit_v2``) over its own streams, and copies bytes between two of them; p2pd
dials circuits and accepts connections through them.

Relayed bytes count against the owner's throttles and budget (``Throttles.gives``). Any peer may ask, under many
identities: streams and circuits are limited per peer and per IP address, and requests per IP address.

Resources: ``Relay.close`` ends its tasks, and each task closes the streams of its circuit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.base.clock import wall
from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.base.logging_setup import reporting
from p2ptrain.net.node import Node
from p2ptrain.net.p2pd import control
from p2ptrain.net.p2pd.control import FarEnd
from p2ptrain.net.p2pd.daemon import PROTECTING, Daemon
from p2ptrain.net.p2pd.streams import Stream
from p2ptrain.net.rate_limiter import RateLimiter, origin
from p2ptrain.net.relay import circuit_v2
from p2ptrain.net.relay.circuit_v2 import HOP_PROTOCOL, STOP_PROTOCOL, CircuitStatus
from p2ptrain.net.throttle import Throttles

logger = logging.getLogger(__name__)

ASK_DEADLINE_S = 10.0
"""Timeout of a request to a relay, connecting included, and of a target's response. Guess: measure round trips; 20 ms
locally."""
LAST_WORD_S = 2.0
"""Time for a final response to arrive, some round trips. Guess: measure how many responses are lost."""
PLACE_S = 120.0
"""Lifetime of a reservation, eight renewal intervals (``net.relay.reachability``). Guess: measure missed renewals."""
QUESTIONS = 4
"""Concurrent streams of a peer or an IP address beyond its circuits: a renewal, and circuits being opened. Guess: count
the streams per peer at a busy relay."""
IDLE_BYTES = 4096
"""Ten times the bytes of a circuit on which p2pd only pings: each side every 30 s, 46 bytes encrypted, and answers."""
OTHER_CONNECTIONS = 512
"""Connections of a relay to peers with neither place nor circuit, as many as p2pd keeps by default."""
MAX_TARGET_BYTES = 64
"""Longest peer id in a request; ours have 38 bytes."""

READ_BYTES = 128 << 10  # most bytes of a circuit that are read at once
GATHER_FROM_BYTES = 16 << 10
"""Size of a read after which the relay waits: bulk transfers arrive in larger ones."""
GATHER_S = 0.01
"""Time in which further bytes of a bulk transfer gather, 120 kB at 100 Mbit/s."""

_REFUSALS: dict[int, str] = {
    CircuitStatus.RESERVATION_REFUSED: "all its reservations are taken",
    CircuitStatus.RESOURCE_LIMIT_EXCEEDED: "its limits are reached",
    CircuitStatus.PERMISSION_DENIED: "it is not a relay",
}


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """Limits of a relay. Guess: measure memory and bandwidth of a bootstrap that relays for a full swarm."""

    places: int = 64  # concurrent reservations
    places_per_origin: int = 8  # behind one IP address
    circuits: int = 64  # concurrent ones; each takes up to 1.2 MB of memory (our measurement)
    circuits_per_peer: int = 16  # concurrent circuits per peer, at either end: four exchanges and some idle connections
    circuits_per_pair: int = 2  # one from either side, or a fresh one beside one that ends
    circuits_per_origin: int = 32
    """Concurrent circuits opened from one IP address: a home with several peers, and at most half of all."""
    seconds: float = 1800.0  # longest duration of a circuit; a peer that still needs it dials again
    idle_s: float = 60.0
    """Time in which a circuit that carries less than ``IDLE_BYTES`` ends: p2pd keeps the circuit of a pair that has
    become directly connected, and tries to connect a pair directly only when it makes a circuit."""
    size_bytes: int = 4 << 30
    """Most bytes of a circuit, both directions together: the weights of a model of 1e9 parameters."""

    @property
    def connections(self) -> int:
        """Connections that p2pd must keep, for places, both ends of circuits, and peers that greet or ask; 0: any."""
        return self.places + 2 * self.circuits + OTHER_CONNECTIONS if self.places > OTHER_CONNECTIONS else 0


FOR_A_SERVER = RelayLimits(places=1024, circuits=256)
"""Limits of a bootstrap. Renewals are 70 requests per second then, 9 % of a core, and the
connections take 0.3 GB (``bench.bootstrap_connections``)."""
NO_RELAY = RelayLimits(places=0, circuits=0)
"""Limits of a node whose owner did not agree to relay; its handler only keeps p2pd from relaying by itself."""


class RelayFullError(NetworkError):
    """A relay has given all its reservations."""


async def reserve(daemon: Daemon, relay: PeerId, addresses: Sequence[str], redial: bool = True) -> None:
    """Make or renew a reservation at a relay. Raises NetworkError, also at the deadline.

    ``redial``: whether a relayed connection to the relay, with all its streams, may be closed for a direct one.
    """
    behind_a_relay = NetworkError(f"{short(relay)} is itself behind a relay")
    try:
        async with asyncio.timeout(ASK_DEADLINE_S):
            await daemon.connect(relay, addresses)
            far_end, stream = await daemon.open_stream(relay, HOP_PROTOCOL)
            if far_end.relay is not None:  # it dialed us through a relay; p2pd opens no second connection
                stream.abort()
                if not redial:
                    raise behind_a_relay
                await daemon.disconnect(relay)
                await daemon.connect(relay, addresses)
                far_end, stream = await daemon.open_stream(relay, HOP_PROTOCOL)
            try:
                await stream.write(circuit_v2.framed(circuit_v2.reserve()))
                answer = await control.read_message(stream, circuit_v2.MAX_MESSAGE_BYTES)
                status, is_limited = circuit_v2.status(answer), circuit_v2.is_limited(answer)
            finally:
                stream.close()
            if status == CircuitStatus.OK:
                await daemon.protect(relay, "relay")
    except TimeoutError:
        raise NetworkError(f"{short(relay)} did not answer as a relay within {ASK_DEADLINE_S:.0f} s") from None
    except (OSError, EOFError, ValueError) as error:
        raise NetworkError(f"{short(relay)} does not relay: {error}") from error
    if status != CircuitStatus.OK:
        kind = RelayFullError if status == CircuitStatus.RESERVATION_REFUSED else NetworkError
        raise kind(f"{short(relay)} refused a reservation: {_REFUSALS.get(status, f'status {status}')}")
    if is_limited:  # p2pd's own relay service: a circuit carries 128 KiB, and none of our protocols
        raise NetworkError(f"{short(relay)} relays only small amounts of data")
    if far_end.relay is not None:
        raise behind_a_relay


@dataclass(frozen=True, slots=True)
class _Circuit:
    ends: tuple[PeerId, PeerId]
    origin: str  # IP address or network of the initiator


class Relay:
    """A relay on a node; create it with ``start``."""

    def __init__(self, node: Node, limits: RelayLimits, rates: Throttles) -> None:
        self._node = node
        self._limits = limits
        self._rates = rates
        self._server: asyncio.Server | None = None
        self._places: dict[PeerId, tuple[str, float]] = {}  # reservations: origin and end (monotonic clock)
        self._circuits: list[_Circuit] = []
        self._tasks: dict[asyncio.Task[None], tuple[PeerId, str] | None] = {}
        """One task per stream: its initiator and origin; None until they are known."""
        self._floods: RateLimiter[str] = RateLimiter()
        self._floods_of_guests: RateLimiter[str] = RateLimiter()
        """Limit for peers with a reservation, which they can renew however many others ask for one in vain."""

    @classmethod
    async def start(cls, node: Node, limits: RelayLimits, rates: Throttles | None = None) -> Relay:
        relay = cls(node, limits, rates or Throttles())
        relay._server = await node.daemon.serve_streams(HOP_PROTOCOL, relay._take)
        return relay

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await self._node.daemon.stop_serving(HOP_PROTOCOL, server)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _take(self, stream: Stream) -> None:
        if self._server is None or len(self._tasks) >= self._limits.places + self._limits.circuits:
            stream.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(stream))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        task.add_done_callback(reporting("a relay's circuit"))

    async def _serve(self, stream: Stream) -> None:
        try:
            async with asyncio.timeout(ASK_DEADLINE_S):
                asker = await control.read_opener(stream)
                if not self._admit(asker):
                    return
                asked = circuit_v2.question(await control.read_message(stream, circuit_v2.MAX_MESSAGE_BYTES))
            if asked.kind == circuit_v2.RESERVE:
                status = self._give_place(asker, time.monotonic())
                if status == CircuitStatus.OK:
                    await self._protect(asker.peer, "place")
                until = int(wall() + PLACE_S) if status == CircuitStatus.OK else 0
                await _send_last(stream, circuit_v2.answer(status, until))
            elif asked.kind == circuit_v2.CONNECT:
                if len(asked.target) > MAX_TARGET_BYTES:  # converting it to text would take long
                    raise ValueError(f"a peer id of {len(asked.target)} bytes")
                await self._connect(asker, control.peer_of(asked.target), stream)
            else:
                await _send_last(stream, circuit_v2.answer(CircuitStatus.UNEXPECTED_MESSAGE))
        except (NetworkError, OSError, EOFError, ValueError) as error:  # TimeoutError is an OSError
            logger.info("a request to the relay failed: %s", error)
        finally:
            stream.close()

    def _admit(self, asker: FarEnd) -> bool:
        task = asyncio.current_task()
        assert task is not None
        where, limits = origin(asker.place), self._limits
        floods = self._floods_of_guests if asker.peer in self._places else self._floods
        if not floods.admits(where, task.get_loop().time()):
            logger.info("refused %s at the relay: rate limit exceeded", short(asker.peer))
            return False
        opened = [each for each in self._tasks.values() if each is not None]
        of_peer = sum(peer == asker.peer for peer, _ in opened)
        of_origin = sum(there == where for _, there in opened)
        if of_peer >= limits.circuits_per_peer + QUESTIONS or of_origin >= limits.circuits_per_origin + QUESTIONS:
            logger.info("refused %s at the relay: it has %d streams here", short(asker.peer), of_peer)
            return False
        self._tasks[task] = asker.peer, where
        return True

    async def _protect(self, peer: PeerId, purpose: str, weight: int = PROTECTING) -> None:
        with contextlib.suppress(NetworkError, TimeoutError):  # the connection has just ended, or p2pd is very busy
            async with asyncio.timeout(LAST_WORD_S):
                await self._node.daemon.protect(peer, purpose, weight)

    def _give_place(self, asker: FarEnd, now: float) -> CircuitStatus:
        if not self._rates.gives:
            return CircuitStatus.RESOURCE_LIMIT_EXCEEDED
        self._places = {peer: place for peer, place in self._places.items() if place[1] > now}
        if asker.relay is not None or not asker.place:
            return CircuitStatus.PERMISSION_DENIED
        who = origin(asker.place)
        others = [held for peer, (held, _) in self._places.items() if peer != asker.peer]
        if len(others) >= self._limits.places or others.count(who) >= self._limits.places_per_origin:
            return CircuitStatus.RESERVATION_REFUSED
        self._places[asker.peer] = (who, now + PLACE_S)
        return CircuitStatus.OK

    def _may_connect(self, asker: FarEnd, target: PeerId, now: float) -> CircuitStatus:
        if self._places.get(target, ("", 0.0))[1] <= now or asker.peer == target:
            return CircuitStatus.NO_RESERVATION
        limits, where = self._limits, origin(asker.place)
        ours, theirs = ([each for each in self._circuits if peer in each.ends] for peer in (asker.peer, target))
        from_there = sum(each.origin == where for each in theirs)
        is_full = (
            len(self._circuits) >= limits.circuits
            or sum(each.origin == where for each in self._circuits) >= limits.circuits_per_origin
            or max(len(ours), len(theirs)) >= limits.circuits_per_peer
            or sum(target in each.ends for each in ours) >= limits.circuits_per_pair
            # An origin gets at most half of what others leave: many ids at one IP address keep nobody away.
            or 2 * from_there >= limits.circuits_per_peer - (len(theirs) - from_there)
        )
        return CircuitStatus.RESOURCE_LIMIT_EXCEEDED if is_full or not self._rates.gives else CircuitStatus.OK

    async def _connect(self, asking: FarEnd, target: PeerId, stream: Stream) -> None:
        asker = asking.peer
        status = self._may_connect(asking, target, time.monotonic())
        if status != CircuitStatus.OK:
            await _send_last(stream, circuit_v2.answer(status))
            return
        circuit = _Circuit((asker, target), origin(asking.place))
        self._circuits.append(circuit)
        try:
            await self._protect(asker, "circuit")
            try:
                far = await self._lead(asker, target)
            except (NetworkError, OSError, EOFError, ValueError) as error:
                if not await self._is_connected(target):  # otherwise anybody could end others' reservations
                    self._places.pop(target, None)
                logger.info("no circuit from %s to %s: %s", short(asker), short(target), error)
                await _send_last(stream, circuit_v2.answer(CircuitStatus.CONNECTION_FAILED))
                return
            try:
                await stream.write(circuit_v2.framed(circuit_v2.answer(CircuitStatus.OK)))
                await self._carry(stream, far)
            finally:
                far.abort()
        finally:
            self._circuits.remove(circuit)
            if not any(asker in each.ends for each in self._circuits):
                await self._protect(asker, "circuit", 0)

    async def _is_connected(self, peer: PeerId) -> bool:
        """Return whether the peer is connected, also if p2pd does not say."""
        with contextlib.suppress(NetworkError, TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                return any(each.peer == peer for each in await self._node.daemon.connections())
        return True

    async def _lead(self, asker: PeerId, target: PeerId) -> Stream:
        async with asyncio.timeout(ASK_DEADLINE_S):
            far_end, far = await self._node.daemon.open_stream(target, STOP_PROTOCOL)
            try:
                if far_end.relay is not None:
                    raise NetworkError("no circuit through two relays")
                await far.write(circuit_v2.framed(circuit_v2.lead(control.raw(asker))))
                status = circuit_v2.stop_status(await control.read_message(far, circuit_v2.MAX_MESSAGE_BYTES))
                if status != CircuitStatus.OK:
                    raise NetworkError(f"it returned status {status}")
            except BaseException:
                far.abort()
                raise
        return far

    async def _carry(self, one: Stream, other: Stream) -> None:
        left = [self._limits.size_bytes]
        ways = [asyncio.ensure_future(self._pump(*way, left)) for way in ((one, other), (other, one))]
        clock, limits = asyncio.get_running_loop().time, self._limits
        until = clock() + limits.seconds
        try:
            while (rest_s := until - clock()) > 0:
                before = left[0]
                patience_s = min(limits.idle_s, rest_s)
                done, _ = await asyncio.wait(ways, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                if done or before - left[0] < IDLE_BYTES:
                    break
        finally:
            for way in ways:
                way.cancel()
            one.abort()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _pump(self, source: Stream, sink: Stream, left: list[int]) -> None:
        """Carry bytes one way until either stream ends, ``left`` is used up, or ``gives`` becomes false.

        A bulk transfer arrives in many small pieces, each of which costs both p2pds and this process a turn. After a
        large one, more therefore gather in the socket.
        """
        up, down = self._rates.up, self._rates.down
        source.widen(READ_BYTES)
        with contextlib.suppress(OSError, EOFError):
            while left[0] > 0:
                chunk = await source.read_some()
                if not self._rates.gives:
                    return
                left[0] -= len(chunk)
                self._rates.give(len(chunk))  # received bytes count even if they are not passed on
                await down.wait(down.book(len(chunk)))
                for piece in up.pieces(memoryview(chunk)):
                    await up.wait(up.book(len(piece)), len(piece))
                    self._rates.give(len(piece))
                    await sink.write(piece)
                if GATHER_FROM_BYTES <= len(chunk) < READ_BYTES:
                    source.pause()
                    await asyncio.sleep(GATHER_S)


async def _send_last(stream: Stream, answer: bytes) -> None:
    """Send a final response and let the other side close first: p2pd may lose bytes written right before an end."""
    await stream.write(circuit_v2.framed(answer))
    with contextlib.suppress(OSError, EOFError):  # TimeoutError is an OSError
        async with asyncio.timeout(LAST_WORD_S):
            await stream.read_some()
