"""Receipts of what a running peer and its partners contributed (``p2ptrain.receipts``), signed in both directions.

One conversation per link of the receipt protocol::

    asks      ["mine", step, tokens]
    answers   ["receipt", receipt, step, tokens]
    asks      ["receipt", receipt]                an empty receipt: there is nothing to sign

Step and tokens are the sender's own. Receipts are best effort: exchanges neither wait for them nor depend on them.
A partner that does not answer is asked again later, less and less often. Counts end with the process, so a peer that
leaves asks once more all partners with unsigned exchanges, and for a moment again those that do not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from random import Random

from p2ptrain.base.background import in_background
from p2ptrain.base.clock import wall
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, RunId, short
from p2ptrain.base.logging_setup import reporting
from p2ptrain.net.links import Limits, origin_of
from p2ptrain.net.rate_limiter import SlidingWindowLimit
from p2ptrain.net.rpc import receive_message, send_message
from p2ptrain.ports import Clock, Link, Notebook, Transport
from p2ptrain.receipts import MAX_RECEIPT_BYTES, Book, Receipt
from p2ptrain.statements import Sign, is_count
from p2ptrain.swarm.events import Commit
from p2ptrain.swarm.rules import GOODBYE_S
from peer.ledger import Ledger

logger = logging.getLogger(__name__)

RECEIPT_PROTOCOL = "/p2ptrain/receipts/2"

LIMITS = Limits(idle_s=10.0, dial_s=10.0, inbound=8, inbound_per_peer=1)
"""A conversation has a kilobyte. Guess: receipts per minute in a large swarm would settle it."""
DEADLINE_S = 20.0
"""Timeout of a conversation, dialing included. Guess: response times over relays would settle it."""
TICK_S = 1.0
"""Interval of the question whom to ask, in seconds."""
LAST_TICK_S = 0.05
"""Interval of that question in a peer that leaves, in seconds."""
LAST_RETRY_S = 0.5
"""Shortest time between two requests to a partner that does not answer, in seconds."""
AT_ONCE = 16
"""Most partners that are asked at the same time; at the end those of the latest exchanges come first."""
_ABOUT = "a receipt"
_MAX_BYTES = MAX_RECEIPT_BYTES + 64


class Contributions:
    """Counts exchanges, and exchanges receipts with partners. Runs in the loop.

    Args:
        position: returns this peer's outer step and its tokens.
    """

    def __init__(
        self,
        run: RunId,
        me: PeerId,
        sign: Sign,
        ledger: Ledger,
        position: Callable[[], tuple[int, int]],
        notebook: Notebook,
        wall: Clock = wall,
        random: Random | None = None,
    ) -> None:
        try:
            earlier = [each for each in ledger.read() if each is not None and each.peer == me]
        except OSError:  # saving the next receipt tells the owner
            earlier = []
        self._book = Book(run, me, sign, earlier)
        self._ledger = ledger
        self._position = position
        self._notebook = notebook
        self._wall = wall
        self._random = random or Random()
        self._is_full = False
        self._asking: dict[PeerId, asyncio.Task[None]] = {}
        self._answering = 0
        """Conversations that partners began."""
        self._allowance = SlidingWindowLimit(overall=360, each=12, window_s=60.0)
        """Rate limit; an honest peer asks each partner a few times per minute. Guess: receipts per minute in a large
        swarm would settle it."""
        self.newest = max(earlier, key=lambda each: each.until, default=None)
        """Newest receipt, of an earlier session at first; None: there is none yet."""

    @property
    def of_partners(self) -> list[Receipt]:
        """The newest receipt that this peer signed for each partner."""
        return self._book.signed()

    def exchanged(self, commit: Commit) -> None:
        self._book.exchanged(commit.link.peer, commit.sent_bytes, commit.received_bytes, self._wall())

    def given(self, partner: PeerId, size: int) -> None:
        """Count ``size`` bytes of weights sent to a newcomer."""
        self._book.served(partner, size, self._wall())

    def taken(self, partner: PeerId, size: int) -> None:
        """Count ``size`` bytes of weights received from a donor."""
        self._book.was_served(partner, size, self._wall())

    @contextlib.asynccontextmanager
    async def gathering(self, transport: Callable[[], Transport]) -> AsyncIterator[None]:
        """Exchange receipts while the block runs, and once more at its end.

        Args:
            transport: returns the transport to partners; raises NetworkError while there is none.
        """
        try:
            async with in_background(self._run(transport)):
                yield
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    while self._ask(transport, self._book.open()) or self._answering:
                        await asyncio.sleep(LAST_TICK_S)
            for each in self._asking.values():
                each.cancel()

    async def answer(self, link: Link) -> None:
        """Exchange receipts with a partner that asks, over any link. Raises NetworkError and RemoteError."""
        self._answering += 1
        try:
            await self._answer(link)
        finally:
            self._answering -= 1
        await link.close()

    async def ask(self, transport: Transport, partner: PeerId) -> None:
        """Exchange receipts with a partner. Raises NetworkError and RemoteError."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                link = await transport.open(partner, [])  # without addresses: an exchange has just connected us
                try:
                    position = self._position()
                    await send_message(link, ["mine", *position])
                    match await receive_message(link, _ABOUT, _MAX_BYTES):
                        case ["receipt", bytes(body), step, tokens] if is_count(step) and is_count(tokens):
                            await send_message(link, ["receipt", self._signed(partner, step, tokens)])
                            await self._keep(body, partner, position)
                        case _:
                            raise RemoteError("expected a receipt, got something else")
                finally:
                    await link.close()
        except TimeoutError:
            raise NetworkError(f"{short(partner)} signed no receipt within {DEADLINE_S:.0f} s") from None

    async def _run(self, transport: Callable[[], Transport]) -> None:
        while True:
            await asyncio.sleep(TICK_S * self._random.uniform(0.75, 1.25))
            self._ask(transport, self._book.due(self._wall()))

    def _ask(self, transport: Callable[[], Transport], partners: list[PeerId]) -> bool:
        """Start asking partners, unless they are being asked or many are; return whether any is being asked."""
        for partner in partners:
            if partner not in self._asking and len(self._asking) < AT_ONCE:
                task = self._asking[partner] = asyncio.create_task(self._try_to_ask(transport, partner))
                task.add_done_callback(reporting("a receipt"))
        return bool(self._asking)

    async def _try_to_ask(self, transport: Callable[[], Transport], partner: PeerId) -> None:
        self._book.close(partner)  # an exchange meanwhile makes it due again
        try:
            await self.ask(transport(), partner)
        except RemoteError as error:  # asking again would give the same; the next exchange does
            logger.info("no receipt of %s: %s", short(partner), error)
        except NetworkError as error:
            logger.info("no receipt of %s yet: %s", short(partner), error)
            self._book.reopen(partner, self._wall())
            await asyncio.sleep(LAST_RETRY_S)
        finally:
            del self._asking[partner]

    async def _answer(self, link: Link) -> None:
        match await receive_message(link, _ABOUT, _MAX_BYTES):
            case ["mine", step, tokens] if is_count(step) and is_count(tokens):
                pass
            case _:
                raise RemoteError("expected a request for a receipt, got something else")
        if not self._allowance.take(link.peer, asyncio.get_running_loop().time(), origin_of(link)):
            raise NetworkError(f"{short(link.peer)} sent too many requests for receipts")
        position = self._position()
        self._book.close(link.peer)
        try:
            await send_message(link, ["receipt", self._signed(link.peer, step, tokens), *position])
            answer = await receive_message(link, _ABOUT, _MAX_BYTES)
        except NetworkError:
            self._book.reopen(link.peer, self._wall())
            raise
        match answer:
            case ["receipt", bytes(body)]:
                await self._keep(body, link.peer, position)
            case _:
                raise RemoteError("expected a receipt, got something else")

    def _signed(self, partner: PeerId, step: int, tokens: int) -> bytes:
        """Return a receipt for a partner; empty if it did nothing with us."""
        receipt = self._book.receipt(partner, step, tokens, self._wall())
        return b"" if receipt is None else receipt.encode()

    async def _keep(self, body: bytes, partner: PeerId, position: tuple[int, int]) -> None:
        """Check and save a partner's receipt; an empty one counts as none. Raises RemoteError."""
        if not body:
            return
        receipt = Receipt.decode(body)
        if not self._book.is_ours(receipt, partner, *position, self._wall()):
            raise RemoteError("its receipt is not what we asked for")
        self._book.accept(receipt)
        self.newest = receipt
        try:
            await asyncio.to_thread(self._ledger.add, receipt)
        except OSError as error:
            if not self._is_full:
                self._notebook.note("not saved", what="a receipt", why=error.strerror)
            self._is_full = True
        else:
            self._is_full = False
