"""Receipts: what one peer did with one partner, said and signed by the peer, countersigned by the partner. Pure.

::

    receipt   [peer, partner, since, until, step, tokens, exchanges, sent, received, served]
    signed by both behind the RunId, each for a purpose of its own

Both sides count what they do with each other (``Book``). Now and then a peer claims what it has not claimed yet, and
the partner countersigns if it saw as much itself, once. So a receipt proves that the partner's key agreed that these
exchanges, these bytes and these weights passed; of tokens and outer steps only that the peer claimed so many then, for
nobody can count them from outside. Two keys of one owner can agree on anything: a receipt is worth what its partner's
word is worth (docs/SECURITY.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Self

from p2ptrain.base.errors import RemoteError
from p2ptrain.base.ids import PeerId, RunId, key_of
from p2ptrain.statements import SIGNATURE_BYTES, Sign, holds, is_blob, is_count, packed, unpacked

MAX_RECEIPT_BYTES = 320
"""Two peer ids, eight numbers and a signature have 256 at most."""
MAX_PARTNERS = 512
"""Whose exchanges are counted; the longest silent goes first. As many as the protocol core remembers."""
CLOCK_SKEW_S = 300
"""Between a claim's times and our clock; as for presence records. A guess."""

MAX_TRIES = 5
"""Claims to one partner that may stay unanswered. A guess."""

CLAIM = b"p2ptrain receipt 1"
AGREEMENT = b"p2ptrain countersigned receipt 1"
"""Purposes of signatures (``statements``)."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """See the module. Numbers are of the span from ``since`` to ``until``, but for step and tokens."""

    peer: PeerId
    """Whose contribution it is."""
    partner: PeerId
    since: int
    """Seconds since 1970, by the peer's clock."""
    until: int
    step: int
    """The peer's outer steps at ``until``."""
    tokens: int
    """Trained on by the peer in all, at ``until``."""
    exchanges: int
    sent: int
    """Bytes of payload in them, from the peer to the partner, ..."""
    received: int
    """... and back."""
    served: int
    """Bytes of weights that the peer gave the partner to catch up."""
    signature: bytes = b""
    """The peer's."""
    countersignature: bytes = b""
    """The partner's."""

    def numbers(self) -> list[Any]:
        return [getattr(self, each.name) for each in fields(self)[:-2]]

    def signed(self, run: RunId, sign: Sign) -> Receipt:
        """With the peer's signature."""
        return replace(self, signature=sign(CLAIM, [run, *self.numbers()]))

    def countersigned(self, run: RunId, sign: Sign) -> Receipt:
        """With the partner's."""
        return replace(self, countersignature=sign(AGREEMENT, [run, *self.numbers()]))

    def is_claimed(self, run: RunId) -> bool:
        """Whether the peer's signature holds."""
        return _signed(self.peer, self.signature, CLAIM, [run, *self.numbers()])

    def is_agreed(self, run: RunId) -> bool:
        """Whether the partner's holds."""
        return _signed(self.partner, self.countersignature, AGREEMENT, [run, *self.numbers()])

    def encode(self) -> bytes:
        """For the partner to countersign."""
        return packed([*self.numbers(), self.signature])

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Inverse of ``encode``; RemoteError for anything else. Whether it is true is another question."""
        return cls.read([*unpacked(body, MAX_RECEIPT_BYTES), b""])

    @classmethod
    def read(cls, raw: list[Any]) -> Self:
        """From its fields, in order, with both signatures. RemoteError when they are none."""
        match raw:
            case [str(peer), str(partner), *numbers, bytes(signature), bytes()] if (
                len(numbers) == len(fields(cls)) - 4
                and all(map(is_count, numbers))
                and key_of(peer) is not None
                and key_of(partner) is not None
                and is_blob(signature, SIGNATURE_BYTES)
            ):
                return cls(*raw)
        raise RemoteError("a receipt was due, not something else")


def _signed(peer: PeerId, signature: bytes, purpose: bytes, said: list[Any]) -> bool:
    key = key_of(peer)
    return key is not None and holds(key, signature, purpose, said)


class Objection(StrEnum):
    """Why a claim is not countersigned. Goes over the wire."""

    NOT_GENUINE = "the claim is not its own, or not about us"
    TIMES = "its times do not fit"
    MORE = "it claims more than we saw"


@dataclass(slots=True)
class PendingReceipt:
    """What passed between a partner and us and nobody has a receipt for yet; from one side's view."""

    exchanges: int = 0
    sent: int = 0
    received: int = 0
    served: int = 0

    def add(self, exchanges: int, sent: int, received: int, served: int) -> None:
        self.exchanges += exchanges
        self.sent += sent
        self.received += received
        self.served += served

    def less(self, receipt: Receipt) -> PendingReceipt:
        return PendingReceipt(
            self.exchanges - receipt.exchanges,
            self.sent - receipt.sent,
            self.received - receipt.received,
            self.served - receipt.served,
        )

    @property
    def holds(self) -> bool:
        """Whether nothing was taken that was not there."""
        return min(self.exchanges, self.sent, self.received, self.served) >= 0

    @property
    def is_empty(self) -> bool:
        return not (self.exchanges or self.served)


@dataclass(slots=True)
class _PartnerReceipts:
    """One partner."""

    since: int
    ours: PendingReceipt = field(default_factory=PendingReceipt)
    """What we may still claim, ..."""
    theirs: PendingReceipt = field(default_factory=PendingReceipt)
    """... and what it may."""
    asked_at: float = 0.0
    claimed: Receipt | None = None
    """Claimed, and not answered: the answer may be lost, so the same is claimed again."""
    objections: int = 0
    unanswered: int = 0
    """Both in a row."""
    last: Receipt | None = None
    """The last claim of the partner's that we countersigned."""

    def give_up(self, now: float) -> None:
        """What has not been countersigned never will be."""
        self.ours, self.since, self.claimed = PendingReceipt(), int(now), None
        self.objections = self.unanswered = 0


class Book:
    """Counts what we do with each partner, claims ours and judges theirs. Lives in one thread; bounded."""

    def __init__(self, run: RunId, me: PeerId) -> None:
        self._run = run
        self._me = me
        self._accounts: dict[PeerId, _PartnerReceipts] = {}

    def exchanged(self, partner: PeerId, sent: int, received: int, now: float) -> None:
        """An exchange committed."""
        account = self._account(partner, now)
        account.ours.add(1, sent, received, 0)
        account.theirs.add(1, received, sent, 0)

    def served(self, partner: PeerId, size: int, now: float) -> None:
        """We gave it our weights."""
        self._account(partner, now).ours.add(0, 0, 0, size)

    def was_served(self, partner: PeerId, size: int, now: float) -> None:
        """It gave us its weights."""
        self._account(partner, now).theirs.add(0, 0, 0, size)

    def claim(self, step: int, tokens: int, now: float, sign: Sign) -> Receipt | None:
        """The next claim to have countersigned, of the partner that we asked longest ago; None: nothing to claim."""
        waiting = [(account.asked_at, peer) for peer, account in self._accounts.items() if not account.ours.is_empty]
        if not waiting:
            return None
        _, partner = min(waiting)
        account = self._accounts[partner]
        account.asked_at = now
        if account.claimed is None:
            account.claimed = self._claim(account, partner, step, tokens, now).signed(self._run, sign)
        return account.claimed

    def _claim(self, account: _PartnerReceipts, partner: PeerId, step: int, tokens: int, now: float) -> Receipt:
        ours = account.ours
        until = max(int(now), account.since + 1)
        served = ours.served if not account.objections else 0  # it may have counted less: exchanges alone this time
        counted = (ours.exchanges, ours.sent, ours.received, served)
        return Receipt(self._me, partner, account.since, until, step, tokens, *counted)

    def agreed(self, claim: Receipt, countersignature: bytes) -> Receipt | None:
        """The partner's answer: the finished receipt, None when its signature does not hold."""
        receipt = replace(claim, countersignature=countersignature)
        account = self._accounts.get(claim.partner)
        if account is None or not receipt.is_agreed(self._run):
            return None
        account.ours = account.ours.less(claim)
        if account.objections:  # what it does not know of
            account.ours.served = 0
        account.since, account.claimed = claim.until, None
        account.objections = account.unanswered = 0
        return receipt

    def objected(self, claim: Receipt, now: float) -> None:
        """The partner does not agree. Once may be chance: it had not counted the last exchange yet, or not all that we
        gave it, since a piece that came twice counts once there. Then it has begun anew, and what it does not know of
        is not claimed any more."""
        account = self._accounts.get(claim.partner)
        if account is None:
            return
        account.claimed = None
        account.objections += 1
        if account.objections > 1 or not account.ours.exchanges:
            account.give_up(now)

    def unanswered(self, claim: Receipt, now: float) -> None:
        """The partner could not be asked. After some times it is gone, and is not asked about this any more."""
        account = self._accounts.get(claim.partner)
        if account is not None:
            account.unanswered += 1
            if account.unanswered >= MAX_TRIES:
                account.give_up(now)

    def judge(self, claim: Receipt, speaker: PeerId, now: float) -> Objection | None:
        """Whether to countersign what a partner claims; what it claims is then taken off what it may claim.

        The same claim again, whose answer was lost, is countersigned again.
        """
        account = self._accounts.get(claim.peer)
        if claim.peer != speaker or claim.partner != self._me or not claim.is_claimed(self._run):
            return Objection.NOT_GENUINE
        if account is None:
            return Objection.MORE
        last = account.last
        if last is not None and last.numbers() == claim.numbers():
            return None
        if not claim.since < claim.until <= now + CLOCK_SKEW_S or (last is not None and claim.since < last.until):
            return Objection.TIMES
        left = account.theirs.less(claim)
        if not left.holds:
            return Objection.MORE
        account.theirs, account.last = left, claim
        return None

    def _account(self, partner: PeerId, now: float) -> _PartnerReceipts:
        account = self._accounts.pop(partner, None) or _PartnerReceipts(since=int(now))
        self._accounts[partner] = account  # the latest are last
        while len(self._accounts) > MAX_PARTNERS:
            del self._accounts[next(iter(self._accounts))]
        return account


@dataclass(slots=True)
class Total:
    """What one peer's receipts prove together."""

    receipts: int = 0
    exchanges: int = 0
    sent: int = 0
    received: int = 0
    served: int = 0
    tokens: int = 0
    """The largest claim that a partner heard."""
    first: int = 0
    """Seconds since 1970."""
    last: int = 0
    partners: dict[PeerId, int] = field(default_factory=dict)
    """How many exchanges each agreed to."""
    faulty: dict[str, int] = field(default_factory=dict)
    """What is not counted: why, and how often."""

    def reject(self, why: str) -> None:
        self.faulty[why] = self.faulty.get(why, 0) + 1


def total(receipts: Iterable[Receipt], run: RunId, peer: PeerId) -> Total:
    """Check every receipt of one peer, and add up those that hold. Two of one partner never count the same time."""
    result = Total()
    until: dict[PeerId, int] = {}
    for receipt in sorted(receipts, key=lambda each: (each.until, each.since)):
        if receipt.peer != peer or not receipt.is_claimed(run):
            result.reject("the peer's signature does not hold")
        elif not receipt.is_agreed(run):
            result.reject("the partner's signature does not hold")
        elif receipt.partner == peer:
            result.reject("it is its own partner")
        elif receipt.since < until.get(receipt.partner, 0) or receipt.until <= receipt.since:
            result.reject("its time is counted already")
        else:
            until[receipt.partner] = receipt.until
            _count(result, receipt)
    return result


def _count(result: Total, receipt: Receipt) -> None:
    result.receipts += 1
    result.exchanges += receipt.exchanges
    result.sent += receipt.sent
    result.received += receipt.received
    result.served += receipt.served
    result.tokens = max(result.tokens, receipt.tokens)
    result.first = min(result.first or receipt.since, receipt.since)
    result.last = max(result.last, receipt.until)
    result.partners[receipt.partner] = result.partners.get(receipt.partner, 0) + receipt.exchanges


def to_json(receipt: Receipt) -> dict[str, Any]:
    """A receipt as people keep it."""
    signatures = {"signature": receipt.signature.hex(), "countersignature": receipt.countersignature.hex()}
    return asdict(receipt) | signatures


def from_json(entry: Mapping[str, Any]) -> Receipt:
    """Inverse of ``to_json``; RemoteError when it is none."""
    try:
        raw = [entry[each.name] for each in fields(Receipt)]
        return Receipt.read([*raw[:-2], *map(bytes.fromhex, raw[-2:])])
    except (KeyError, TypeError, ValueError):
        raise RemoteError("a receipt was due, not something else") from None
