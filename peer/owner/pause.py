"""``HOME/paused.json``: exists while the owner has paused the peer, so that a pause outlives the process.

A missing or damaged file means not paused, because a peer that is paused forever without a reason would be worse.
"""

from __future__ import annotations

from pathlib import Path

from p2ptrain.base import files

FILE = "paused.json"
CONTENT = b'{"paused": true}\n'


class PauseFile:
    """The pause file of one home, written by one thread."""

    def __init__(self, home: Path) -> None:
        self.path = home / FILE

    def load(self) -> tuple[bool, str]:
        """Return whether an earlier process was paused, and what is wrong with the file or ""."""
        try:
            with self.path.open("rb") as file:
                is_ours = file.read(len(CONTENT) + 1) == CONTENT
        except FileNotFoundError:
            return False, ""
        except OSError as error:
            return False, f"{self.path} cannot be read: {error.strerror}; the peer is not paused"
        return is_ours, "" if is_ours else f"{self.path} is damaged; the peer is not paused"

    def keep(self, is_paused: bool) -> str:
        """Save the pause for the next start; return why that failed, or ""."""
        try:
            if is_paused:
                files.replace(self.path, CONTENT)
            else:
                self.path.unlink(missing_ok=True)
        except OSError as error:
            if is_paused:
                return f"{self.path} cannot be written: {error.strerror}; the next start will not be paused"
            return f"{self.path} cannot be removed: {error.strerror}; the next start will be paused"
        return ""
