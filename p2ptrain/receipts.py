"""Receipts: one peer's statement about its exchanges with a partner, signed by both. Pure.

::

    receipt   [peer, partner, since, until, step, tokens, exchanges, sent, received, served]
    signed by both together with the RunId, each signature for its own purpose

Both sides count their exchanges (``Book``). Soon after them a peer claims what it has not yet claimed, and the partner
countersigns once if its own count is at least as high. A receipt therefore proves that the partner's key agreed
to these exchanges, bytes and weights. For tokens and outer steps it proves only that the peer claimed them, because
they cannot be counted from outside. Two keys of one owner can agree on anything: a receipt is as trustworthy as its
partner (docs/SECURITY.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from math import inf
from typing import Any, Self

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.clock import CLOCK_SKEW_S
from p2ptrain.base.errors import RemoteError
from p2ptrain.base.ids import PeerId, RunId, key_of
from p2ptrain.statements import SIGNATURE_BYTES, Sign, holds, is_blob, is_count, packed, unpacked

MAX_RECEIPT_BYTES = 320
"""Maximum size; two peer ids, eight numbers and a signature have at most 256 bytes."""
MAX_AGREED_BYTES = MAX_RECEIPT_BYTES + 2 + 64
"""Maximum size with the countersignature."""
MAX_PARTNERS = 512
"""Partners whose exchanges are counted, as many as the protocol core remembers; the least recent is dropped first."""

MAX_OPEN = 1024
"""Exchanges with one partner that no receipt covers yet; further ones are not counted."""
PERIOD_S = 30.0
"""Age at which an exchange is claimed, with all later ones: eight partners give 10 MB of receipts a day. Guess: the
share of contributions that stays unsigned in a real swarm."""
SETTLED_S = 2.0
"""Age at which an exchange is claimed at the earliest, so that the partner has counted it, too. Guess: how often claims
meet objections in a real swarm."""
RETRY_S = 5.0
"""First pause before a claim that was not countersigned is repeated; it doubles."""
MAX_TRIES = 5
"""Unanswered claims to one partner before they are dropped. Guess: how long partners of real runs stay away would
settle it."""

CLAIM = b"p2ptrain receipt 1"
AGREEMENT = b"p2ptrain countersigned receipt 1"
"""Purposes of the two signatures (see ``statements``)."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """Receipt of one peer for one partner. Counts cover ``since`` to ``until``, except step and tokens."""

    peer: PeerId
    """Peer whose contribution it is."""
    partner: PeerId
    since: int
    """Seconds since 1970 by the peer's clock."""
    until: int
    step: int
    """Outer steps of the peer at ``until``."""
    tokens: int
    """Tokens that the peer has trained on in total at ``until``."""
    exchanges: int
    sent: int
    """Payload bytes of the exchanges from the peer to the partner."""
    received: int
    """Payload bytes of the exchanges from the partner to the peer."""
    served: int
    """Weight bytes that the peer sent the partner as its donor."""
    signature: bytes = b""
    countersignature: bytes = b""

    def numbers(self) -> list[Any]:
        return [getattr(self, each.name) for each in fields(self)[:-2]]

    def signed(self, run: RunId, sign: Sign) -> Receipt:
        return replace(self, signature=sign(CLAIM, [run, *self.numbers()]))

    def countersigned(self, run: RunId, sign: Sign) -> Receipt:
        return replace(self, countersignature=sign(AGREEMENT, [run, *self.numbers()]))

    def is_claimed(self, run: RunId) -> bool:
        """Return whether the peer's signature is valid."""
        return _signed(self.peer, self.signature, CLAIM, [run, *self.numbers()])

    def is_agreed(self, run: RunId) -> bool:
        """Return whether the partner's signature is valid."""
        return _signed(self.partner, self.countersignature, AGREEMENT, [run, *self.numbers()])

    def encode(self) -> bytes:
        """Return the claim as it is sent to the partner."""
        return packed([*self.numbers(), self.signature])

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Parse a claim without checking its signature. Raises RemoteError if the bytes are malformed."""
        return cls.read([*unpacked(body, MAX_RECEIPT_BYTES), b""])

    def encode_agreed(self) -> bytes:
        """Return the receipt with both signatures, as it is shown to others."""
        return packed([*self.numbers(), self.signature, self.countersignature])

    @classmethod
    def decode_agreed(cls, body: bytes) -> Self:
        """Parse a receipt without checking its signatures. Raises RemoteError if the bytes are malformed."""
        return cls.read(unpacked(body, MAX_AGREED_BYTES))

    @classmethod
    def read(cls, raw: list[Any]) -> Self:
        """Build a receipt from its fields in order, without checking its signatures.

        Raises RemoteError if a field is malformed.
        """
        match raw:
            case [str(peer), str(partner), *numbers, bytes(signature), bytes()] if (
                len(numbers) == len(fields(cls)) - 4
                and all(map(is_count, numbers))
                and key_of(peer) is not None
                and key_of(partner) is not None
                and is_blob(signature, SIGNATURE_BYTES)
            ):
                return cls(*raw)
        raise RemoteError("expected a receipt, got something else")


def _signed(peer: PeerId, signature: bytes, purpose: bytes, said: list[Any]) -> bool:
    key = key_of(peer)
    return key is not None and holds(key, signature, purpose, said)


class Objection(StrEnum):
    """Reason why a claim is not countersigned. Part of the wire protocol."""

    NOT_GENUINE = "the claim is not its own, or not about us"
    TIMES = "its times do not fit"
    MORE = "it claims more than we saw"


@dataclass(slots=True)
class PendingReceipt:
    """Counts of one side towards one partner that no receipt covers yet."""

    exchanges: int = 0
    sent: int = 0
    received: int = 0
    served: int = 0

    def add(self, sent: int, received: int) -> None:
        self.exchanges += 1
        self.sent += sent
        self.received += received

    def less(self, receipt: Receipt) -> PendingReceipt:
        return PendingReceipt(
            self.exchanges - receipt.exchanges,
            self.sent - receipt.sent,
            self.received - receipt.received,
            self.served - receipt.served,
        )

    @property
    def holds(self) -> bool:
        """Whether no count is negative, so that a claim took no more than was counted."""
        return min(self.exchanges, self.sent, self.received, self.served) >= 0


@dataclass(slots=True)
class _PartnerReceipts:
    """Receipts and open counts with one partner."""

    since: int
    ours: list[tuple[float, int, int]] = field(default_factory=list)
    """Exchanges that this peer may still claim, oldest first: time, bytes sent, bytes received."""
    served: int = 0
    """Bytes of weights that this peer may still claim."""
    served_at: float = 0.0
    theirs: PendingReceipt = field(default_factory=PendingReceipt)
    """Counts that the partner may still claim."""
    asked_at: float = -inf
    claimed: Receipt | None = None
    """Claim without an answer; repeated, because the answer may have been lost."""
    covers: int = 0
    """Exchanges, the oldest, that the last claim was about."""
    objections: int = 0
    unanswered: int = 0
    """Consecutive claims without an answer, as ``objections`` counts consecutive refusals."""
    last: Receipt | None = None
    """Last claim of the partner that this peer countersigned."""

    def is_due(self, now: float) -> bool:
        """Return whether the partner is to be asked. The clock may be set back meanwhile."""
        oldest, failed = self.ours[0][0] if self.ours else self.served_at, self.objections + self.unanswered
        pause_s = RETRY_S * 2 ** (failed - 1) if failed else 0.0
        return self.is_open and abs(now - oldest) >= PERIOD_S and abs(now - self.asked_at) >= pause_s

    @property
    def is_open(self) -> bool:
        """Whether there is something to claim."""
        return bool(self.ours or self.served)

    @property
    def left_out(self) -> int:
        """Exchanges that a claim leaves out, since the partner may not have counted them: 0, 0, 1, 2, 4, …"""
        return 1 << (self.objections - 2) if self.objections > 1 else 0

    def close(self, count: int, since: int) -> None:
        """Drop the oldest exchanges; what remains is for claims that begin at ``since``."""
        del self.ours[:count]
        self.since, self.claimed, self.covers = since, None, 0
        self.objections = self.unanswered = 0

    def give_up(self, now: float) -> None:
        """Drop everything that is not countersigned."""
        self.served = 0
        self.close(len(self.ours), int(now))


class Book:
    """Counts of exchanges per partner, claims of this peer and checks of others' claims. Single-threaded; bounded."""

    def __init__(self, run: RunId, me: PeerId) -> None:
        self._run = run
        self._me = me
        self._accounts: BoundedDict[PeerId, _PartnerReceipts] = BoundedDict(MAX_PARTNERS)

    def exchanged(self, partner: PeerId, sent: int, received: int, now: float) -> None:
        account = self._account(partner, now)
        if len(account.ours) < MAX_OPEN:
            account.ours.append((now, sent, received))
        account.theirs.add(received, sent)

    def served(self, partner: PeerId, size: int, now: float) -> None:
        """Count weights that this peer gave to the partner."""
        account = self._account(partner, now)
        account.served, account.served_at = account.served + size, now

    def was_served(self, partner: PeerId, size: int, now: float) -> None:
        """Count weights that the partner gave to this peer."""
        self._account(partner, now).theirs.served += size

    def open(self) -> list[PeerId]:
        """Return the partners of which there is something to claim, latest exchanges first."""
        return [peer for peer, account in reversed(self._accounts.items()) if account.is_open]

    def due(self, now: float) -> list[PeerId]:
        """Return the partners that are to be asked now."""
        return [peer for peer, account in self._accounts.items() if account.is_due(now)]

    def is_owed(self, partner: PeerId) -> bool:
        """Return whether the partner has exchanges to claim."""
        account = self._accounts.get(partner)
        return account is not None and account.theirs.exchanges > 0

    def claim(
        self, partner: PeerId, step: int, tokens: int, now: float, sign: Sign, is_last: bool = False
    ) -> Receipt | None:
        """Return the next claim for a partner; None if there is nothing to claim.

        ``is_last``: claim exchanges that the partner may not have counted yet, too.
        """
        account = self._accounts.get(partner)
        if account is None or not account.is_open:
            return None
        if account.claimed is None:
            settled = sum(is_last or abs(now - at) >= SETTLED_S for at, _, _ in account.ours)
            served = account.served if not account.objections else 0  # the partner may have counted less
            if not settled and not served:
                return None
            if account.left_out >= max(settled, 1):  # the partner has restarted
                account.give_up(now)
                return None
            account.covers = settled
            counted = [sorted(each) for each in zip(*account.ours[:settled], strict=True)][1:] or [[], []]
            sent, received = (sum(each[: settled - account.left_out]) for each in counted)
            until = max(int(now), account.since + 1)
            exchanges = settled - account.left_out
            counts = (exchanges, sent, received, served)
            claim = Receipt(self._me, partner, account.since, until, step, tokens, *counts)
            account.claimed = claim.signed(self._run, sign)
        account.asked_at = now
        return account.claimed

    def agreed(self, claim: Receipt, countersignature: bytes) -> Receipt | None:
        """Complete a claim with the partner's answer; None if the countersignature is invalid."""
        receipt = replace(claim, countersignature=countersignature)
        account = self._accounts.get(claim.partner)
        if account is None or not receipt.is_agreed(self._run):
            return None
        account.served -= account.served if account.objections else claim.served  # drop what the partner did not count
        account.close(account.covers, claim.until)
        return receipt

    def objected(self, claim: Receipt, now: float, why: Objection = Objection.MORE) -> None:
        """Handle a partner's refusal to countersign.

        One refusal may be chance: the partner had not counted the last exchange yet, or counts a piece that it received
        twice only once. Further claims leave out ever more exchanges, which the partner may not have completed. If
        nothing remains, it has restarted, and the open counts are dropped.
        """
        account = self._accounts.get(claim.partner)
        if account is None:
            return
        account.claimed = None
        account.objections += 1
        if not account.ours or (account.objections > 1 and why is not Objection.MORE):
            account.give_up(now)

    def unanswered(self, claim: Receipt, now: float) -> None:
        """Count a claim that did not reach the partner; after ``MAX_TRIES`` in a row, drop the open counts."""
        account = self._accounts.get(claim.partner)
        if account is not None:
            account.unanswered += 1
            if account.unanswered >= MAX_TRIES:
                account.give_up(now)

    def judge(self, claim: Receipt, speaker: PeerId, now: float) -> Objection | None:
        """Check a partner's claim. None: countersign it; the partner may then claim that much less.

        A repeated claim whose answer was lost is countersigned again.
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

    def countersigned(self) -> list[Receipt]:
        """Return the last claim of each partner that this peer countersigned."""
        return [each.last for each in [*self._accounts.values()] if each.last is not None]

    def _account(self, partner: PeerId, now: float) -> _PartnerReceipts:
        account = self._accounts.get(partner) or _PartnerReceipts(since=int(now))
        self._accounts[partner] = account  # most recently used last
        return account


@dataclass(slots=True)
class Total:
    """Sum of what one peer's receipts prove."""

    receipts: int = 0
    exchanges: int = 0
    sent: int = 0
    received: int = 0
    served: int = 0
    tokens: int = 0
    """Largest token count that a partner countersigned."""
    first: int = 0
    """Start of the earliest receipt, seconds since 1970."""
    last: int = 0
    partners: dict[PeerId, int] = field(default_factory=dict)
    """Exchanges that each partner agreed to."""
    faulty: dict[str, int] = field(default_factory=dict)
    """Receipts that do not count: how many for each reason."""

    def add(self, receipt: Receipt) -> None:
        self.receipts += 1
        self.exchanges += receipt.exchanges
        self.sent += receipt.sent
        self.received += receipt.received
        self.served += receipt.served
        self.tokens = max(self.tokens, receipt.tokens)
        self.first = min(self.first or receipt.since, receipt.since)
        self.last = max(self.last, receipt.until)
        self.partners[receipt.partner] = self.partners.get(receipt.partner, 0) + receipt.exchanges

    def reject(self, why: str) -> None:
        self.faulty[why] = self.faulty.get(why, 0) + 1


def total(receipts: Iterable[Receipt], run: RunId, peer: PeerId) -> Total:
    """Check one peer's receipts and add up the valid ones; those of one partner never count the same time twice."""
    result = Total()
    until: dict[PeerId, int] = {}
    for receipt in sorted(receipts, key=lambda each: (each.until, each.since)):
        if receipt.peer != peer or not receipt.is_claimed(run):
            result.reject("the peer's signature is invalid")
        elif not receipt.is_agreed(run):
            result.reject("the partner's signature is invalid")
        elif receipt.partner == peer:
            result.reject("the peer is its own partner")
        elif receipt.since < until.get(receipt.partner, 0) or receipt.until <= receipt.since:
            result.reject("its time is already counted")
        else:
            until[receipt.partner] = receipt.until
            result.add(receipt)
    return result


def to_json(receipt: Receipt) -> dict[str, Any]:
    signatures = {"signature": receipt.signature.hex(), "countersignature": receipt.countersignature.hex()}
    return asdict(receipt) | signatures


def from_json(entry: Mapping[str, Any]) -> Receipt:
    """Parse the result of ``to_json``. Raises RemoteError if it is invalid."""
    try:
        raw = [entry[each.name] for each in fields(Receipt)]
        return Receipt.read([*raw[:-2], *map(bytes.fromhex, raw[-2:])])
    except (KeyError, TypeError, ValueError):
        raise RemoteError("expected a receipt, got something else") from None
