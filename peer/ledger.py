"""A peer's receipts on disk, and what they prove (``p2ptrain.receipts``).

``HOME/contributions.jsonl`` has one receipt per line. A receipt contains all earlier ones of its account, so whenever
the file has doubled, it is rewritten with the newest receipt of each account.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from p2ptrain.base import files
from p2ptrain.base.clock import wall
from p2ptrain.base.errors import HomeError, RemoteError
from p2ptrain.receipts import Receipt, Total, from_json, newest, to_json, total
from peer.home import Home, check_no_other
from peer.messages import size

MAX_ACCOUNTS = 1 << 16
"""Accounts kept when the file is rewritten: 30 MB, six weeks of a new partner every minute."""
SMALL_BYTES = 1 << 20
"""Size up to which the file is not rewritten."""
_MAX_LINE = 4096


@dataclass(slots=True)
class Ledger:
    """File of receipts. Safe to call from any thread."""

    path: Path
    full: int = SMALL_BYTES
    """Size in bytes beyond which the file is rewritten."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def add(self, receipt: Receipt) -> None:
        """Append a receipt, and rewrite the file when it has doubled: not on an event loop. Raises OSError."""
        with self._lock:
            line = files.missing_newline(self.path) + _line(receipt)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
                is_full = file.tell() > self.full
            if is_full:
                self.rewrite()

    def rewrite(self) -> None:
        """Keep the newest receipt of each account, and of too many the newest accounts of each partner."""
        kept: list[tuple[int, Receipt]] = []
        accounts: Counter[str] = Counter()
        for receipt in reversed(newest(filter(None, self.read()))):
            accounts[receipt.partner] += 1
            kept.append((accounts[receipt.partner], receipt))
        kept.sort(key=lambda each: each[0])  # no partner's accounts crowd out those of others
        data = "".join(_line(receipt) for _, receipt in kept[:MAX_ACCOUNTS]).encode()
        files.replace(self.path, data)
        self.full = max(SMALL_BYTES, 2 * len(data))

    def read(self) -> Iterator[Receipt | None]:
        """Yield all receipts; None for a line that is not a receipt. Raises OSError."""
        with contextlib.suppress(FileNotFoundError), self.path.open(encoding="utf-8", errors="replace") as file:
            while line := file.readline(_MAX_LINE):
                yield _parsed(line)


def _line(receipt: Receipt) -> str:
    return json.dumps(to_json(receipt)) + "\n"


def _parsed(line: str) -> Receipt | None:
    try:
        return from_json(json.loads(line))
    except (ValueError, TypeError, RecursionError, RemoteError):
        return None


def proved(home: Home, path: Path | None = None) -> Total:
    """Add up the valid receipts in a home, or in another peer's file ``path``. Raises HomeError.

    All must belong to one peer, which the first receipt names.
    """
    check_no_other(home.path)
    signed = home.load_manifest(None)
    if signed is None:
        raise HomeError(f"There is no peer in {home.path} yet.", "Name the home of a peer that has joined a run.")
    path = path or home.contributions
    try:
        entries = list(Ledger(path).read())
    except OSError as error:
        raise HomeError(f"{path} cannot be read: {error.strerror}.", files.remedy(error, "")) from error
    receipts = [entry for entry in entries if entry is not None]
    if entries and not receipts:
        raise HomeError(
            f"No line of {path} is a receipt.",
            "Restore a copy, or move it away; it is damaged or not a peer's.",
        )
    if not receipts:
        raise HomeError(
            f"There is no receipt in {path} yet.",
            "Wait: partners sign the first receipt within a minute of the first exchange.",
        )
    result = total(receipts, signed.run_id, receipts[0].peer, wall())
    for _ in range(len(entries) - len(receipts)):
        result.reject("it is not a receipt")
    return result


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' if number != 1 else ''}"


def table(result: Total) -> list[str]:
    days = [time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) for at in (result.first, result.last)]
    partners = sorted(result.partners.items(), key=lambda each: -each[1])
    signers = _count(len(partners), "partner")
    return [
        f"{_count(result.receipts, 'receipt')}, signed by {signers}, from {days[0]} to {days[1]}",
        f"exchanges: {result.exchanges:,}",
        f"sent in exchanges: {size(result.sent)}, received: {size(result.received)}",
        f"weights given to newcomers: {size(result.served)}",
        f"tokens: {result.tokens:,} (as claimed to its partners, who cannot verify them)"
        if result.tokens
        else "tokens: 0 (kept fragments for others, or has not trained yet)",
        *(f"  {peer}: {_count(exchanges, 'exchange')}" for peer, exchanges in partners),
        *(f"NOT counted, {_count(count, 'receipt')}: {why}" for why, count in result.faulty.items()),
    ]
