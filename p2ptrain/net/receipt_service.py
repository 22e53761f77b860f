"""Receipt protocol: partners countersign each other's receipts (``p2ptrain.receipts``); one request, one response.

::

    ["receipt", receipt]        ["agreed", countersignature]  or  ["objection", why]

The protocol is separate and best effort: exchanges neither wait for it nor depend on it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from p2ptrain.base.clock import wall
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import RunId, short
from p2ptrain.net.links import Limits, origin_of
from p2ptrain.net.rate_limiter import SlidingWindowLimit
from p2ptrain.net.rpc import receive_message, request, send_message
from p2ptrain.ports import Clock, Link, Transport
from p2ptrain.receipts import MAX_RECEIPT_BYTES, Book, Objection, Receipt
from p2ptrain.statements import Sign

RECEIPT_PROTOCOL = "/p2ptrain/receipts/1"

LIMITS = Limits(idle_s=10.0, dial_s=10.0, inbound=8, inbound_per_peer=1)
"""A request and its response have half a kilobyte. Guess: receipts per minute in a large swarm would settle it."""
_ABOUT = "a receipt"
_MAX_BYTES = MAX_RECEIPT_BYTES + 32
DEADLINE_S = 20.0
"""Timeout of a request and its response, dialing included. Guess: response times over relays would settle it."""


@dataclass(slots=True)
class ReceiptService:
    """Request handler: countersigns partners' claims that match our book."""

    run: RunId
    book: Book
    sign: Sign
    wall: Clock = wall
    """Clock for dates only; it may be set back."""
    _allowance: SlidingWindowLimit = field(
        default_factory=lambda: SlidingWindowLimit(overall=360, each=12, window_s=60.0)
    )
    """Rate limit; an honest peer makes a few claims per minute to each partner. Guess: receipts per minute in a large
    swarm would settle it."""

    async def answer(self, link: Link) -> None:
        """Answer one request, over any link. Raises NetworkError and RemoteError."""
        match await receive_message(link, _ABOUT, _MAX_BYTES):
            case ["receipt", bytes(body)]:
                claim = Receipt.decode(body)
            case _:
                raise RemoteError("expected a receipt, got something else")
        if not self._allowance.take(link.peer, asyncio.get_running_loop().time(), origin_of(link)):
            raise NetworkError(f"{short(link.peer)} sent too many signature requests")
        objection = self.book.judge(claim, link.peer, self.wall())
        if objection is not None:
            await send_message(link, ["objection", objection.value])
        else:
            await send_message(link, ["agreed", claim.countersigned(self.run, self.sign).countersignature])
        await link.close()


async def ask_to_sign(transport: Transport, claim: Receipt) -> bytes | Objection:
    """Ask a partner to countersign; return its signature, unverified, or its objection.

    Raises NetworkError and RemoteError.
    """
    question = ["receipt", claim.encode()]
    match await request(  # without addresses: an exchange has just connected us
        transport, claim.partner, [], question, about=_ABOUT, most_bytes=_MAX_BYTES, deadline_s=DEADLINE_S
    ):
        case ["agreed", bytes(countersignature)]:
            return countersignature
        case ["objection", str(why)] if why in set(Objection):
            return Objection(why)
        case _:
            raise RemoteError("expected a signature, got something else")
