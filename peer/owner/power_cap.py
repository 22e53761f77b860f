"""The power limit of the card that trains, set by ``nvidia-smi -pl`` and put back at the end.

::

    DIRECTORY/<card>.json    the earlier limit, while ours is set; after SIGKILL the next start puts it back
    DIRECTORY/<card>.lock    held by the one peer that sets this card's limit
"""

from __future__ import annotations

import json
from pathlib import Path

from filelock import FileLock, Timeout

from p2ptrain.base import files
from p2ptrain.base.system_tool import ToolError, output_of

MAX_BYTES = 256
NO_PERMISSION = 4
"""Exit status of nvidia-smi without the permission for an operation (man nvidia-smi)."""
CLOSE_WATTS = 1.0
"""Difference in W by which a card may round a limit."""


class PowerCap:
    """The cap of one card, used by one thread at a time.

    Args:
        directory: files of all peers of this user.
        card: the card's name for nvidia-smi; None without a card.
    """

    def __init__(self, directory: Path, card: str | None) -> None:
        self._directory = directory
        self._card = card
        self._locks: dict[str, FileLock] = {}
        self._wanted: int | None = None
        self._fault = ""
        self.left_capped = ""
        """Why an earlier limit could not be put back, and how to do so; "" if it was."""
        self.way_back = ""
        """What the owner does if this peer cannot put the limit back; "" while it has not changed any."""

    def apply(self, watts: int) -> str:
        """Set the limit to ``watts`` unless that was tried before; 0 puts the earlier limit back.

        Returns why the cap is not in effect, or "".
        """
        if watts != self._wanted:
            self._wanted = watts
            if watts:
                self._fault = self._set(watts)
            else:
                self.release()
                self._fault = self.left_capped
        return self._fault

    def release(self) -> None:
        """Put the earlier limits back, also those of peers that were killed; see ``left_capped``."""
        self.left_capped = ""
        for card in sorted(path.stem for path in self._directory.glob("GPU-*.json")):
            if (watts := self._earlier(card)) is None:
                continue
            try:
                if self._take(card):
                    output_of("nvidia-smi", "-i", card, "-pl", f"{watts:g}")
                    self._file(card).unlink(missing_ok=True)
            except (ToolError, OSError) as error:
                self.left_capped = f"{error}; {_way_back(card, watts)}"
        for card in list(self._locks):
            self._give(card)

    def _set(self, watts: int) -> str:
        card = self._card
        if card is None:
            return "this peer does not train on an NVIDIA card"
        path = self._file(card)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            if not self._take(card):
                self._wanted = None  # until that peer ends
                return "another peer on this computer sets this card's limit"
            earlier = self._earlier(card)
            if earlier is None:
                earlier = _limit(card)
                files.replace(path, json.dumps({"watts": earlier}).encode() + b"\n")
            self.way_back = _way_back(card, earlier)
            output_of("nvidia-smi", "-i", card, "-pl", str(watts))
            if abs(_limit(card) - watts) <= CLOSE_WATTS:
                return ""
            why = "the card did not take the limit"
        except OSError as error:
            why = f"{path} cannot be written: {error.strerror}"
        except ToolError as error:
            why = str(error)
            if error.status == NO_PERMISSION:
                why = f"only an administrator may set the limit; do so with: sudo nvidia-smi -i {card} -pl {watts}"
        try:
            before = self._earlier(card)
            if before is None or abs(_limit(card) - before) <= CLOSE_WATTS:  # nothing was changed
                path.unlink(missing_ok=True)
                self._give(card)
        except (ToolError, OSError):
            pass  # unknown: the end tries to put it back
        return why

    def _file(self, card: str) -> Path:
        return self._directory / f"{card}.json"

    def _take(self, card: str) -> bool:
        """Lock a card; return False if another peer holds it. Raises OSError."""
        lock = self._locks.get(card) or FileLock(self._directory / f"{card}.lock")
        if not lock.is_locked:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                return False
        self._locks[card] = lock
        return True

    def _give(self, card: str) -> None:
        self.way_back = ""
        if (lock := self._locks.pop(card, None)) is not None:
            lock.release()

    def _earlier(self, card: str) -> float | None:
        """Return a card's limit in W before a peer changed it; None if none did."""
        try:
            with self._file(card).open("rb") as file:
                watts = json.loads(file.read(MAX_BYTES))["watts"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return float(watts) if isinstance(watts, int | float) and watts > 0 else None


def _way_back(card: str, watts: float) -> str:
    return f"put the limit back with: sudo nvidia-smi -i {card} -pl {watts:g}"


def _limit(card: str) -> float:
    """Return the card's power limit in W. Raises ToolError."""
    text = output_of("nvidia-smi", "-i", card, "--query-gpu=power.limit", "--format=csv,noheader,nounits")
    try:
        return float(text)
    except ValueError:  # [N/A], [Not Supported]
        raise ToolError("the card does not report its power limit") from None
