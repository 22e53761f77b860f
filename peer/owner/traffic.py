"""``HOME/traffic.json``: bytes sent and received, by calendar month of this machine's clock.

Each month has its own entry, so the count survives a clock that jumps and comes back. A killed process leaves at most
the traffic of its last ten seconds uncounted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from p2ptrain.base import files

FILE = "traffic.json"
KEPT_MONTHS = 24
MAX_COUNTED_BYTES = 10**18
"""Maximum bytes of a month: more than any line carries, and small enough for a float."""


@dataclass(slots=True)
class Month:
    sent: int = 0
    received: int = 0
    given: int = 0
    """Bytes in both directions that served others beyond exchanges (``Throttles.gives``)."""

    @property
    def both(self) -> int:
        return self.sent + self.received


def name_of(now: datetime) -> str:
    return f"{now.year:04d}-{now.month:02d}"


class TrafficCount:
    """Traffic count of one home, written by one thread."""

    def __init__(self, home: Path) -> None:
        self.path = home / FILE
        self._months: dict[str, Month] = {}
        self._dirty = False

    def load(self) -> str:
        """Read the count of earlier sessions; return why that failed, or ""."""
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
            self._months = {
                str(name): Month(
                    _count(entry["sent_bytes"]),
                    _count(entry["received_bytes"]),
                    _count(entry.get("given_bytes", 0)),  # absent in older files
                )
                for name, entry in document.items()
            }
        except FileNotFoundError:
            return ""
        except OSError as error:
            return error.strerror or str(error)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return "the file is damaged"
        return ""

    def month(self, now: datetime) -> Month:
        """Return the count of the month of ``now``; read-only."""
        return self._months.get(name_of(now)) or Month()

    def add(self, sent: int, received: int, given: int, now: datetime) -> None:
        if sent or received or given:
            month = self._months.setdefault(name_of(now), Month())
            month.sent += sent
            month.received += received
            month.given += given
            self._dirty = True

    def save(self) -> None:
        """Write the count atomically if it has changed; safe from a thread of its own. Raises OSError."""
        if not self._dirty:
            return
        self._dirty = False  # what is added meanwhile is saved next time
        newest = sorted(self._months)[-KEPT_MONTHS:]
        document = {
            name: {"sent_bytes": month.sent, "received_bytes": month.received, "given_bytes": month.given}
            for name, month in ((name, self._months[name]) for name in newest)
        }
        try:
            files.replace(self.path, json.dumps(document, indent=1).encode() + b"\n")
        except OSError:
            self._dirty = True
            raise


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_COUNTED_BYTES:
        raise ValueError(f"{value!r} is not a count")
    return value
