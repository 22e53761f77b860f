"""The power limit of the card that trains, set by ``nvidia-smi -pl`` and put back at the end.

``HOME/card.json`` holds the earlier limit while ours is set, so that the next start puts it back after SIGKILL.
"""

from __future__ import annotations

import json
from pathlib import Path

from p2ptrain.base import files
from p2ptrain.base.system_tool import ToolError, output_of

FILE = "card.json"
MAX_BYTES = 256
NO_PERMISSION = 4
"""Exit status of nvidia-smi without the permission for an operation (man nvidia-smi)."""
CLOSE_WATTS = 1.0
"""Difference in W by which a card may round a limit."""


class PowerCap:
    """The cap of one card, used by one thread at a time.

    Args:
        home: the peer's home.
        card: the card's name for nvidia-smi; None without a card.
    """

    def __init__(self, home: Path, card: str | None) -> None:
        self._path = home / FILE
        self._card = card
        self._wanted: int | None = None
        self._fault = ""
        self.left_capped = ""
        """Why the earlier limit could not be put back, and how to do so; "" if it was."""

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
        """Put the earlier limit back, if one was replaced; see ``left_capped``."""
        before, self.left_capped = self._load(), ""
        if before is None:
            return
        card, watts = before
        try:
            output_of("nvidia-smi", "-i", card, "-pl", f"{watts:g}")
            self._path.unlink(missing_ok=True)
        except (ToolError, OSError) as error:
            self.left_capped = f"{error}; put the limit back with: sudo nvidia-smi -i {card} -pl {watts:g}"

    def _set(self, watts: int) -> str:
        card = self._card
        if card is None:
            return "this peer does not train on an NVIDIA card"
        try:
            earlier = self._load()
            if earlier is not None and earlier[0] != card:
                self.release()
                if self.left_capped:
                    return self.left_capped
                earlier = None
            if earlier is None:
                files.replace(self._path, json.dumps({"card": card, "watts": _limit(card)}).encode() + b"\n")
            output_of("nvidia-smi", "-i", card, "-pl", str(watts))
            if abs(_limit(card) - watts) <= CLOSE_WATTS:
                return ""
            why = "the card did not take the limit"
        except OSError as error:
            return f"{self._path} cannot be written: {error.strerror}"
        except ToolError as error:
            why = str(error)
            if error.status == NO_PERMISSION:
                why = f"only an administrator may set the limit; do so with: sudo nvidia-smi -i {card} -pl {watts}"
        before = self._load()
        try:
            if before is not None and abs(_limit(card) - before[1]) <= CLOSE_WATTS:  # nothing was changed
                self._path.unlink(missing_ok=True)
        except (ToolError, OSError):
            pass  # unknown: the end tries to put it back
        return why

    def _load(self) -> tuple[str, float] | None:
        """Return the card whose limit was changed and its earlier limit in W; None if there is none."""
        try:
            with self._path.open("rb") as file:
                document = json.loads(file.read(MAX_BYTES))
            card, watts = document["card"], document["watts"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        is_ours = isinstance(card, str) and card.startswith("GPU-") and isinstance(watts, int | float) and watts > 0
        return (card, float(watts)) if is_ours else None


def _limit(card: str) -> float:
    """Return the card's power limit in W. Raises ToolError."""
    text = output_of("nvidia-smi", "-i", card, "--query-gpu=power.limit", "--format=csv,noheader,nounits")
    try:
        return float(text)
    except ValueError:  # [N/A], [Not Supported]
        raise ToolError("the card does not tell its power limit") from None
