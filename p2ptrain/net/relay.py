"""Relaying: how a peer that nobody can dial takes a place at a relay, and the relay itself.

Whoever holds a place is dialed through the relay, which leads strangers to them over the connection that they keep to
it. What passes is encrypted and authenticated end to end, like a direct connection: a relay sees who talks to whom and
how much, and can refuse or break off, nothing else.

p2pd has both sides, and we use neither. It asks for places only at relays that it was started with; and as a relay it
starts two services, one with the limits that it was given and one with libp2p's defaults of 128 KiB and 2 minutes a
circuit, of which whichever comes up last serves (p2pd of hivemind 1.1.12: ``-relayService`` and ``EnableRelayV2``); and
``-relay=1`` makes everybody such a relay, asked or not. So the messages (``net.hop``) pass over streams of ours, and
bytes between two of them. What p2pd does without being told is to dial circuits and to be dialed through them.

What a relay carries passes its owner's caps like the peer's own bytes, and is counted with them.

Who closes what: ``Relay.close`` ends its tasks, and each task the streams of its circuit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.errors import NetworkError
from p2ptrain.ids import PeerId, short
from p2ptrain.net import control, hop
from p2ptrain.net.allowance import origin
from p2ptrain.net.control import FarEnd
from p2ptrain.net.daemon import Daemon
from p2ptrain.net.hop import HOP_PROTOCOL, STOP_PROTOCOL, Status
from p2ptrain.net.node import Node
from p2ptrain.net.rates import Rates
from p2ptrain.net.streams import Stream

logger = logging.getLogger(__name__)

ASK_DEADLINE_S = 10.0
"""For one question to a relay, connecting included, and for the answer of whom it leads to. A guess: 20 ms here."""
PLACE_S = 120.0
"""How long a place lasts without being asked for again: eight renewals (``net.shelter``). A guess."""

_REFUSALS: dict[int, str] = {
    Status.RESERVATION_REFUSED: "its places are taken",
    Status.RESOURCE_LIMIT_EXCEEDED: "its limits are reached",
    Status.PERMISSION_DENIED: "it is no relay",
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
    seconds: float = 1800.0
    """After which a circuit is cut; whoever still needs it dials again."""
    size_bytes: int = 4 << 30
    """The same for what passed, both ways together: the weights of a model of 1e9 parameters."""


async def reserve(daemon: Daemon, relay: PeerId, addresses: Sequence[str]) -> None:
    """Take or renew a place at a relay. Raises NetworkError, also at the deadline."""
    try:
        async with asyncio.timeout(ASK_DEADLINE_S):
            await daemon.connect(relay, addresses)
            far_end, stream = await daemon.open_stream(relay, HOP_PROTOCOL)
            if far_end.relay is not None:  # it was led to us before; p2pd dials nobody to whom it has any connection
                stream.abort()
                await daemon.disconnect(relay)
                await daemon.connect(relay, addresses)
                far_end, stream = await daemon.open_stream(relay, HOP_PROTOCOL)
            try:
                await stream.write(hop.framed(hop.reserve()))
                status = hop.status(await control.read_message(stream, hop.MAX_MESSAGE_BYTES))
            finally:
                stream.close()
    except TimeoutError:
        raise NetworkError(f"{short(relay)} did not answer as a relay for {ASK_DEADLINE_S:.0f} s") from None
    except (OSError, EOFError, ValueError) as error:
        raise NetworkError(f"{short(relay)} does not relay: {error}") from error
    if status != Status.OK:
        raise NetworkError(f"{short(relay)} gives no place as a relay: {_REFUSALS.get(status, f'status {status}')}")
    if far_end.relay is not None:
        raise NetworkError(f"{short(relay)} is itself behind a relay")


class Relay:
    """A relay on a node. Construct with ``start``."""

    def __init__(self, node: Node, limits: RelayLimits, rates: Rates) -> None:
        self._node = node
        self._limits = limits
        self._rates = rates
        self._server: asyncio.Server | None = None
        self._places: dict[PeerId, tuple[str, float]] = {}
        """Who holds one: whom they count for, and until when (monotonic clock)."""
        self._circuits: Counter[PeerId] = Counter()
        """Open ones of each peer, at either end."""
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(cls, node: Node, limits: RelayLimits, rates: Rates | None = None) -> Relay:
        """Raises NetworkError."""
        relay = cls(node, limits, rates or Rates())
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
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def _serve(self, stream: Stream) -> None:
        """One question. A circuit lasts as long as this."""
        try:
            async with asyncio.timeout(ASK_DEADLINE_S):
                asker = await control.read_opener(stream)
                asked = hop.question(await control.read_message(stream, hop.MAX_MESSAGE_BYTES))
            if asked.kind == hop.RESERVE:
                status = self._give_place(asker, time.monotonic())
                until = int(time.time() + PLACE_S) if status == Status.OK else 0
                await stream.write(hop.framed(hop.answer(status, until)))
            elif asked.kind == hop.CONNECT:
                await self._connect(asker.peer, control.peer_of(asked.target), stream)
            else:
                await stream.write(hop.framed(hop.answer(Status.UNEXPECTED_MESSAGE)))
        except (NetworkError, OSError, EOFError, ValueError) as error:  # TimeoutError is an OSError
            logger.info("a question to the relay came to nothing: %s", error)
        finally:
            stream.close()

    def _give_place(self, asker: FarEnd, now: float) -> Status:
        """A new place, or the old one for longer."""
        self._places = {peer: place for peer, place in self._places.items() if place[1] > now}
        if asker.relay is not None or not asker.place:
            return Status.PERMISSION_DENIED
        who = origin(asker.place)
        others = [held for peer, (held, _) in self._places.items() if peer != asker.peer]
        if len(others) >= self._limits.places or others.count(who) >= self._limits.places_per_origin:
            return Status.RESERVATION_REFUSED
        self._places[asker.peer] = (who, now + PLACE_S)
        return Status.OK

    def _may_connect(self, asker: PeerId, target: PeerId, now: float) -> Status:
        if self._places.get(target, ("", 0.0))[1] <= now or asker == target:
            return Status.NO_RESERVATION
        busiest = max(self._circuits[asker], self._circuits[target])
        if self._circuits.total() >= 2 * self._limits.circuits or busiest >= self._limits.circuits_per_peer:
            return Status.RESOURCE_LIMIT_EXCEEDED
        return Status.OK

    async def _connect(self, asker: PeerId, target: PeerId, stream: Stream) -> None:
        """Lead the asker to the target, and carry their bytes until one of them, or a limit, ends it."""
        status = self._may_connect(asker, target, time.monotonic())
        if status != Status.OK:
            await stream.write(hop.framed(hop.answer(status)))
            return
        self._circuits.update((asker, target))
        try:
            try:
                far = await self._lead(asker, target)
            except (NetworkError, OSError, EOFError, ValueError) as error:
                self._places.pop(target, None)  # they are gone; who is not, asks again
                logger.info("%s cannot be led to %s: %s", short(asker), short(target), error)
                await stream.write(hop.framed(hop.answer(Status.CONNECTION_FAILED)))
                return
            try:
                await stream.write(hop.framed(hop.answer(Status.OK)))
                await self._carry(stream, far)
            finally:
                far.abort()
        finally:
            self._circuits.subtract((asker, target))
            self._circuits = +self._circuits

    async def _lead(self, asker: PeerId, target: PeerId) -> Stream:
        """Tell the target who wants to talk to it; the stream on which it does."""
        async with asyncio.timeout(ASK_DEADLINE_S):
            far_end, far = await self._node.daemon.open_stream(target, STOP_PROTOCOL)
            try:
                if far_end.relay is not None:
                    raise NetworkError("no circuit through two relays")
                await far.write(hop.framed(hop.lead(control.raw(asker))))
                status = hop.stop_status(await control.read_message(far, hop.MAX_MESSAGE_BYTES))
                if status != Status.OK:
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
        """Carry bytes one way until the source ends, the sink does, or ``left`` is used up."""
        up, down = self._rates.up, self._rates.down
        with contextlib.suppress(OSError, EOFError):
            while left[0] > 0:
                chunk = await source.read_some()
                left[0] -= len(chunk)
                await down.wait(down.book(len(chunk)))
                await up.wait(up.book(len(chunk)))
                await sink.write(chunk)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            context = {"message": "a relay's circuit failed", "exception": error, "task": task}
            task.get_loop().call_exception_handler(context)
