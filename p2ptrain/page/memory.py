"""What a page remembers across restarts: contributions of peers, departed ones included, and texts of the model.

``HOME/page.json`` has at most ``MOST_BYTES``. A missing or damaged file counts as empty: nothing but the page needs it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter

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
class _Saved:
    """Content of the file."""

    run: str
    contributions: ContributionTable
    samples: SampleHistory


_SAVED = TypeAdapter(_Saved)


@dataclass(slots=True)
class PageMemory:
    """Contributions and texts of a run. Call ``save`` from one thread."""

    run: str = ""
    home: Path | None = None
    """Directory of the file; None: nothing is saved."""
    contributions: ContributionTable = field(default_factory=ContributionTable)
    samples: SampleHistory = field(default_factory=SampleHistory)
    _saved: bytes = b""

    @classmethod
    def load(cls, home: Path, run: str) -> Self:
        """Return what the home remembers of a run; nothing if the file is missing, damaged or of another run."""
        path = home / PAGE_FILE
        try:
            with path.open("rb") as file:
                saved = _SAVED.validate_json(file.read(MOST_BYTES))
            if saved.run == run:
                return cls(run, home, saved.contributions, saved.samples)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read, so it starts empty: %s", path, error)
        return cls(run, home)

    def save(self) -> None:
        """Write what has changed, without waiting for the disk. Raises OSError."""
        encoded = _SAVED.dump_json(_Saved(self.run, self.contributions, self.samples))
        if self.home is not None and encoded != self._saved:
            files.replace(self.home / PAGE_FILE, encoded, mode=0o600, lasting=False)
            self._saved = encoded
