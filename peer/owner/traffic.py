"""``HOME/traffic.json``: bytes sent and received, by calendar month of this machine's clock.

Every month keeps a line of its own, so a clock that jumps and comes back finds what it left. What is not on disk yet
when a process is killed, ten seconds' worth at most, is lost to the count.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from p2ptrain.base import files

FILE = "traffic.json"
KEPT_MONTHS = 24
MOST_BYTES = 10**18
"""In a month: beyond any line, and few enough to be divided."""


@dataclass(slots=True)
class Month:
    """One month's bytes."""

    sent: int = 0
    received: int = 0
    given: int = 0
    """Of both: what was for others' own sake (``Throttles.gives``)."""

    @property
    def both(self) -> int:
        return self.sent + self.received


def name_of(now: datetime) -> str:
    """``2026-11``."""
    return f"{now.year:04d}-{now.month:02d}"


class TrafficCount:
    """The count of one home. Written by one thread."""

    def __init__(self, home: Path) -> None:
        self.path = home / FILE
        self._months: dict[str, Month] = {}
        self._dirty = False

    def load(self) -> str:
        """Read what earlier sessions counted. Why that failed; empty when it did not, or there were none."""
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
            self._months = {
                str(name): Month(
                    _count(entry["sent_bytes"]),
                    _count(entry["received_bytes"]),
                    _count(entry.get("given_bytes", 0)),  # older files do not tell
                )
                for name, entry in document.items()
            }
        except FileNotFoundError:
            return ""
        except OSError as error:
            return error.strerror or str(error)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return "it is not what was written"
        return ""

    def month(self, now: datetime) -> Month:
        """The count of the month that this moment is in; not to be changed."""
        return self._months.get(name_of(now)) or Month()

    def add(self, sent: int, received: int, given: int, now: datetime) -> None:
        if sent or received or given:
            month = self._months.setdefault(name_of(now), Month())
            month.sent += sent
            month.received += received
            month.given += given
            self._dirty = True

    def save(self) -> None:
        """Old content or new. Raises OSError."""
        if not self._dirty:
            return
        newest = sorted(self._months)[-KEPT_MONTHS:]
        document = {
            name: {"sent_bytes": month.sent, "received_bytes": month.received, "given_bytes": month.given}
            for name, month in ((name, self._months[name]) for name in newest)
        }
        files.replace(self.path, json.dumps(document, indent=1).encode() + b"\n")
        self._dirty = False


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST_BYTES:
        raise ValueError(f"{value!r} is no count")
    return value
