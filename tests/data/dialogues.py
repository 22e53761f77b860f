"""Made dialogues of a short, regular form, and corpora of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

COLOURS = ("red", "blue", "green", "black", "white", "brown", "pink", "grey")


def made(count: int) -> list[list[dict[str, str]]]:
    """Return dialogues in which the assistant says a colour again."""
    found = []
    for number in range(count):
        colour = COLOURS[number % len(COLOURS)]
        found.append(
            [{"role": "user", "content": f"say {colour}"}, {"role": "assistant", "content": f"it is {colour}!"}]
        )
    return found


def write_jsonl(path: Path, dialogues: object) -> Path:
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in dialogues))  # type: ignore[attr-defined]
    return path


def chat_corpus(path: Path, **fields: object) -> dict[str, object]:
    """Return the corpus section of a file of dialogues."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    section = {"kind": "file", "sha256": digest, "format": "jsonl", "text_field": "messages", "template": "chatml"}
    return section | fields
