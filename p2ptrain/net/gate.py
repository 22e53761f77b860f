"""Admission check of a closed run: both sides of a link show a membership certificate first.

::

    initiator                     responder
    BADGE, and its message ->                        adds no round trip
                           <-  REFUSAL, end          or BADGE, and its response

The check wraps the transport (``ports.Transport``), so the core and the driver do not know of it; an open run has none
and sends no extra bytes. ``decline_while_away``, the handler of a peer that is away, is behind the check, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from p2ptrain.admission import Gate, Refusal, remedy
from p2ptrain.base.clock import steady, wall
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.framing import FrameKind
from p2ptrain.net.rate_limiter import SlidingWindowLimit
from p2ptrain.ports import Clock, Link, Notebook, Transport

CERTIFICATE_DEADLINE_S = 15.0
"""Timeout for the certificate on an inbound link, equal to that of the message after it."""
NOTES_S = 600.0
"""Window of the limit on notes: one refusal per peer and ten overall, so that others cannot fill the event log. Guess:
refusals per hour in a closed run would settle it."""


class GatedTransport:
    """Transport that opens and accepts links only to and from peers that the gate admits.

    Args:
        checks_responder: whether the other side of an outbound link must be admitted, too; a bootstrap is not.
    """

    def __init__(
        self,
        transport: Transport,
        gate: Gate,
        me: PeerId,
        notebook: Notebook,
        wall: Clock = wall,
        checks_responder: bool = True,
    ) -> None:
        self._transport = transport
        self._gate = gate
        self._me = me
        self._notebook = notebook
        self._wall = wall
        self._checks_responder = checks_responder
        self._told = SlidingWindowLimit(overall=10, each=1, window_s=NOTES_S)

    async def open(self, peer: PeerId, addresses: Sequence[str] = ()) -> Link:
        link = await self._transport.open(peer, addresses)
        try:
            await link.send(FrameKind.BADGE, self._gate.certificate)
        except BaseException:
            await link.close()
            raise
        return GatedLink(link, self._check)

    async def listen(self, handler: Callable[[Link], Awaitable[None]]) -> None:
        await self._transport.listen(self.guarded(handler))

    def guarded(self, handler: Callable[[Link], Awaitable[None]]) -> Callable[[Link], Awaitable[None]]:
        """Wrap a handler so that it serves admitted peers only."""

        async def handle_admitted(link: Link) -> None:
            if await self._admit(link):
                await handler(link)

        return handle_admitted

    async def _admit(self, link: Link) -> bool:
        """Check the initiator's certificate and send ours, or send the reason for refusal and close the link."""
        try:
            async with asyncio.timeout(CERTIFICATE_DEADLINE_S):
                kind, shown = await link.receive()
                if kind != FrameKind.BADGE:
                    raise RemoteError(f"expected a membership certificate, got a frame of kind {kind}")
                why = self._gate.refusal(link.peer, shown, self._wall())
                if why is None:
                    await link.send(FrameKind.BADGE, self._gate.certificate)
                    return True
                if self._told.take(f"<{link.peer}", steady()):
                    self._notebook.note("turned away", peer=link.peer, why=why)
                await link.send(FrameKind.REFUSAL, why.encode())
        except TimeoutError:
            raise NetworkError(
                f"{short(link.peer)} sent no membership certificate within {CERTIFICATE_DEADLINE_S:.0f} s"
            ) from None
        await link.close()
        return False

    def _check(self, peer: PeerId, kind: int, body: bytes) -> None:
        """Check the first frame on an outbound link. Raises NetworkError if either side refuses the other."""
        if kind == FrameKind.REFUSAL:
            try:
                why = Refusal(body.decode("ascii"))
            except ValueError:
                raise RemoteError(f"expected a reason for refusal, got {body!r:.40}") from None
            if self._told.take(f">{why.name}", steady()):
                self._notebook.note("not admitted", peer=peer, why=why, remedy=remedy(why, self._me))
            raise NetworkError(f"it did not admit us: {why}")
        if kind != FrameKind.BADGE:
            raise RemoteError(f"expected a membership certificate, got a frame of kind {kind}")
        if self._checks_responder and (refused := self._gate.refusal(peer, body, self._wall())) is not None:
            raise NetworkError(f"we did not admit it: {refused}")


class GatedLink(Link):
    """Outbound link that checks the partner's certificate before its first message."""

    def __init__(self, link: Link, check: Callable[[PeerId, int, bytes], None]) -> None:
        self.peer = link.peer
        self._link = link
        self._check: Callable[[PeerId, int, bytes], None] | None = check

    async def send(self, kind: int, body: bytes | memoryview) -> None:
        await self._link.send(kind, body)

    async def receive(self) -> tuple[int, bytes]:
        await self._check_certificate()
        return await self._link.receive()

    async def wait_for_frame(self) -> None:
        await self._check_certificate()
        await self._link.wait_for_frame()

    async def receive_into(self, buffer: memoryview) -> tuple[int, int]:
        await self._check_certificate()
        return await self._link.receive_into(buffer)

    async def open_parallel(self, size_bytes: int) -> Sequence[Link]:
        await self._check_certificate()
        return await self._link.open_parallel(size_bytes)

    def record_transfer(self, size_bytes: int, seconds: float) -> None:
        self._link.record_transfer(size_bytes, seconds)

    async def close(self) -> None:
        await self._link.close()

    async def _check_certificate(self) -> None:
        if self._check is not None:
            self._check(self.peer, *await self._link.receive())
            self._check = None
