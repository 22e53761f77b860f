"""Printable text for terminals and logs, whatever strangers or file names put into it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path, PosixPath

MOST_CHARS = 300
"""Characters of one line; enough for a path and an error. Guess: the lengths of real warnings would settle it."""

LIFETIME_UNITS = "30m, 12h or 7d"
"""Examples of what ``lifetime_s`` reads."""

PLAIN_WIDTH = 120
"""Columns of output that goes to a file, which has no width of its own."""


def printable(text: str | Path) -> str:
    """Replace unprintable characters by U+FFFD, so that text from strangers cannot control the terminal."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in f"{text}")


def printable_lines(text: str) -> str:
    """Return text of several lines as ``printable`` does, but keep line ends and tabs."""
    return "".join(letter if letter in "\n\t" else printable(letter) for letter in text)


class UserPath(PosixPath):
    """A path of the command line, or one derived from it.

    An f-string shows it quoted if a shell needs that, so that sentences name it as the user would type it. ``str``
    and the system get the plain path.
    """

    def __format__(self, spec: str) -> str:
        return format(shlex.quote(printable(str(self))), spec)


def one_line(text: str, most: int = MOST_CHARS) -> str:
    """Return printable text of at most ``most`` characters."""
    return printable(text if len(text) <= most else f"{text[: most - 1]}…")


def first_sentence(text: str) -> str:
    """Return the first sentence of a text, without its full stop."""
    return text.partition(". ")[0]


def command_line(*words: str | Path) -> str:
    """Return a command that can be pasted into a shell, whatever spaces, quotes and first letters its words have."""
    return shlex.join(
        f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word) for word in words
    )


def lifetime_s(text: str) -> int:
    """Convert ``30m``, ``12h`` or ``7d`` to seconds; 0 if the text is none of these."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})([mhd])", text.strip())
    return int(found[1]) * {"m": 60, "h": 3600, "d": 86_400}[found[2]] if found else 0
