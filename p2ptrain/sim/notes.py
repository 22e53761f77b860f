"""A notebook for simulated swarms, which counts notes by kind."""

from __future__ import annotations

from collections import defaultdict
from typing import Any


class NoteCounts:
    """A ``ports.Notebook`` that only counts."""

    def __init__(self) -> None:
        self.kinds: defaultdict[str, int] = defaultdict(int)

    def note(self, kind: str, **fields: Any) -> None:
        self.kinds[kind] += 1
