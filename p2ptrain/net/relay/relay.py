"""Relaying: how a peer that nobody can dial takes a place at a relay, and the relay itself.

Whoever holds a place is dialed through the relay, which leads strangers to them over the connection that they keep to
it. What passes is encrypted and authenticated end to end, like a direct connection: a relay sees who talks to whom and
how much, and can refuse or break off, nothing else.

p2pd has both sides, and we use neither. It asks for places only at relays that it was started with; and as a relay it
starts two services, one with the limits that it was given and one with libp2p's defaults of 128 KiB and 2 minutes a
circuit, of which whichever comes up last serves (p2pd of hivemind 1.1.12: ``-relayService`` and ``EnableRelayV2``); and
``-relay=1`` makes everybody such a relay, asked or not. So the messages (``net.relay.circuit_v2``) pass over streams of
ours, and bytes between two of them. What p2pd does without being told is to dial circuits and to be dialed through
them.

Told ``-relay=0`` and ``-relayService=0`` or not, p2pd relays from its start on, until our handler stands; and once it
takes itself for one that can be dialed, for which a stranger's word is enough (libp2p's AutoNAT), it would put its own
in the place of ours. So it is told that nobody can dial it (``net.p2pd.daemon``), which it then believes for good. It
asks for no places, announces what it announced, and is the DHT's server as before.

What a relay carries passes its owner's caps like the peer's own bytes, and is counted with them. Once that owner gives
nothing (``Throttles.gives``) circuits end, there are no new ones, and no place is renewed: guests go elsewhere.

Anybody may ask, under as many names as they like. So streams and circuits are counted by peer and by IP address, and
from where too many questions come they are not heard (``net.rate_limiter``).

Who closes what: ``Relay.close`` ends its tasks, and each task the streams of its circuit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.base.logging_setup import reporting
from p2ptrain.net.allowance import origin
from p2ptrain.net.node import Node
from p2ptrain.net.p2pd import control
from p2ptrain.net.p2pd.control import FarEnd
from p2ptrain.net.p2pd.daemon import Daemon
from p2ptrain.net.p2pd.streams import Stream
from p2ptrain.net.rate_limiter import RateLimiter
from p2ptrain.net.relay import circuit_v2
from p2ptrain.net.relay.circuit_v2 import HOP_PROTOCOL, STOP_PROTOCOL, CircuitStatus
from p2ptrain.net.throttle import Throttles

logger = logging.getLogger(__name__)

ASK_DEADLINE_S = 10.0
"""For one question to a relay, connecting included, and for the answer of whom it leads to. A guess: 20 ms here."""
LAST_WORD_S = 2.0
"""For an answer to be heard. A guess: some round trips."""
PLACE_S = 120.0
"""How long a place lasts without being asked for again: eight renewals (``net.relay.reachability``). A guess."""
QUESTIONS = 4
"""Streams beside its circuits that a peer, or an IP address, may have here at once. A guess: one renews a place, others
are to become circuits."""
MAX_TARGET_BYTES = 64
"""Of a peer id as a question names it; ours have 38."""

_REFUSALS: dict[int, str] = {
    CircuitStatus.RESERVATION_REFUSED: "its places are taken",
    CircuitStatus.RESOURCE_LIMIT_EXCEEDED: "its limits are reached",
    CircuitStatus.PERMISSION_DENIED: "it is no relay",
}


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """What a relay gives to those whom nobody can dial; anybody may ask. All are guesses."""

    places: int = 64
    """Peers that hold a place at once."""
    places_per_origin: int = 8
    """Of them behind one IP address."""
    circuits: int = 64
    """Connections through us at once. Each takes up to 1.2 MB of memory here."""
    circuits_per_peer: int = 16
    """Of them of each peer, at either end: four exchanges, and some that idle."""
    circuits_per_origin: int = 32
    """Of them of askers behind one IP address: a house with some peers, and half of all at the most."""
    seconds: float = 1800.0
    """After which a circuit is cut; whoever still needs it dials again."""
    size_bytes: int = 4 << 30
    """The same for what passed, both ways together: the weights of a model of 1e9 parameters."""


NO_RELAY = RelayLimits(places=0, circuits=0)
"""Of nodes whose owners did not agree to relay. p2pd offers places by itself; where our handler stands it does not."""


async def reserve(daemon: Daemon, relay: PeerId, addresses: Sequence[str], redial: bool = True) -> None:
    """Take or renew a place at a relay. Raises NetworkError, also at the deadline.

    Args:
        redial: whether a connection that leads to it through a relay may be given up, and all conversations over it,
            for a direct one.
    """
    behind_a_relay = NetworkError(f"{short(relay)} is itself behind a relay")
    try:
        async with asyncio.timeout(ASK_DEADLINE_S):
            await daemon.connect(relay, addresses)
            far_end, stream = await daemon.open_stream(relay, HOP_PROTOCOL)
            if far_end.relay is not None:  # it was led to us before; p2pd dials nobody to whom it has any connection
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
    except TimeoutError:
        raise NetworkError(f"{short(relay)} did not answer as a relay for {ASK_DEADLINE_S:.0f} s") from None
    except (OSError, EOFError, ValueError) as error:
        raise NetworkError(f"{short(relay)} does not relay: {error}") from error
    if status != CircuitStatus.OK:
        raise NetworkError(f"{short(relay)} gives no place as a relay: {_REFUSALS.get(status, f'status {status}')}")
    if is_limited:  # a p2pd that nobody told to relay: it would carry 128 KiB, and nothing of ours
        raise NetworkError(f"{short(relay)} relays small talk alone")
    if far_end.relay is not None:
        raise behind_a_relay


@dataclass(frozen=True, slots=True)
class _Circuit:
    """An open one, or one that is about to be."""

    ends: tuple[PeerId, PeerId]
    origin: str
    """Whom it counts for: the asker's."""


class Relay:
    """A relay on a node. Construct with ``start``."""

    def __init__(self, node: Node, limits: RelayLimits, rates: Throttles) -> None:
        self._node = node
        self._limits = limits
        self._rates = rates
        self._server: asyncio.Server | None = None
        self._places: dict[PeerId, tuple[str, float]] = {}
        """Who holds one: whom they count for, and until when (monotonic clock)."""
        self._circuits: list[_Circuit] = []
        self._tasks: dict[asyncio.Task[None], tuple[PeerId, str] | None] = {}
        """One a stream: who opened it, and whom it counts for; None: not known yet."""
        self._floods: RateLimiter[str] = RateLimiter()

    @classmethod
    async def start(cls, node: Node, limits: RelayLimits, rates: Throttles | None = None) -> Relay:
        """Raises NetworkError."""
        relay = cls(node, limits, rates or Throttles())
        try:
            async with asyncio.timeout(ASK_DEADLINE_S):
                relay._server = await node.daemon.serve_streams(HOP_PROTOCOL, relay._take)
        except TimeoutError:
            raise NetworkError("p2pd does not take our handler") from None
        return relay

    async def close(self) -> None:
        """Give no more places, and end every circuit."""
        server, self._server = self._server, None
        if server is not None:
            with contextlib.suppress(TimeoutError, NetworkError):
                async with asyncio.timeout(1.0):
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
        """One question. A circuit lasts as long as this."""
        try:
            async with asyncio.timeout(ASK_DEADLINE_S):
                asker = await control.read_opener(stream)
                if not self._admit(asker):
                    return
                asked = circuit_v2.question(await control.read_message(stream, circuit_v2.MAX_MESSAGE_BYTES))
            if asked.kind == circuit_v2.RESERVE:
                status = self._give_place(asker, time.monotonic())
                until = int(time.time() + PLACE_S) if status == CircuitStatus.OK else 0
                await _say_last(stream, circuit_v2.answer(status, until))
            elif asked.kind == circuit_v2.CONNECT:
                if len(asked.target) > MAX_TARGET_BYTES:  # to spell it would cost a while
                    raise ValueError(f"a peer of {len(asked.target)} bytes")
                await self._connect(asker, control.peer_of(asked.target), stream)
            else:
                await _say_last(stream, circuit_v2.answer(CircuitStatus.UNEXPECTED_MESSAGE))
        except (NetworkError, OSError, EOFError, ValueError) as error:  # TimeoutError is an OSError
            logger.info("a question to the relay came to nothing: %s", error)
        finally:
            stream.close()

    def _admit(self, asker: FarEnd) -> bool:
        """Whether a stream is heard at all; it is not, where its opener floods us or has too many."""
        task = asyncio.current_task()
        assert task is not None
        where, limits = origin(asker.place), self._limits
        if not self._floods.admits(where, task.get_loop().time()):
            logger.info("turned down %s at the relay: it asks too often", short(asker.peer))
            return False
        opened = [each for each in self._tasks.values() if each is not None]
        of_peer = sum(peer == asker.peer for peer, _ in opened)
        of_origin = sum(there == where for _, there in opened)
        if of_peer >= limits.circuits_per_peer + QUESTIONS or of_origin >= limits.circuits_per_origin + QUESTIONS:
            logger.info("turned down %s at the relay: it has %d streams here", short(asker.peer), of_peer)
            return False
        self._tasks[task] = asker.peer, where
        return True

    def _give_place(self, asker: FarEnd, now: float) -> CircuitStatus:
        """A new place, or the old one for longer."""
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
        busiest = max(sum(peer in each.ends for each in self._circuits) for peer in (asker.peer, target))
        there = sum(each.origin == where for each in self._circuits)
        is_full = len(self._circuits) >= limits.circuits or there >= limits.circuits_per_origin
        if not self._rates.gives or is_full or busiest >= limits.circuits_per_peer:
            return CircuitStatus.RESOURCE_LIMIT_EXCEEDED
        return CircuitStatus.OK

    async def _connect(self, asking: FarEnd, target: PeerId, stream: Stream) -> None:
        """Lead the asker to the target, and carry their bytes until one of them, or a limit, ends it."""
        asker = asking.peer
        status = self._may_connect(asking, target, time.monotonic())
        if status != CircuitStatus.OK:
            await _say_last(stream, circuit_v2.answer(status))
            return
        circuit = _Circuit((asker, target), origin(asking.place))
        self._circuits.append(circuit)
        try:
            try:
                far = await self._lead(asker, target)
            except (NetworkError, OSError, EOFError, ValueError) as error:
                self._places.pop(target, None)  # they are gone; who is not, asks again
                logger.info("%s cannot be led to %s: %s", short(asker), short(target), error)
                await _say_last(stream, circuit_v2.answer(CircuitStatus.CONNECTION_FAILED))
                return
            try:
                await stream.write(circuit_v2.framed(circuit_v2.answer(CircuitStatus.OK)))
                await self._carry(stream, far)
            finally:
                far.abort()
        finally:
            self._circuits.remove(circuit)

    async def _lead(self, asker: PeerId, target: PeerId) -> Stream:
        """Tell the target who wants to talk to it; the stream on which it does."""
        async with asyncio.timeout(ASK_DEADLINE_S):
            far_end, far = await self._node.daemon.open_stream(target, STOP_PROTOCOL)
            try:
                if far_end.relay is not None:
                    raise NetworkError("no circuit through two relays")
                await far.write(circuit_v2.framed(circuit_v2.lead(control.raw(asker))))
                status = circuit_v2.stop_status(await control.read_message(far, circuit_v2.MAX_MESSAGE_BYTES))
                if status != CircuitStatus.OK:
                    raise NetworkError(f"it says status {status}")
            except BaseException:
                far.abort()
                raise
        return far

    async def _carry(self, one: Stream, other: Stream) -> None:
        left = [self._limits.size_bytes]
        ways = [asyncio.ensure_future(self._pump(*way, left)) for way in ((one, other), (other, one))]
        try:
            await asyncio.wait(ways, timeout=self._limits.seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            one.abort()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _pump(self, source: Stream, sink: Stream, left: list[int]) -> None:
        """Carry bytes one way until the source or the sink ends, ``left`` is used up, or nothing is given any more."""
        up, down = self._rates.up, self._rates.down
        with contextlib.suppress(OSError, EOFError):
            while left[0] > 0:
                chunk = await source.read_some()
                if not self._rates.gives:
                    return
                left[0] -= len(chunk)
                self._rates.give(len(chunk))  # it came, whatever becomes of it
                await down.wait(down.book(len(chunk)))
                for piece in up.pieces(memoryview(chunk)):
                    await up.wait(up.book(len(piece)), len(piece))
                    self._rates.give(len(piece))
                    await sink.write(piece)


async def _say_last(stream: Stream, answer: bytes) -> None:
    """Answer, and let the asker end first: p2pd may lose what is written right before an end (``net.links``)."""
    await stream.write(circuit_v2.framed(answer))
    with contextlib.suppress(OSError, EOFError):  # TimeoutError is an OSError
        async with asyncio.timeout(LAST_WORD_S):
            await stream.read_some()
