"""Receipts: a peer's signed statement of what a partner did with it. Pure.

::

    receipt   [peer, partner, since, until, step, tokens, exchanges, sent, received, served]
    signed by the partner together with the RunId

Each peer counts what its partners do with it (``Book``), from its first exchange with each, and signs the sums again
and again: the newest receipt of an account contains all earlier ones, so a lost one costs nothing. A receipt proves
that the partner's key stated these exchanges, bytes and weights. For tokens and outer steps it proves only that the
peer claimed them, because they cannot be counted from outside. Two keys of one owner can state anything for each other:
a receipt is as trustworthy as its partner (docs/SECURITY.md).

A peer accepts receipts only for what it counted itself, and only those that take nothing back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from operator import add, sub
from typing import Any, Self

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.clock import CLOCK_SKEW_S
from p2ptrain.base.errors import RemoteError
from p2ptrain.base.ids import PeerId, RunId, key_of
from p2ptrain.statements import SIGNATURE_BYTES, Sign, holds, is_blob, is_count, packed, unpacked

MAX_RECEIPT_BYTES = 320
"""Maximum size; two peer ids, eight numbers and a signature have at most 256 bytes."""
MAX_PARTNERS = 512
"""Partners whose exchanges are counted, as many as the protocol core remembers; the least recent is dropped first."""
PERIOD_S = 30.0
"""Age at which an unsigned exchange makes its peers sign: eight partners give 10 MB of receipts a day. Guess: the share
of contributions that stays unsigned in a real swarm."""
LONGEST_PERIOD_S = 3600.0
"""Longest interval at which a partner that does not answer is asked again; the interval doubles each time."""
MOST_TIMES = 2
"""Largest accepted counts, in multiples of this peer's own. A partner may also count exchanges that failed here at the
last moment, and what was unsigned when an earlier process of this peer died. Guess: both sides' counts in a real swarm
would settle it."""

RECEIPT = b"p2ptrain receipt 2"
"""Purpose of the signature (see ``statements``)."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """Statement of a partner about a peer. Counts cover ``since`` to ``until``, except step and tokens."""

    peer: PeerId
    """Peer whose contribution it is."""
    partner: PeerId
    since: int
    """Start of the partner's account, in seconds since 1970 by its clock."""
    until: int
    step: int
    """Outer steps of the peer at ``until``, as it told the partner."""
    tokens: int
    """Tokens that the peer has trained on in total at ``until``, as it told the partner."""
    exchanges: int
    sent: int
    """Payload bytes of the exchanges from the peer to the partner."""
    received: int
    """Payload bytes of the exchanges from the partner to the peer."""
    served: int
    """Weight bytes that the peer sent the partner as its donor."""
    signature: bytes = b""

    @property
    def counts(self) -> tuple[int, ...]:
        return self.exchanges, self.sent, self.received, self.served

    def contains(self, other: Receipt) -> bool:
        """Return whether no count is below that of another receipt of the same account."""
        return all(mine >= theirs for mine, theirs in zip(self.counts, other.counts, strict=True))

    def is_timely(self, now: float) -> bool:
        """Return whether it ends after its start, and not in the future."""
        return self.since < self.until <= now + CLOCK_SKEW_S

    def numbers(self) -> list[Any]:
        return [getattr(self, each.name) for each in fields(self)[:-1]]

    def signed(self, run: RunId, sign: Sign) -> Receipt:
        """Return a copy with the partner's signature."""
        return replace(self, signature=sign(RECEIPT, [run, *self.numbers()]))

    def is_signed(self, run: RunId) -> bool:
        """Return whether the partner's signature is valid."""
        key = key_of(self.partner)
        return key is not None and holds(key, self.signature, RECEIPT, [run, *self.numbers()])

    def encode(self) -> bytes:
        return packed([*self.numbers(), self.signature])

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Parse a receipt without checking its signature. Raises RemoteError if the bytes are malformed."""
        return cls.read(unpacked(body, MAX_RECEIPT_BYTES))

    @classmethod
    def read(cls, raw: list[Any]) -> Self:
        """Build a receipt from its fields in order, without checking its signature.

        Raises RemoteError if a field is malformed.
        """
        match raw:
            case [str(peer), str(partner), *numbers, bytes(signature)] if (
                len(numbers) == len(fields(cls)) - 3
                and all(map(is_count, numbers))
                and key_of(peer) is not None
                and key_of(partner) is not None
                and is_blob(signature, SIGNATURE_BYTES)
            ):
                return cls(*raw)
        raise RemoteError("expected a receipt, got something else")


@dataclass(slots=True)
class _Account:
    """What one partner and this peer did with each other."""

    since: int
    exchanges: int = 0
    sent: int = 0
    """Payload bytes from the partner to this peer."""
    received: int = 0
    served: int = 0
    """Weight bytes from the partner to this peer."""
    given: int = 0
    """Weight bytes from this peer to the partner."""
    accepted: tuple[int, ...] = (0, 0, 0, 0)
    """Counts that the partner's receipts have added since the account began."""
    open_at: float | None = None
    """Time of the oldest exchange that no receipt covers, or of the last failed request; None: nothing is unsigned."""
    failures: int = 0
    """Failed requests since the last exchange."""
    last: Receipt | None = None
    """Newest receipt that this peer signed for the partner."""

    def is_due(self, now: float) -> bool:
        period_s = min(PERIOD_S * 2.0 ** min(self.failures, 16), LONGEST_PERIOD_S)
        return self.open_at is not None and abs(now - self.open_at) >= period_s

    def covers(self, counts: Iterable[int]) -> bool:
        """Return whether this peer did so much with the partner, as far as the two may differ."""
        own = (self.exchanges, self.received, self.sent, self.given)
        return all(count <= MOST_TIMES * counted for count, counted in zip(counts, own, strict=True))


class Book:
    """Counts of what each partner did, and receipts of it. Single-threaded; bounded.

    Args:
        earlier: receipts that partners signed for this peer in earlier sessions.
    """

    def __init__(self, run: RunId, me: PeerId, sign: Sign, earlier: Iterable[Receipt] = ()) -> None:
        self._run = run
        self._me = me
        self._sign = sign
        self._accounts: BoundedDict[PeerId, _Account] = BoundedDict(MAX_PARTNERS)
        self._held: BoundedDict[PeerId, Receipt] = BoundedDict(8 * MAX_PARTNERS)
        """Each partner's newest receipt for this peer."""
        for receipt in newest(earlier):
            self._held[receipt.partner] = receipt

    def exchanged(self, partner: PeerId, sent: int, received: int, now: float) -> None:
        """Count an exchange in which this peer sent and received so many payload bytes."""
        account = self._opened(partner, now)
        account.exchanges += 1
        account.sent += received
        account.received += sent

    def served(self, partner: PeerId, size: int, now: float) -> None:
        """Count weights that this peer gave to the partner, whose receipt states what it received."""
        self._opened(partner, now).given += size

    def was_served(self, partner: PeerId, size: int, now: float) -> None:
        """Count weights that the partner gave to this peer."""
        self._opened(partner, now).served += size

    def open(self) -> list[PeerId]:
        """Return the partners with unsigned exchanges: those that answer first, the latest of them first."""
        found = [peer for peer, account in reversed(self._accounts.items()) if account.open_at is not None]
        return sorted(found, key=lambda peer: self._accounts[peer].failures)

    def due(self, now: float) -> list[PeerId]:
        """Return the partners to ask now, in the order of ``open``. The clock may be set back meanwhile."""
        return [peer for peer in self.open() if self._accounts[peer].is_due(now)]

    def close(self, partner: PeerId) -> None:
        """Note that receipts are being exchanged; the next exchange makes the partner due again."""
        if (account := self._accounts.get(partner)) is not None:
            account.open_at = None

    def reopen(self, partner: PeerId, now: float) -> None:
        """Note that receipts could not be exchanged: the partner is due again later."""
        if (account := self._accounts.get(partner)) is not None:
            account.open_at = now if account.open_at is None else account.open_at
            account.failures += 1

    def receipt(self, partner: PeerId, step: int, tokens: int, now: float) -> Receipt | None:
        """Sign what the partner did until now; None if it did nothing. Step and tokens are what it says."""
        account = self._accounts.get(partner)
        if account is None or not (account.exchanges or account.served):
            return None
        until = max(int(now), account.since + 1)
        counts = (account.exchanges, account.sent, account.received, account.served)
        account.last = Receipt(partner, self._me, account.since, until, step, tokens, *counts).signed(
            self._run, self._sign
        )
        return account.last

    def is_ours(self, receipt: Receipt, partner: PeerId, step: int, tokens: int, now: float) -> bool:
        """Return whether a partner signed this receipt for us, of what we counted, too, and it takes nothing back.

        Step and tokens are what we told the partner.
        """
        told = (receipt.peer, receipt.partner, receipt.step, receipt.tokens)
        if told != (self._me, partner, step, tokens) or not receipt.is_timely(now):
            return False
        account, growth = self._accounts.get(partner), self._growth(receipt)
        return (
            account is not None
            and growth is not None
            and account.covers(map(add, account.accepted, growth))
            and receipt.is_signed(self._run)
        )

    def accept(self, receipt: Receipt) -> None:
        """Take note of a receipt that is ours."""
        account, growth = self._accounts.get(receipt.partner), self._growth(receipt)
        if account is not None and growth is not None:
            account.accepted = tuple(map(add, account.accepted, growth))
            self._held[receipt.partner] = receipt

    def signed(self) -> list[Receipt]:
        """Return the newest receipt that this peer signed for each partner."""
        return [each.last for each in self._accounts.values() if each.last is not None]

    def _growth(self, receipt: Receipt) -> tuple[int, ...] | None:
        """Return what a receipt adds to those that its partner signed before; None if it contradicts them."""
        held = self._held.get(receipt.partner)
        if held is None or receipt.since >= held.until:
            return receipt.counts
        if receipt.since == held.since and receipt.contains(held):
            return tuple(map(sub, receipt.counts, held.counts))
        return None

    def _opened(self, partner: PeerId, now: float) -> _Account:
        account = self._accounts.get(partner) or _Account(int(now))
        self._accounts[partner] = account  # most recently used last
        account.open_at = now if account.open_at is None else account.open_at
        account.failures = 0
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
    """Largest token count that a partner signed."""
    first: int = 0
    """Start of the earliest account, seconds since 1970."""
    last: int = 0
    partners: dict[PeerId, int] = field(default_factory=dict)
    """Exchanges that each partner stated."""
    faulty: dict[str, int] = field(default_factory=dict)
    """Receipts that do not count: how many for each reason."""

    def add(self, receipt: Receipt) -> None:
        self.exchanges += receipt.exchanges
        self.sent += receipt.sent
        self.received += receipt.received
        self.served += receipt.served
        self.first = min(self.first or receipt.since, receipt.since)
        self.last = max(self.last, receipt.until)
        self.partners[receipt.partner] = self.partners.get(receipt.partner, 0) + receipt.exchanges

    def reject(self, why: str) -> None:
        self.faulty[why] = self.faulty.get(why, 0) + 1


def newest(receipts: Iterable[Receipt]) -> list[Receipt]:
    """Return the newest receipt of each account, oldest account first. One that takes a count back does not count."""
    found: dict[tuple[PeerId, int], Receipt] = {}
    for receipt in sorted(receipts, key=lambda each: each.until):
        account = receipt.partner, receipt.since
        if account not in found or receipt.contains(found[account]):
            found[account] = receipt
    return sorted(found.values(), key=lambda each: each.since)


def total(receipts: Iterable[Receipt], run: RunId, peer: PeerId, now: float) -> Total:
    """Check one peer's receipts; add up the newest one of each account. A partner's accounts must not overlap."""
    result = Total()
    valid = []
    for receipt in receipts:
        if receipt.peer != peer:
            result.reject("it is another peer's")
        elif receipt.partner == peer:
            result.reject("the peer is its own partner")
        elif not receipt.is_signed(run):
            result.reject("the partner's signature is invalid")
        elif not receipt.is_timely(now):
            result.reject("its times are impossible")
        else:
            result.receipts += 1
            result.tokens = max(result.tokens, receipt.tokens)
            valid.append(receipt)
    until: dict[PeerId, int] = {}
    for receipt in newest(valid):
        if receipt.since < until.get(receipt.partner, 0):
            result.reject("its time is already counted")
        else:
            until[receipt.partner] = receipt.until
            result.add(receipt)
    return result


def to_json(receipt: Receipt) -> dict[str, Any]:
    return asdict(receipt) | {"signature": receipt.signature.hex()}


def from_json(entry: Mapping[str, Any]) -> Receipt:
    """Parse the result of ``to_json``. Raises RemoteError if it is invalid."""
    try:
        raw = [entry[each.name] for each in fields(Receipt)]
        return Receipt.read([*raw[:-1], bytes.fromhex(raw[-1])])
    except (KeyError, TypeError, ValueError):
        raise RemoteError("expected a receipt, got something else") from None
