"""Collection of partners' signatures under what a running peer contributed (``p2ptrain.receipts``).

Unsigned contributions are lost when either process ends; a peer that leaves asks once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from random import Random

from p2ptrain.base.clock import wall
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.base.logging_setup import reporting
from p2ptrain.net.receipt_service import ReceiptService, ask_to_sign
from p2ptrain.ports import Clock, Notebook, Transport
from p2ptrain.receipts import Book, Objection, Receipt
from p2ptrain.statements import Sign
from p2ptrain.swarm.events import Commit
from p2ptrain.swarm.rules import GOODBYE_S
from peer.ledger import Ledger

logger = logging.getLogger(__name__)

PERIOD_S = 30.0
"""Mean seconds between two claims, times a random factor of 0.75 to 1.25: 2 MB of receipts a day. Guess: the share of
contributions that stays unsigned in a real swarm."""
GOODBYES = 8
"""Maximum number of last claims; the partners asked longest ago come first."""


class Contributions:
    """Counts exchanges, asks partners to sign receipts, and signs theirs. Runs in the network loop.

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
        """Claim receipts periodically while the block runs, and in a last round at its end.

        Args:
            transport: returns the transport to partners; raises NetworkError while there is none.
        """
        task = asyncio.create_task(self._run(transport))
        task.add_done_callback(reporting("the collection of receipts"))
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    for _ in range(GOODBYES):
                        with contextlib.suppress(NetworkError, RemoteError):
                            if not await self.claim(transport()):
                                break

    async def _run(self, transport: Callable[[], Transport]) -> None:
        while True:
            await asyncio.sleep(PERIOD_S * self._random.uniform(0.75, 1.25))
            try:
                await self.claim(transport())
            except (NetworkError, RemoteError) as error:
                logger.info("no receipt: %s", error)

    async def claim(self, transport: Transport) -> bool:
        """Ask one partner to sign a receipt; False if there is nothing to sign. Raises NetworkError, RemoteError."""
        step, tokens = self._position()
        claim = self._book.claim(step, tokens, self._wall(), self._sign)
        if claim is None:
            return False
        try:
            answer = await ask_to_sign(transport, claim)
        except (NetworkError, RemoteError):  # an invalid answer counts as none
            self._book.unanswered(claim, self._wall())
            raise
        if isinstance(answer, Objection):
            self._book.objected(claim, self._wall())
            raise RemoteError(f"it does not sign our receipt: {answer}")
        receipt = self._book.agreed(claim, answer)
        if receipt is None:
            self._book.objected(claim, self._wall())
            raise RemoteError("its signature under our receipt does not hold")
        self._keep(receipt)
        return True

    def _keep(self, receipt: Receipt) -> None:
        self.newest = receipt
        try:
            self._ledger.add(receipt)
        except OSError as error:
            if not self._is_full:
                self._notebook.note("not saved", what="a receipt", why=error.strerror)
            self._is_full = True
        else:
            self._is_full = False
