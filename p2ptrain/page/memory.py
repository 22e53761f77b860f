"""What a page remembers across restarts: contributions of peers, departed ones included, and texts of the model.

``HOME/page.json`` has at most ``MOST_BYTES``. A missing or damaged file counts as empty: nothing but the page needs it.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path

from p2ptrain.base import files
from p2ptrain.page.contributors import ContributionTable
from p2ptrain.page.samples import SampleHistory

logger = logging.getLogger(__name__)

PAGE_FILE = "page.json"
MOST_BYTES = 2 << 20
"""Maximum size that is read: 256 rows of at most 2 kB, and 12 texts of at most 24 kB each, escaped."""
SAVE_S = 30.0
"""Seconds between two saves, as for the access list and the finished peers of a bootstrap."""


@dataclass(slots=True)
class PageMemory:
    """Contributions and texts, and the run that they are of."""

    run: str = ""
    contributions: ContributionTable = field(default_factory=ContributionTable)
    samples: SampleHistory = field(default_factory=SampleHistory)

    def to_bytes(self) -> bytes:
        saved = {"run": self.run, "contributions": self.contributions.to_json(), "samples": self.samples.to_json()}
        return json.dumps(saved, allow_nan=False).encode()


def load(home: Path, run: str) -> PageMemory:
    """Return what the home remembers of a run; nothing if the file is missing, damaged or of another run."""
    path = home / PAGE_FILE
    try:
        with path.open("rb") as file:
            saved = json.loads(file.read(MOST_BYTES))
        if saved["run"] == run:
            table = ContributionTable.from_json(saved["contributions"])
            return PageMemory(run, table, SampleHistory.from_json(saved["samples"]))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.warning("%s cannot be read, so it starts empty: %s", path, error)
    return PageMemory(run)


@dataclass(slots=True)
class MemoryFile:
    """The file of one home. Call ``save`` from one thread."""

    home: Path
    _saved: bytes = b""

    def save(self, content: bytes) -> None:
        """Write the content if it has changed, without waiting for the disk. Raises OSError."""
        if content != self._saved:
            files.replace(self.home / PAGE_FILE, content, mode=0o600, lasting=False)
            self._saved = content
