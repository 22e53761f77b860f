"""Receipts: a peer's signed statement of what a partner did with it. Pure.

::

    receipt   [peer, partner, since, until, step, tokens, exchanges, sent, received, served]
    signed by the partner together with the RunId

Each peer counts what its partners do with it (``Book``), from its first exchange with each, and signs the sums again
and again: the newest receipt of an account contains all earlier ones, so a lost one costs nothing. A receipt proves
that the partner's key stated these exchanges, bytes and weights. For tokens and outer steps it proves only that the
peer claimed them, because they cannot be counted from outside. Two keys of one owner can state anything for each other:
a receipt is as trustworthy as its partner (docs/SECURITY.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from p2ptrain.base.bounded import BoundedDict
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
    """What one partner did with this peer."""

    since: int
    exchanges: int = 0
    sent: int = 0
    received: int = 0
    served: int = 0
    open_at: float | None = None
    """Time of the oldest exchange that no receipt covers; None: there is none."""
    last: Receipt | None = None
    """Newest receipt that this peer signed for the partner."""


class Book:
    """Counts of what each partner did, and receipts of it. Single-threaded; bounded."""

    def __init__(self, run: RunId, me: PeerId, sign: Sign) -> None:
        self._run = run
        self._me = me
        self._sign = sign
        self._accounts: BoundedDict[PeerId, _Account] = BoundedDict(MAX_PARTNERS)

    def exchanged(self, partner: PeerId, sent: int, received: int, now: float) -> None:
        """Count an exchange in which this peer sent and received so many payload bytes."""
        account = self._opened(partner, now)
        account.exchanges += 1
        account.sent += received
        account.received += sent

    def served(self, partner: PeerId, now: float) -> None:
        """Ask the partner for a receipt of the weights that this peer gave it."""
        self._opened(partner, now)

    def was_served(self, partner: PeerId, size: int, now: float) -> None:
        """Count weights that the partner gave to this peer."""
        self._opened(partner, now).served += size

    def open(self) -> list[PeerId]:
        """Return the partners with unsigned exchanges, latest first."""
        return [peer for peer, account in reversed(self._accounts.items()) if account.open_at is not None]

    def due(self, now: float) -> list[PeerId]:
        """Return the partners to ask now. The clock may be set back meanwhile."""
        return [
            peer
            for peer, account in self._accounts.items()
            if account.open_at is not None and abs(now - account.open_at) >= PERIOD_S
        ]

    def close(self, partner: PeerId) -> None:
        """Note that receipts were exchanged, or could not be; the next exchange makes the partner due again."""
        if (account := self._accounts.get(partner)) is not None:
            account.open_at = None

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

    def is_ours(self, receipt: Receipt, partner: PeerId, step: int, tokens: int) -> bool:
        """Return whether a partner signed this receipt for us, with the step and tokens that we told it."""
        told = (receipt.peer, receipt.partner, receipt.step, receipt.tokens)
        return told == (self._me, partner, step, tokens) and receipt.is_signed(self._run)

    def signed(self) -> list[Receipt]:
        """Return the newest receipt that this peer signed for each partner."""
        return [each.last for each in self._accounts.values() if each.last is not None]

    def _opened(self, partner: PeerId, now: float) -> _Account:
        account = self._accounts.get(partner) or _Account(int(now))
        self._accounts[partner] = account  # most recently used last
        account.open_at = now if account.open_at is None else account.open_at
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


def total(receipts: Iterable[Receipt], run: RunId, peer: PeerId) -> Total:
    """Check one peer's receipts; add up the newest one of each account. A partner's accounts must not overlap."""
    result = Total()
    newest: dict[tuple[PeerId, int], Receipt] = {}
    for receipt in sorted(receipts, key=lambda each: each.until):
        if receipt.peer != peer:
            result.reject("it is another peer's")
        elif receipt.partner == peer:
            result.reject("the peer is its own partner")
        elif not receipt.is_signed(run):
            result.reject("the partner's signature is invalid")
        else:
            result.receipts += 1
            result.tokens = max(result.tokens, receipt.tokens)
            newest[receipt.partner, receipt.since] = receipt
    until: dict[PeerId, int] = {}
    for receipt in sorted(newest.values(), key=lambda each: each.since):
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
