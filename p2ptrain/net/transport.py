"""Transport over p2pd (``ports.Transport``): opens links to peers and accepts theirs.

==============================================  ========================================================================
a flood of inbound streams                      closed unread above the limits overall, per peer and per origin
silent streams that occupy all slots            the oldest ends when another stream needs its slot
streams of a peer that reads nothing            each ends by timeout; after some, p2pd's connection to the peer closes
==============================================  ========================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PROTOCOL_VERSION, PeerId, short
from p2ptrain.base.logging_setup import reporting
from p2ptrain.net import address
from p2ptrain.net.links import Limits, StreamLink, is_local
from p2ptrain.net.node import Node
from p2ptrain.net.p2pd.control import read_opener
from p2ptrain.net.p2pd.streams import Stream
from p2ptrain.net.rate_limiter import PER_ORIGIN, RateLimiter, origin
from p2ptrain.net.relay.upgrade import Upgrades
from p2ptrain.net.throttle import Throttles

logger = logging.getLogger(__name__)

EXCHANGE_PROTOCOL = f"/p2ptrain/exchange/{PROTOCOL_VERSION}"

MAX_NAMELESS = 32
"""Most inbound streams besides the slots: ending ones, and those whose initiator p2pd has yet to name, which it does at
once. Guess: the peak number under a flood would settle it."""
MAX_HANGING = 4
"""Unread streams of one peer within ``HANGING_S`` after which its connection is closed; an honest peer that is frozen
or very slow should not be cut off each time. Guess: unread streams of honest peers would settle it."""
HANGING_S = 600.0
"""Window of ``MAX_HANGING``. Guess: unread streams of honest peers would settle it."""
MAX_REMEMBERED = 1024
"""Most peers whose unread streams are counted."""
FAREWELL_S = 0.5
"""Timeout for last messages when a transport closes, a round trip. Guess: closing times between real homes would settle
it."""

Handler = Callable[[StreamLink], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _InboundSlot:
    """Slot of an inbound stream."""

    link: StreamLink
    origin: str


class P2PTransport:
    """Transport over p2pd for one protocol name (``ports.Transport``).

    Resources: owns inbound links, the tasks that serve them, and those that end links; ``close`` ends all of these.
    Callers close the links that they open.
    Errors: a handler's NetworkError or RemoteError ends its link and is logged; any other exception is a bug and goes
    to the loop's exception handler.

    Args:
        serves_others: whether inbound traffic serves others alone and is counted so.
        upgrades: waits for direct connections before streams are opened; None: no waits.
    """

    def __init__(
        self,
        node: Node,
        protocol: str = EXCHANGE_PROTOCOL,
        limits: Limits | None = None,
        rates: Throttles | None = None,
        serves_others: bool = False,
        upgrades: Upgrades | None = None,
    ) -> None:
        self._node = node
        self._protocol = protocol
        self._limits = limits or Limits()
        self._rates = rates or Throttles()
        self._serves_others = serves_others
        self._upgrades = upgrades
        self._handler: Handler | None = None
        self._server: asyncio.Server | None = None
        self._inbound: dict[asyncio.Task[None], _InboundSlot | None] = {}
        """Slot of each stream, the oldest first; None: initiator not known yet, or stream about to end."""
        self._partings: dict[StreamLink, asyncio.Task[None]] = {}
        self._hanging: BoundedDict[PeerId, list[float]] = BoundedDict(MAX_REMEMBERED)
        """Times, on the loop's clock, at which unread streams ended since the connection to the peer was last
        closed."""
        self._floods: RateLimiter[PeerId] = RateLimiter()
        self._crowds: RateLimiter[str] = RateLimiter(PER_ORIGIN)

    async def open(self, peer: PeerId, addresses: Sequence[str] = ()) -> StreamLink:
        daemon = self._node.daemon
        # No circuit through this node.
        others = [each for each in addresses if address.relay_of(each) != self._node.peer_id]
        others = [*self._node.neighbours.get(peer, ()), *others]
        is_first = not self._node.streams[peer]
        self._node.streams[peer] += 1
        try:
            async with asyncio.timeout(self._limits.dial_s):
                if self._upgrades is not None and others and is_first:
                    await self._upgrades.renew(peer)
                if others:
                    await daemon.connect(peer, others)
                if self._upgrades is not None:
                    await self._upgrades.wait(peer)
                far_end, stream = await daemon.open_stream(peer, self._protocol)
        except BaseException as error:
            self._node.forget_stream(peer)
            if isinstance(error, TimeoutError):
                raise NetworkError(f"dialing {short(peer)} took more than {self._limits.dial_s:.0f} s") from None
            raise
        return StreamLink(far_end, stream, self._limits, self._rates, on_end=self._on_outbound_end)

    async def listen(self, handler: Handler) -> None:
        """Serve inbound links until ``close``. Raises ValueError on a second call."""
        if self._handler is not None:
            raise ValueError("this transport is already listening")
        self._handler = handler
        self._server = await self._node.daemon.serve_streams(self._protocol, self._take)

    async def close(self) -> None:
        """Accept no more streams, and end the open ones."""
        self._handler = None
        server, self._server = self._server, None
        if server is not None:
            await self._node.daemon.stop_serving(self._protocol, server)
        if self._partings:
            await asyncio.wait(self._partings.values(), timeout=FAREWELL_S)
        while tasks := [*self._inbound, *self._partings.values()]:  # an ending handler starts a parting task
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await asyncio.sleep(0)  # done callbacks remove the tasks

    def _take(self, stream: Stream) -> None:
        if self._handler is None or len(self._inbound) >= self._limits.inbound + MAX_NAMELESS:
            logger.info("refused a link: %d are open", len(self._inbound))
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
            link = StreamLink(far_end, stream, self._limits, self._rates, self._serves_others, self._on_link_end)
            if self._admit(link):
                self._node.streams[link.peer] += 1
                try:
                    await handler(link)
                    await link.close()
                    if (parting := self._partings.get(link)) is not None:  # the stream keeps its slot until then
                        await asyncio.wait([parting])
                finally:
                    self._node.forget_stream(link.peer)
        except (NetworkError, RemoteError, OSError, EOFError) as error:
            logger.info("an inbound link ended: %s", error)
            if link is not None:
                link.give_up()
        finally:
            stream.abort()

    def _admit(self, link: StreamLink) -> bool:
        """Assign a slot to a stream whose initiator has become known; return False if there is none."""
        task = asyncio.current_task()
        assert task is not None
        peer, where, now = link.peer, origin(link.far_end.place), task.get_loop().time()
        if not (self._floods.admits_alone(peer, now) and self._crowds.admits(where, now)):
            logger.info("refused a link from %s: too many new links", short(peer))
            return False
        held = {task: place for task, place in self._inbound.items() if place is not None}
        own = {task: place for task, place in held.items() if place.link.peer == peer}
        ended = {task: place for task, place in own.items() if place.link in self._partings}
        if len(own) >= self._limits.inbound_per_peer and not self._make_room(ended):
            logger.info("refused a link from %s: it already has %d", short(peer), len(own))
            return False
        there = {task: place for task, place in held.items() if place.origin == where}
        is_crowd = len(there) >= self._limits.inbound_per_origin and not is_local(link.far_end)
        if (is_crowd or len(held) >= self._limits.inbound) and not self._make_room(there if is_crowd else held):
            logger.info("refused a link from %s: %d are open, %d from its origin", short(peer), len(held), len(there))
            return False
        self._inbound[task] = _InboundSlot(link, where)
        return True

    def _on_outbound_end(self, link: StreamLink) -> None:
        self._node.forget_stream(link.peer)
        self._on_link_end(link)

    def _on_link_end(self, link: StreamLink) -> None:
        task = self._partings[link] = asyncio.get_running_loop().create_task(self._part(link))
        task.add_done_callback(lambda _: self._partings.pop(link))

    async def _part(self, link: StreamLink) -> None:
        if await link.part():
            return
        now = asyncio.get_running_loop().time()
        hanging = [at for at in self._hanging.pop(link.peer, []) if at > now - HANGING_S]
        if len(hanging) + 1 < MAX_HANGING:
            self._hanging[link.peer] = [*hanging, now]
            return
        logger.info("closing the connection to %s: it reads nothing", short(link.peer))
        with contextlib.suppress(NetworkError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._node.daemon.disconnect(link.peer)

    def _make_room(self, held: Mapping[asyncio.Task[None], _InboundSlot]) -> bool:
        """End a silent or ending stream to free its slot; return False if there is none.

        The oldest such stream of the origin with most of them is chosen.
        """
        silent = {task: place.origin for task, place in held.items() if not place.link.has_heard}
        if not silent:
            return False
        crowds = Counter(silent.values())
        oldest = max(silent, key=lambda task: crowds[silent[task]])
        logger.info("closing an idle link to make room for another")
        link = held[oldest].link
        self._inbound[oldest] = None
        if link in self._partings:
            link.hurry()
        else:
            oldest.cancel()
        return True
