"""What ``init`` has noted of a run's text, beside its manifest: ``RUN/text.json``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from p2ptrain.data.rows import TextCounts

SUMMARY_FILE = "text.json"


@dataclass(frozen=True, slots=True)
class TextSummary:
    """What was read of a run's text."""

    counts: TextCounts
    warnings: list[str]
    """Sentences, without their full stops, on what was left out, replaced or lost."""
    sources: list[str]
    """Where the text came from, for people."""
    vocabulary: int
    """Ids of the tokenizer."""

    def to_bytes(self) -> bytes:
        return (json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n").encode()


def read_summary(run: Path) -> TextSummary | None:
    """Return the notes in a run's directory; None if there are none."""
    try:
        found = json.loads((run / SUMMARY_FILE).read_bytes())
        return TextSummary(**{**found, "counts": TextCounts(**found["counts"])})
    except (OSError, ValueError, LookupError, TypeError):
        return None
