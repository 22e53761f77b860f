"""Handler of inbound links while the peer is away: it declines, so that no partner waits for us or counts a failure."""

from __future__ import annotations

import asyncio
import contextlib

from p2ptrain.framing import FrameKind
from p2ptrain.net.session import OPENING_DEADLINE_S, message_in
from p2ptrain.ports import Link
from p2ptrain.swarm import DeclineReason, PeerState
from p2ptrain.swarm.messages import Decline, Offer, WeightsRequest
from p2ptrain.wire import encode_message


async def turn_away(link: Link, step: int, progress: float) -> None:
    """Decline an offer or a request for weights as a leaving peer, and close the link.

    The initiator makes no further offers until our next presence record. Raises NetworkError and RemoteError.
    """
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPENING_DEADLINE_S):
                kind, body = await link.receive()
                if kind == FrameKind.MESSAGE and isinstance(message_in(body), Offer | WeightsRequest):
                    no = Decline(DeclineReason.LEAVING, PeerState.LEAVING, step, progress, known=())
                    await link.send(FrameKind.MESSAGE, encode_message(no))
    finally:
        await link.close()
