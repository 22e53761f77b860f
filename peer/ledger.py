"""A peer's receipts on disk, and what they prove (``p2ptrain.receipts``).

``HOME/contributions.jsonl`` has one receipt per line, ``contributions.1.jsonl`` the older ones: two files of at most
256 MiB each.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.base import files
from p2ptrain.base.errors import HomeError, RemoteError
from p2ptrain.receipts import Receipt, Total, from_json, to_json, total
from peer.home import Home, check_no_other
from peer.messages import size

MAX_LEDGER_BYTES = 256 << 20
"""Maximum size of each of the two files: a month at ten receipts a minute."""
_MAX_LINE = 4096


@dataclass(frozen=True, slots=True)
class Ledger:
    path: Path

    @property
    def older(self) -> Path:
        return self.path.with_suffix(".1.jsonl")

    def add(self, receipt: Receipt) -> None:
        """Append a receipt, and rotate the file when it is full. Raises OSError."""
        line = files.missing_newline(self.path) + json.dumps(to_json(receipt)) + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)
            is_full = file.tell() > MAX_LEDGER_BYTES
        if is_full:
            self.path.replace(self.older)

    def newest(self) -> Receipt | None:
        """Return the receipt in the last whole line; None if there is none."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _MAX_LINE, 0))
            for line in reversed(file.read().decode(errors="replace").splitlines()):
                if (receipt := _parsed(line)) is not None:
                    return receipt
        return None

    def read(self) -> Iterator[Receipt | None]:
        """Yield all receipts, oldest first; None for a line that is not a receipt. Raises HomeError."""
        for path in (self.older, self.path):
            try:
                with path.open(encoding="utf-8", errors="replace") as file:
                    while line := file.readline(_MAX_LINE):
                        yield _parsed(line)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise HomeError(f"{path} cannot be read: {error.strerror}.", files.remedy(error, "")) from error


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
    entries = list(Ledger(path or home.contributions).read())
    receipts = [entry for entry in entries if entry is not None]
    if entries and not receipts:
        raise HomeError(
            f"No line of {path or home.contributions} is a receipt.",
            "Restore a copy, or move it away; it is damaged or not a peer's.",
        )
    if not receipts:
        raise HomeError(
            f"There is no receipt in {path or home.contributions} yet.",
            "Wait: partners sign the first receipt within a minute of the first exchange.",
        )
    result = total(receipts, signed.run_id, receipts[0].peer)
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
