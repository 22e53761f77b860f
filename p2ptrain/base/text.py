"""Printable text for terminals and logs, whatever strangers or file names put into it."""

from __future__ import annotations

import shlex
from pathlib import Path

MOST_CHARS = 300
"""Characters of one line; enough for a path and an error. Guess: the lengths of real warnings would settle it."""

PLAIN_WIDTH = 120
"""Columns of output that goes to a file, which has no width of its own."""


def printable(text: str | Path) -> str:
    """Replace unprintable characters by U+FFFD, so that text from strangers cannot control the terminal."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in str(text))


def one_line(text: str, most: int = MOST_CHARS) -> str:
    """Return printable text of at most ``most`` characters."""
    return printable(text if len(text) <= most else f"{text[: most - 1]}…")


def command_line(*words: str | Path) -> str:
    """Return a command that can be pasted into a shell, whatever spaces and quotes its words contain."""
    return shlex.join(map(str, words))
