"""Collection of partners' signatures under what a running peer contributed (``p2ptrain.receipts``).

Unsigned contributions are lost when either process ends. A peer that leaves therefore asks once more; a partner asks
in return, and the leaving peer waits for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from math import inf
from random import Random

from p2ptrain.base.background import in_background
from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.clock import wall
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, RunId, short
from p2ptrain.base.logging_setup import reporting
from p2ptrain.net.receipt_service import ReceiptService, ask_to_sign
from p2ptrain.ports import Clock, Link, Notebook, Transport
from p2ptrain.receipts import MAX_PARTNERS, Book, Objection, Receipt
from p2ptrain.statements import Sign
from p2ptrain.swarm.events import Commit
from p2ptrain.swarm.rules import GOODBYE_S
from peer.ledger import Ledger

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""Interval of the question whom to ask, in seconds."""
AT_ONCE = 16
"""Most partners that are asked at the same time; at the end those of the latest exchanges come first."""
LAST_TRY_S = 0.1
"""Interval of the last claims of a peer that leaves."""
LAST_TRIES = 4
"""Most claims in a row of which a partner may object to all but the last, since it has not counted as much as we."""
RETURNS = 10
"""Most such intervals in which it waits for the claims that partners make in return. Guess: their response times."""
LAST_WORD_S = 0.3
"""Time for the last signature to arrive, a round trip. Guess: measure how many are lost."""
RETURN_S = 1.0
"""Shortest time between two claims that are made because the partner has just made one."""


class Contributions:
    """Counts exchanges, asks partners to sign receipts, and signs theirs. Runs in the loop.

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
        self._book = Book(run, me)
        self._sign = sign
        self._ledger = ledger
        self._position = position
        self._notebook = notebook
        self._wall = wall
        self._random = random or Random()
        self._is_full = False
        self._asking: dict[PeerId, asyncio.Task[None]] = {}
        self._signers: set[PeerId] = set()  # partners that have signed something since this peer began to leave
        self._returned: BoundedDict[PeerId, float] = BoundedDict(MAX_PARTNERS)
        """When a partner was last asked because it had asked, on the loop's clock."""
        self._transport: Callable[[], Transport] | None = None
        last = ledger.newest()
        self.newest = last if last is not None and last.peer == me else None
        """Newest receipt, of an earlier session at first; None: there is none yet."""
        self.notary = ReceiptService(run, self._book, sign, wall)

    @property
    def of_partners(self) -> list[Receipt]:
        """Claims of partners that this peer countersigned, the last one of each."""
        return self._book.countersigned()

    def exchanged(self, commit: Commit) -> None:
        self._book.exchanged(commit.link.peer, commit.sent_bytes, commit.received_bytes, self._wall())

    def given(self, partner: PeerId, size: int) -> None:
        """Count ``size`` bytes of our weights sent to a newcomer."""
        self._book.served(partner, size, self._wall())

    def taken(self, partner: PeerId, size: int) -> None:
        """Count ``size`` bytes of weights received from a donor."""
        self._book.was_served(partner, size, self._wall())

    @contextlib.asynccontextmanager
    async def gathering(self, transport: Callable[[], Transport]) -> AsyncIterator[None]:
        """Claim receipts while the block runs, and everything else at its end.

        Args:
            transport: returns the transport to partners; raises NetworkError while there is none.
        """
        self._transport = transport
        try:
            async with in_background(self._run()):
                yield
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    await self._ask_all()
            self._transport = None
            for each in self._asking.values():
                each.cancel()

    async def answer(self, link: Link) -> None:
        """Answer a partner's request, and soon ask in return. Raises NetworkError and RemoteError."""
        await self.notary.answer(link)
        now = asyncio.get_running_loop().time()
        if now - self._returned.get(link.peer, -inf) >= RETURN_S:
            self._returned[link.peer] = now
            self._ask(link.peer, is_last=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S * self._random.uniform(0.75, 1.25))
            for partner in self._book.due(self._wall()):
                self._ask(partner)

    async def _ask_all(self) -> None:
        """Ask all partners until nothing is open, and let those that answer ask, too."""
        self._signers.clear()
        while partners := self._book.open()[:AT_ONCE]:
            for partner in partners:
                self._ask(partner, is_last=True)
            await asyncio.sleep(LAST_TRY_S)
        for _ in range(RETURNS):
            if not any(map(self._book.is_owed, self._signers)):
                break
            await asyncio.sleep(LAST_TRY_S)
        await asyncio.sleep(LAST_WORD_S if self._signers else 0.0)

    def _ask(self, partner: PeerId, is_last: bool = False) -> None:
        """Start asking a partner, unless it is being asked, or many are."""
        if self._transport is not None and partner not in self._asking and len(self._asking) < AT_ONCE:
            task = self._asking[partner] = asyncio.create_task(self._try_to_claim(self._transport, partner, is_last))
            task.add_done_callback(lambda _: self._asking.pop(partner, None))
            task.add_done_callback(reporting("a claim"))

    async def _try_to_claim(self, transport: Callable[[], Transport], partner: PeerId, is_last: bool) -> None:
        for _ in range(LAST_TRIES if is_last else 1):
            try:
                await self.claim(transport(), partner, is_last)
                break
            except NetworkError as error:
                logger.info("no receipt of %s: %s", short(partner), error)
                break
            except RemoteError as error:
                logger.info("no receipt of %s: %s", short(partner), error)
            await asyncio.sleep(LAST_TRY_S)

    async def claim(self, transport: Transport, partner: PeerId, is_last: bool = False) -> bool:
        """Ask a partner to sign a receipt; False if there is nothing to sign. Raises NetworkError, RemoteError."""
        step, tokens = self._position()
        claim = self._book.claim(partner, step, tokens, self._wall(), self._sign, is_last)
        if claim is None:
            return False
        try:
            answer = await ask_to_sign(transport, claim)
        except (NetworkError, RemoteError):  # an invalid answer counts as none
            self._book.unanswered(claim, self._wall())
            raise
        if isinstance(answer, Objection):
            self._book.objected(claim, self._wall(), answer)
            raise RemoteError(f"it does not sign our receipt: {answer}")
        receipt = self._book.agreed(claim, answer)
        if receipt is None:
            self._book.objected(claim, self._wall())
            raise RemoteError("its signature under our receipt does not hold")
        self._keep(receipt)
        return True

    def _keep(self, receipt: Receipt) -> None:
        self.newest = receipt
        self._signers.add(receipt.partner)
        try:
            self._ledger.add(receipt)
        except OSError as error:
            if not self._is_full:
                self._notebook.note("not saved", what="a receipt", why=error.strerror)
            self._is_full = True
        else:
            self._is_full = False
