"""A notebook for swarms: how often each kind of note was taken."""

from __future__ import annotations

from collections import defaultdict
from typing import Any


class NoteCounts:
    """``ports.Notebook`` that only counts."""

    def __init__(self) -> None:
        self.kinds: defaultdict[str, int] = defaultdict(int)

    def note(self, kind: str, **fields: Any) -> None:
        self.kinds[kind] += 1
