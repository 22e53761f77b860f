"""``ports.Transport`` over p2pd: opens links to peers, and takes in theirs.

==============================================  ========================================================================
a flood of inbound streams                      closed unread beyond the caps and rates, overall, per peer and origin
silent streams that hold all places             the oldest ends where another needs its place
streams of a peer that reads nothing            each ends in time; after some, p2pd's connection to that peer, too
==============================================  ========================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PROTOCOL_VERSION, PeerId, short
from p2ptrain.base.logging_setup import reporting
from p2ptrain.net import address
from p2ptrain.net.allowance import origin
from p2ptrain.net.links import Limits, StreamLink, is_local
from p2ptrain.net.node import Node
from p2ptrain.net.p2pd.control import read_opener
from p2ptrain.net.p2pd.streams import Stream
from p2ptrain.net.rate_limiter import PER_ORIGIN, RateLimiter
from p2ptrain.net.throttle import Throttles

logger = logging.getLogger(__name__)

EXCHANGE_PROTOCOL = f"/p2ptrain/exchange/{PROTOCOL_VERSION}"

MOST_NAMELESS = 32
"""Inbound streams beyond all places of which p2pd has yet to say who opened them, or that are about to end. It says so
at once. A guess."""
MOST_HANGING = 4
"""Streams of one peer, within ``HANGING_S``, that it did not read to their end, until its connection is closed. A
guess: honest ones are frozen or very slow, and are not cut off each time."""
HANGING_S = 600.0
"""A guess."""
MOST_REMEMBERED = 1024
"""Peers of whom streams hang."""
FAREWELL_S = 0.5
"""For all that is being said when a transport closes. A guess: a round trip."""

Handler = Callable[[StreamLink], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _InboundSlot:
    """One of those that inbound streams have."""

    link: StreamLink
    origin: str


class P2PTransport:
    """Opens links to peers and takes in theirs (``ports.Transport``), under one protocol name.

    Owns the links it took in, the tasks that serve them and those that part from links; ``close`` ends all of these. A
    link that it opened is its opener's to close. A handler's NetworkError or RemoteError ends its link with a line in
    the log; any other exception is a bug and goes to the loop's exception handler.

    Args:
        is_gift: what others ask here is for their own sake, and counted so.
    """

    def __init__(
        self,
        node: Node,
        protocol: str = EXCHANGE_PROTOCOL,
        limits: Limits | None = None,
        rates: Throttles | None = None,
        is_gift: bool = False,
    ) -> None:
        self._node = node
        self._protocol = protocol
        self._limits = limits or Limits()
        self._rates = rates or Throttles()
        self._is_gift = is_gift
        self._handler: Handler | None = None
        self._server: asyncio.Server | None = None
        self._inbound: dict[asyncio.Task[None], _InboundSlot | None] = {}
        """One a stream, the oldest first; None: not known yet, or about to end."""
        self._partings: dict[StreamLink, asyncio.Task[None]] = {}
        self._hanging: dict[PeerId, list[float]] = {}
        """When streams ended on which p2pd may wait for a peer, by the loop's clock; since we closed its connection."""
        self._floods: RateLimiter[PeerId] = RateLimiter()
        self._crowds: RateLimiter[str] = RateLimiter(PER_ORIGIN)

    async def open(self, peer: PeerId, addresses: Sequence[str] = ()) -> StreamLink:
        daemon = self._node.daemon
        others = [each for each in addresses if address.relay_of(each) != self._node.peer_id]  # not through ourselves
        try:
            async with asyncio.timeout(self._limits.dial_s):
                if others:
                    await daemon.connect(peer, others)
                far_end, stream = await daemon.open_stream(peer, self._protocol)
        except TimeoutError:
            raise NetworkError(f"dialing {short(peer)} took more than {self._limits.dial_s:.0f} s") from None
        return StreamLink(far_end, stream, self._limits, self._rates, see_off=self._see_off)

    async def listen(self, handler: Handler) -> None:
        """Serve inbound links until ``close``. Once."""
        if self._handler is not None:
            raise ValueError("this transport listens already")
        self._handler = handler
        try:
            async with asyncio.timeout(self._limits.dial_s):
                self._server = await self._node.daemon.serve_streams(self._protocol, self._take)
        except TimeoutError:
            raise NetworkError("p2pd does not take our handler") from None

    async def close(self) -> None:
        """Take in nothing more, and end what is under way."""
        self._handler = None
        server, self._server = self._server, None
        if server is not None:
            with contextlib.suppress(TimeoutError, NetworkError):
                async with asyncio.timeout(1.0):
                    await self._node.daemon.stop_serving(self._protocol, server)
        if self._partings:
            await asyncio.wait(self._partings.values(), timeout=FAREWELL_S)
        while tasks := [*self._inbound, *self._partings.values()]:  # whose handler ends parts from its link
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await asyncio.sleep(0)  # they are taken off our books then

    def _take(self, stream: Stream) -> None:
        """An inbound stream: a task of ours, or the door."""
        if self._handler is None or len(self._inbound) >= self._limits.inbound + MOST_NAMELESS:
            logger.info("turned down a link: %d are open", len(self._inbound))
            stream.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(self._handler, stream))
        self._inbound[task] = None
        task.add_done_callback(self._inbound.pop)
        task.add_done_callback(reporting("the handler of an inbound link"))

    async def _serve(self, handler: Handler, stream: Stream) -> None:
        link = None
        try:
            async with asyncio.timeout(self._limits.idle_s):
                far_end = await read_opener(stream)
            link = StreamLink(far_end, stream, self._limits, self._rates, self._is_gift, self._see_off)
            if self._admit(link):
                await handler(link)
                await link.close()
                if (parting := self._partings.get(link)) is not None:  # it has its place until then
                    await asyncio.wait([parting])
        except (NetworkError, RemoteError, OSError, EOFError) as error:
            logger.info("an inbound link ended: %s", error)
            if link is not None:
                link.give_up()
        finally:
            stream.abort()

    def _admit(self, link: StreamLink) -> bool:
        """Whether a stream gets a place. Only now is it known whose it is."""
        task = asyncio.current_task()
        assert task is not None
        peer, where, now = link.peer, origin(link.far_end.place), task.get_loop().time()
        if not (self._floods.admits_alone(peer, now) and self._crowds.admits(where, now)):
            logger.info("turned down a link from %s: there are too many calls", short(peer))
            return False
        held = {task: place for task, place in self._inbound.items() if place is not None}
        own = {task: place for task, place in held.items() if place.link.peer == peer}
        ended = {task: place for task, place in own.items() if place.link in self._partings}
        if len(own) >= self._limits.inbound_per_peer and not self._make_room(ended):
            logger.info("turned down a link from %s: it has %d", short(peer), len(own))
            return False
        there = {task: place for task, place in held.items() if place.origin == where}
        is_crowd = len(there) >= self._limits.inbound_per_origin and not is_local(link.far_end)
        if (is_crowd or len(held) >= self._limits.inbound) and not self._make_room(there if is_crowd else held):
            logger.info("turned down a link from %s: %d are open, %d from there", short(peer), len(held), len(there))
            return False
        self._inbound[task] = _InboundSlot(link, where)
        return True

    def _see_off(self, link: StreamLink) -> None:
        """A link of ours has ended: let the other side hear so, and end."""
        task = self._partings[link] = asyncio.get_running_loop().create_task(self._part(link))
        task.add_done_callback(lambda _: self._partings.pop(link))

    async def _part(self, link: StreamLink) -> None:
        if await link.part():
            return
        now = asyncio.get_running_loop().time()
        hanging = [at for at in self._hanging.pop(link.peer, []) if at > now - HANGING_S]
        if len(hanging) + 1 < MOST_HANGING:
            self._hanging[link.peer] = [*hanging, now]
            if len(self._hanging) > MOST_REMEMBERED:
                del self._hanging[next(iter(self._hanging))]
            return
        logger.info("the connection to %s is closed: it reads nothing", short(link.peer))
        with contextlib.suppress(NetworkError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._node.daemon.disconnect(link.peer)

    def _make_room(self, held: Mapping[asyncio.Task[None], _InboundSlot]) -> bool:
        """End a stream on which no frame has come, or that we have ended, if there is one: the oldest of the origin
        that has most of them."""
        silent = {task: place.origin for task, place in held.items() if not place.link.has_heard}
        if not silent:
            return False
        crowds = Counter(silent.values())
        oldest = max(silent, key=lambda task: crowds[silent[task]])
        logger.info("a link ends that has nothing to say, for another's sake")
        link = held[oldest].link
        self._inbound[oldest] = None
        if link in self._partings:
            link.hurry()
        else:
            oldest.cancel()
        return True
