"""``HOME/paused.json``: there while the owner has paused the peer, so that a pause outlives the process.

Without it, or where it is not what we wrote, the peer is not paused: a peer that rests for ever and does not know why
would be worse than one that trains.
"""

from __future__ import annotations

from pathlib import Path

from p2ptrain.base import files

FILE = "paused.json"
CONTENT = b'{"paused": true}\n'


class PauseFile:
    """The file of one home. Written by one thread."""

    def __init__(self, home: Path) -> None:
        self.path = home / FILE

    def load(self) -> tuple[bool, str]:
        """Whether an earlier process was paused; and what is wrong with the file, or nothing."""
        try:
            with self.path.open("rb") as file:
                is_ours = file.read(len(CONTENT) + 1) == CONTENT
        except FileNotFoundError:
            return False, ""
        except OSError as error:
            return False, f"{self.path} cannot be read: {error.strerror}; it counts as not paused"
        return is_ours, "" if is_ours else f"{self.path} is not what was written; it counts as not paused"

    def keep(self, is_paused: bool) -> str:
        """For the next start. Why that failed; empty when it did not."""
        try:
            if is_paused:
                files.replace(self.path, CONTENT)
            else:
                self.path.unlink(missing_ok=True)
        except OSError as error:
            if is_paused:
                return f"{self.path} cannot be written: {error.strerror}; the next start trains"
            return f"{self.path} cannot be removed: {error.strerror}; the next start is paused"
        return ""
