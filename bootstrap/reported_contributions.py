"""Contributions as peers report them to a bootstrap: checked, and compared with the receipts that partners signed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.errors import RemoteError
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.page.contributors import MOST_CONTRIBUTORS, MOST_TIMES, Contribution, contribution
from p2ptrain.receipts import Receipt


class ReportedContributions:
    """Reader of peers' reports in one run. Remembers the last receipt of each peer, to verify each only once."""

    def __init__(self, run: RunId) -> None:
        self._run = run
        self._seen: BoundedDict[PeerId, tuple[bytes, Receipt | None]] = BoundedDict(MOST_CONTRIBUTORS)

    def read(
        self, peer: PeerId, told: Mapping[str, Any], nickname: str, progress: float, now: float
    ) -> Contribution | None:
        """Return a peer's contribution; None if it reports none.

        Args:
            told: the peer's report. Older peers report ``tokens`` alone.
            progress: tokens of all peers so far.
        """
        fields = {"tokens": told.get("contributed", told.get("tokens")), "trained_s": told.get("trained_s")}
        row = contribution(peer, fields, nickname, MOST_TIMES * progress)
        if not row.tokens:
            return None
        receipt = self._receipt(peer, told.get("receipt"))
        if receipt is not None:  # a partner may sign a false claim, so a receipt counts no more than the report
            row = replace(row, signed_tokens=min(receipt.tokens, row.tokens), signers=(receipt.partner,))
        return replace(row, last_at=now)

    def _receipt(self, peer: PeerId, body: object) -> Receipt | None:
        """Return the peer's receipt if both signatures are valid."""
        if not isinstance(body, bytes):
            return None
        known = self._seen.get(peer)
        if known is None or known[0] != body:
            known = self._seen[peer] = (body, _genuine(body, self._run, peer))
        return known[1]


def _genuine(body: bytes, run: RunId, peer: PeerId) -> Receipt | None:
    try:
        receipt = Receipt.decode_agreed(body)
    except RemoteError:
        return None
    is_genuine = receipt.peer == peer != receipt.partner and receipt.is_claimed(run) and receipt.is_agreed(run)
    return receipt if is_genuine else None
